"""Keeps media hashes and placeholder tokens sent by clients out of page keys.

SGLang lets a request state the hashes of its images (``mm_hashes``, or fields of an image given as
an object), for routers whose page keys must equal SGLang's. A client that states the hash of
another user's image gives that image the KV of its own. It stays in memory until it is evicted, in
the tiers permanently, and on every server that shares them. Without these hashes SGLang computes
its own.

In a page key an image is a run of numbers beyond every vocabulary, made from its hash. SGLang
accepts such numbers in ``input_ids`` too, from any client that knows the image, so they are
refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE

from sglang_tiered.config import TieredConfig

_MEDIA = ("image_data", "video_data", "audio_data")
HASHES = frozenset({"hash", "identity", "pad_value", "pad_values"})

logger = logging.getLogger(__name__)


def drop_client_hashes(request: Any) -> None:
    """Remove the hashes from a request that is about to be tokenized, unless an operator trusts
    clients or no tier would keep the pages."""
    given = {name: getattr(request, name, None) for name in _MEDIA}
    kept = {name: _without_hashes(value) for name, value in given.items()}
    changed = {name: kept[name] for name in _MEDIA if kept[name] is not given[name]}
    if getattr(request, "mm_hashes", None):
        changed["mm_hashes"] = None
    if changed and not _trusts_clients():
        for name, value in changed.items():
            setattr(request, name, value)
        _warn_once()


def refuse_placeholder_tokens(request: Any, vocab_size: int) -> None:
    """Raise ``ValueError``, which SGLang answers with 400, for a request with placeholder tokens.
    Some models have image tokens right behind their vocabulary, so the limit is where placeholders
    begin."""
    limit = max(vocab_size, MM_PAD_SHIFT_VALUE)
    given = [getattr(request, "input_ids", None)]
    for name in _MEDIA:
        given += _token_ids_within(getattr(request, name, None))
    for token_ids in given:
        unknown = _first_unknown_token(token_ids, limit)
        if unknown is not None and not _trusts_clients():
            raise ValueError(
                f"input_ids holds {unknown}, which is not a token of the model (its vocabulary "
                f"has {vocab_size}) and could stand for another user's image; send tokens only."
            )


def _trusts_clients() -> bool:
    """Return whether an operator trusts clients, or no tier would keep the pages."""
    config = TieredConfig.from_environment()
    return config is None or config.nvme is None or config.nvme.trust_mm_hashes


def _token_ids_within(media: Any) -> list[Any]:
    """Return the ``input_ids`` of images given as objects."""
    if isinstance(media, Mapping):
        return [media.get("input_ids")]
    if isinstance(media, (list, tuple)):
        return [token_ids for each in media for token_ids in _token_ids_within(each)]
    return []


def _first_unknown_token(token_ids: Any, limit: int) -> Any:
    """Return a value that is not a number from 0 to below the limit; None if all are."""
    if hasattr(token_ids, "tolist"):
        token_ids = token_ids.tolist()
    if token_ids is None or token_ids == []:
        return None
    try:
        low, high = min(token_ids), max(token_ids)
        return None if low >= 0 and high < limit else low if low < 0 else high
    except TypeError:  # lists of lists, or no numbers at all
        if not isinstance(token_ids, list) or not all(isinstance(x, list) for x in token_ids):
            return "something that is not a number"
        unknowns = (_first_unknown_token(each, limit) for each in token_ids)
        return next((each for each in unknowns if each is not None), None)


def _without_hashes(media: Any) -> Any:
    """Return media without hashes; the same object if it has none."""
    if isinstance(media, Mapping):
        if not HASHES & media.keys():
            return media
        return {name: value for name, value in media.items() if name not in HASHES}
    if isinstance(media, (list, tuple)):
        kept = [_without_hashes(each) for each in media]
        return kept if any(a is not b for a, b in zip(kept, media, strict=True)) else media
    return media


@cache
def _warn_once() -> None:
    logger.warning(
        "a request states hashes of its media (a client could store one image's pages under "
        "another's key); they are ignored from now on, unless --tier-trust-mm-hashes is on"
    )

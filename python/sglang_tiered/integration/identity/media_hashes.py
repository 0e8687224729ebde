"""Hashes and stand-ins of media that come from a client, kept out of page keys.

SGLang lets a request say what its images hash to (``mm_hashes``, or fields of an image given as an
object), for routers that want its page keys to equal theirs. Whoever says it for another's image
gives that image the KV of their own; in memory until it is evicted, with tiers for good, and for
every server that shares them. Without these hashes SGLang computes its own.

In a page key an image is numbers past every vocabulary, made of its hash. SGLang takes such numbers
in ``input_ids`` as well, from whoever knows the image, so they are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE

from sglang_tiered.config import TieredConfig

__all__ = ["drop_clients_hashes", "refuse_clients_stand_ins"]

_MEDIA = ("image_data", "video_data", "audio_data")
_HASHES = frozenset({"hash", "identity", "pad_value", "pad_values"})

logger = logging.getLogger(__name__)


def drop_clients_hashes(request: Any) -> None:
    """Of a request of SGLang's that is about to be tokenized, unless an operator trusts them or no
    tier would keep what comes of it."""
    media = {name: getattr(request, name, None) for name in _MEDIA}
    kept = {name: _without_hashes(value) for name, value in media.items()}
    changed = [name for name in _MEDIA if kept[name] is not media[name]]
    if not changed and not getattr(request, "mm_hashes", None):
        return
    if _believes_clients():
        return
    if getattr(request, "mm_hashes", None):
        request.mm_hashes = None
    for name in changed:
        setattr(request, name, kept[name])
    _tell()


def refuse_clients_stand_ins(request: Any, vocab_size: int) -> None:
    """Of the same request. Raises ``ValueError``, which SGLang answers with 400. Some models have
    tokens for images right behind their vocabulary, so the limit is where stand-ins begin."""
    limit = max(vocab_size, MM_PAD_SHIFT_VALUE)
    given = [getattr(request, "input_ids", None)]
    for name in _MEDIA:
        given += _token_ids_within(getattr(request, name, None))
    for token_ids in given:
        stranger = _first_stranger(token_ids, limit)
        if stranger is not None and not _believes_clients():
            raise ValueError(
                f"input_ids holds {stranger}, which is no token of the model (its vocabulary has "
                f"{vocab_size} of them) and could stand for an image of somebody else; send "
                "tokens only."
            )


def _believes_clients() -> bool:
    """An operator does, or no tier would keep what comes of it."""
    config = TieredConfig.from_environment()
    return config is None or config.nvme is None or config.nvme.trust_mm_hashes


def _token_ids_within(media: Any) -> list[Any]:
    """Of images given as objects."""
    if isinstance(media, Mapping):
        return [media.get("input_ids")]
    if isinstance(media, (list, tuple)):
        return [token_ids for each in media for token_ids in _token_ids_within(each)]
    return []


def _first_stranger(token_ids: Any, limit: int) -> Any:
    """What is no number from 0 to below the limit; None where all are."""
    if hasattr(token_ids, "tolist"):
        token_ids = token_ids.tolist()
    if token_ids is None or token_ids == []:
        return None
    try:
        low, high = min(token_ids), max(token_ids)
        return None if low >= 0 and high < limit else low if low < 0 else high
    except TypeError:  # lists of lists, or no numbers at all
        if not isinstance(token_ids, list) or not all(isinstance(x, list) for x in token_ids):
            return "something that is no number"
        strangers = (_first_stranger(each, limit) for each in token_ids)
        return next((each for each in strangers if each is not None), None)


def _without_hashes(media: Any) -> Any:
    """The same object where there is nothing to drop."""
    if isinstance(media, Mapping):
        if not _HASHES & media.keys():
            return media
        return {name: value for name, value in media.items() if name not in _HASHES}
    if isinstance(media, (list, tuple)):
        kept = [_without_hashes(each) for each in media]
        return kept if any(a is not b for a, b in zip(kept, media, strict=True)) else media
    return media


@cache
def _tell() -> None:
    logger.warning(
        "a request brought hashes of its media along, which are ignored, here and from now on: a "
        "client could store one image's pages under another's name for good; "
        "--tier-trust-mm-hashes on takes them"
    )

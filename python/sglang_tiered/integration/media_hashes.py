"""Hashes of media that come from a client, kept out of page keys.

SGLang lets a request say what its images hash to (``mm_hashes``, or fields of an image given as an
object), for routers that want its page keys to equal theirs. Whoever says it for another's image
gives that image the KV of their own; in memory until it is evicted, with tiers for good, and for
every server that shares them. Without these hashes SGLang computes its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from sglang_tiered.config import TieredConfig

__all__ = ["drop_clients_hashes"]

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
    config = TieredConfig.from_environment()
    if config is None or config.nvme is None or config.nvme.trust_mm_hashes:
        return
    if getattr(request, "mm_hashes", None):
        request.mm_hashes = None
    for name in changed:
        setattr(request, name, kept[name])
    _tell()


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

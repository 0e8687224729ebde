"""Page codecs: fewer bytes in a slow tier. ``README.md`` has formats, errors and speeds."""

from __future__ import annotations

from sglang_tiered.storage.codecs.base import (
    CodecError,
    PageCodec,
    PageLayout,
    SegmentLayout,
)

__all__ = ["CodecError", "PageCodec", "PageLayout", "SegmentLayout"]

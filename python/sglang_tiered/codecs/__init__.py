"""Page codecs, for fewer bytes in a slow tier. ``README.md`` has formats, errors and speeds."""

from __future__ import annotations

from sglang_tiered.codecs.base import PageLayout, SegmentLayout
from sglang_tiered.codecs.encoded import PageCodec
from sglang_tiered.codecs.quantized import Fp8Codec, Int8Codec
from sglang_tiered.errors import CodecError, ConfigError

__all__ = [
    "CODEC_NAMES",
    "LOSSY_CODEC_NAMES",
    "NO_CODEC",
    "CodecError",
    "PageCodec",
    "PageLayout",
    "SegmentLayout",
    "make_codec",
]

NO_CODEC = "none"
"""Names pages that are not encoded: an engine needs no codec for it."""

_CODECS: dict[str, type[PageCodec]] = {
    codec.name: codec for codec in (PageCodec, Fp8Codec, Int8Codec)
}
CODEC_NAMES = (NO_CODEC, *_CODECS)
LOSSY_CODEC_NAMES = (Fp8Codec.name, Int8Codec.name)


def make_codec(name: str, layout: PageLayout) -> PageCodec:
    """A codec for pages of ``layout``. Raises ``ConfigError`` for an unknown name, for ``none``,
    and for a lossy one with an unknown layout."""
    if name not in _CODECS:
        raise ConfigError(f"the codec is {name!r}; known are {', '.join(_CODECS)}.")
    return _CODECS[name](layout)

"""``int8``: 256 even steps from the least to the largest value of each channel, per head.

Asymmetric, because keys sit around a value of their own in many channels; per channel, because the
ranges of channels differ by far more than those of tokens. The least value and the step are kept
as bfloat16, rounded outwards so that the range still covers the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.codecs.dtypes import float32_to_bytes, to_float32, widened
from sglang_tiered.codecs.encoded import METHOD_INT8
from sglang_tiered.codecs.quantized import Block, QuantizingCodec, UnfitPageError
from sglang_tiered.errors import CodecError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sglang_tiered.codecs.base import PageLayout

    Bytes = NDArray[np.uint8]
    Floats = NDArray[np.float32]

__all__ = ["GROUP_ELEMENTS", "Int8Codec"]

GROUP_ELEMENTS = 64
"""Elements per scale of 4 bytes, at least: in pages with fewer tokens, channels share a scale."""

_NUM_STEPS = 255
# Above it, the end of a range, rounded outwards, might be infinite.
_TOO_LARGE = {"bfloat16": 2.0**120, "float32": 2.0**120, "float16": 61440.0}


class Int8Codec(QuantizingCodec):
    """Errs by at most half a step (the channel's range over 510) and the rounding of the dtype."""

    name = "int8"
    method = METHOD_INT8
    scale_bytes = 4

    def __init__(self, layout: PageLayout) -> None:
        tokens = max(
            (
                length
                for segment in layout.segments
                for axis, length in zip(segment.axes, segment.shape, strict=True)
                if axis == "token"
            ),
            default=1,
        )
        super().__init__(layout, max(1, GROUP_ELEMENTS // tokens))
        self._too_large = _TOO_LARGE[layout.dtype]

    def _encode_block(self, block: Block, plain: Bytes, codes: Bytes) -> Bytes:
        values = to_float32(plain, self._layout.dtype).reshape(block.shape)
        least = block.reduce(np.minimum, values)
        largest = block.reduce(np.maximum, values)
        # A NaN makes the comparison false.
        if not (least.min() >= -self._too_large and largest.max() <= self._too_large):
            raise UnfitPageError
        low = _to_bfloat16(np.asarray(least, np.float32), up=False)
        step = _to_bfloat16((largest - widened(low)) / np.float32(_NUM_STEPS), up=True)
        wide_step = widened(step)
        inverse = np.zeros_like(wide_step)
        # A step too small to invert belongs to a channel of equal or nearly equal values.
        np.divide(1, wide_step, out=inverse, where=wide_step > 2.0**-125)
        scaled = values - block.spread(widened(low))
        scaled *= block.spread(inverse)
        np.rint(scaled, out=scaled)
        np.minimum(scaled, np.float32(_NUM_STEPS), out=scaled)
        codes[...] = scaled.astype(np.uint8)
        return np.stack([low, step], axis=-1).reshape(-1).view(np.uint8)

    def _decode_block(self, block: Block, scales: Bytes, codes: Bytes) -> Bytes:
        pairs = np.ascontiguousarray(scales).view(np.uint16).reshape(*block.scale_shape, 2)
        low, step = widened(pairs[..., 0]), widened(pairs[..., 1])
        bound = np.float32(self._too_large * 1.02)
        # Also false of a NaN.
        if not (np.abs(low).max() <= bound and step.min() >= 0 and step.max() <= bound / 100):
            raise CodecError("a scale is one that is never written")
        values = codes.astype(np.float32)
        values *= block.spread(step)
        values += block.spread(low)
        return float32_to_bytes(values, self._layout.dtype)


def _to_bfloat16(values: Floats, *, up: bool) -> NDArray[np.uint16]:
    """The bits of the next bfloat16 not below (``up``) or not above each value."""
    bits = values.view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    is_cut = (bits & np.uint32(0xFFFF)) != 0
    is_negative = (bits >> np.uint32(31)).astype(bool)
    # Cutting bits off brings a value nearer to zero: down if positive, up if negative.
    upper += is_cut & (is_negative != up)
    return upper

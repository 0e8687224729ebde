"""``fp8``: e4m3 (torch's ``float8_e4m3fn``) times a power of two per head and 16 channels.

A float keeps its relative error whatever the scale, so a power of two, which makes scaling exact
and one byte of scale enough, loses nothing against a finer one. The scale puts the largest element
of its group into the upper binade of e4m3 that holds it. Elements 2**14 times smaller and less lose
bits of their mantissa, those 2**18 times smaller become zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.codecs.dtypes import bfloat16_to_bytes, to_odd_bfloat16
from sglang_tiered.codecs.encoded import METHOD_FP8
from sglang_tiered.codecs.quantized import Block, QuantizingCodec, UnfitPageError
from sglang_tiered.errors import CodecError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sglang_tiered.codecs.base import PageLayout

    Bytes = NDArray[np.uint8]

__all__ = ["CHANNEL_GROUP", "Fp8Codec"]

CHANNEL_GROUP = 16

# Bits of bfloat16, without the sign: exponent (bias 127) << 7 | mantissa.
_LARGEST = 0x43E0  # 448, the largest e4m3
_TOO_LARGE = {
    "bfloat16": 0x7B80,  # 2**120: scaled back, the code rounded up must stay finite
    "float32": 0x7B80,
    "float16": 0x4771,  # above 61440: rounded up it would be 65536, infinity in float16
}
_EXPONENT_OFFSET = 120  # of e4m3's bias, 7, below bfloat16's
_MIN_SCALE, _MAX_SCALE, _SCALE_BIAS = -110, 112, 128

# Codes of what is below 2**-6, e4m3's smallest normal number: by bits less the offset, from -512.
_SUBNORMAL_START = -512
_NAN = 0x7F


def _subnormal_codes() -> NDArray[np.int16]:
    bits = np.arange(_SUBNORMAL_START, 128)
    multiples = (128 + (bits & 127)) * 2.0 ** ((bits >> 7) - 5)  # of 2**-9
    codes: NDArray[np.int16] = np.rint(multiples).astype(np.int16)
    return codes


def _subnormal_bits() -> NDArray[np.int16]:
    codes = np.arange(1, 8)
    exponents = np.floor(np.log2(codes)).astype(np.int64)
    mantissas = (codes / 2.0**exponents - 1) * 128
    bits = np.zeros(8, np.int16)
    bits[1:] = ((exponents - 2) << 7) + mantissas
    return bits


_SUBNORMAL_CODES = _subnormal_codes()
_SUBNORMAL_BITS = _subnormal_bits()  # of the values of codes 0 to 7, likewise less the offset


class Fp8Codec(QuantizingCodec):
    """Keeps a relative error of at most 2**-4 for values not far below the largest of their
    group."""

    name = "fp8"
    method = METHOD_FP8
    scale_bytes = 1

    def __init__(self, layout: PageLayout) -> None:
        super().__init__(layout, CHANNEL_GROUP)
        self._too_large = _TOO_LARGE[layout.dtype]

    def _encode_block(self, block: Block, plain: Bytes, codes: Bytes) -> Bytes:
        bits = to_odd_bfloat16(plain, self._layout.dtype).reshape(block.shape)
        magnitude = (bits & np.uint16(0x7FFF)).view(np.int16)
        largest = block.reduce(np.maximum, magnitude)
        if int(largest.max()) >= self._too_large:
            raise UnfitPageError
        # The least power of two by which the largest is at most 448: rounded up.
        scale = -((_LARGEST - largest.astype(np.int32)) >> 7)
        scale = np.maximum(scale, _MIN_SCALE)
        offset = ((scale + _EXPONENT_OFFSET) << 7).astype(np.int16)
        magnitude -= block.spread(offset)
        # To three bits of mantissa, to nearest, ties to even.
        rounded = magnitude >> np.int16(4)
        rounded &= np.int16(1)
        rounded += magnitude
        rounded += np.int16(7)
        rounded >>= np.int16(4)
        _set_subnormals(magnitude, rounded)
        rounded |= (bits >> np.uint16(8)).view(np.int16) & np.int16(0x80)
        codes[...] = rounded.astype(np.uint8)
        scales: Bytes = (scale + _SCALE_BIAS).astype(np.uint8)
        return scales.reshape(-1)

    def _decode_block(self, block: Block, scales: Bytes, codes: Bytes) -> Bytes:
        scale = scales.astype(np.int16).reshape(block.scale_shape) - np.int16(_SCALE_BIAS)
        if int(scale.min()) < _MIN_SCALE or int(scale.max()) > _MAX_SCALE:
            raise CodecError("a scale is one that is never written")
        wide = codes.astype(np.int16)
        magnitude = wide & np.int16(0x7F)
        if int(magnitude.max()) == _NAN:
            raise CodecError("a code is not a number")
        offset = block.spread((scale + np.int16(_EXPONENT_OFFSET)) << np.int16(7))
        bits = magnitude << np.int16(4)
        bits += offset
        small = np.flatnonzero(magnitude < 8)
        if small.size:
            code = magnitude.reshape(-1)[small]
            shifts = np.broadcast_to(offset, block.shape).reshape(-1)[small]
            bits.reshape(-1)[small] = np.where(code > 0, _SUBNORMAL_BITS[code] + shifts, 0)
        wide &= np.int16(0x80)
        wide <<= np.int16(8)
        bits |= wide
        return bfloat16_to_bytes(bits.view(np.uint16), self._layout.dtype)


def _set_subnormals(magnitude: NDArray[np.int16], rounded: NDArray[np.int16]) -> None:
    """Set the codes below the smallest normal number: in usual pages, one element in thousands."""
    small = np.flatnonzero(magnitude < 128)
    if small.size:
        places = magnitude.reshape(-1)[small].astype(np.intp) - _SUBNORMAL_START
        rounded.reshape(-1)[small] = _SUBNORMAL_CODES[np.maximum(places, 0)]

"""The lossy codecs, ``fp8`` and ``int8``: scales per head and group of channels, codes of one byte.

A group is some neighbouring channels of one head and layer over all tokens of the page.
``ZstdCodec`` stores some pages exactly instead. They are not of the layout's length, or hold a
number that could not come back as a finite one near it (NaN, infinity, the very largest).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.codecs.chunks import ChunkReader, pack_chunk
from sglang_tiered.codecs.dtypes import (
    FLOAT_DTYPES,
    bfloat16_to_bytes,
    float32_to_bytes,
    to_float32,
    to_odd_bfloat16,
    widened,
)
from sglang_tiered.codecs.encoded import (
    HEADER_BYTES,
    METHOD_FP8,
    METHOD_INT8,
    Header,
    joined,
    pack_header,
    spread,
    unpack_header,
)
from sglang_tiered.codecs.zstd import ZstdCodec
from sglang_tiered.errors import CodecError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from sglang_tiered.codecs.base import PageLayout, Segments

    Bytes = NDArray[np.uint8]
    Floats = NDArray[np.float32]

__all__ = ["Fp8Codec", "Int8Codec"]

_BLOCK_ELEMENTS = 1 << 17
"""Elements per block, about: arrays that fit a core's cache, and few calls."""


class UnfitPageError(Exception):
    """A page holds values that this codec cannot express; it is stored exactly."""


class Block:
    """A part of a page with scales of its own, small enough for its arrays to stay in cache.

    ``shape`` is that of its elements; ``token_axis`` and the last axis are what scales span.
    """

    def __init__(
        self, start: int, shape: tuple[int, ...], token_axis: int, channel_group: int
    ) -> None:
        self.start = start  # in elements, from the start of the page
        self.shape = shape
        self.token_axis = token_axis
        self.num_elements = int(np.prod(shape))
        self._group = min(channel_group, shape[-1])
        self._starts = np.arange(0, shape[-1], self._group)
        self.scale_shape = (*shape[:token_axis], *shape[token_axis + 1 : -1], len(self._starts))
        self.num_scales = int(np.prod(self.scale_shape))

    def elements(self, values: NDArray[Any]) -> NDArray[Any]:
        """This block's part of a page's flat elements, in its shape."""
        return values[self.start : self.start + self.num_elements].reshape(self.shape)

    def reduce(self, operation: np.ufunc, values: NDArray[Any]) -> NDArray[Any]:
        """``operation`` over the tokens and over each group of channels, in ``scale_shape``."""
        over_tokens = operation.reduce(values, axis=self.token_axis)
        if self._group == 1:
            return np.asarray(over_tokens)
        return np.asarray(operation.reduceat(over_tokens, self._starts, axis=-1))

    def spread(self, scales: NDArray[Any]) -> NDArray[Any]:
        """The scales in a shape that broadcasts over the elements."""
        if self._group > 1:
            scales = np.repeat(scales, self._group, axis=-1)[..., : self.shape[-1]]
        return np.expand_dims(scales, self.token_axis)


class QuantizingCodec(ABC):
    """A codec with one code of a byte per element and ``scale_bytes`` per group."""

    name: str
    method: int
    scale_bytes: int

    def __init__(self, layout: PageLayout, channel_group: int) -> None:
        if not layout.is_known or layout.dtype not in FLOAT_DTYPES:
            is_float = layout.dtype in FLOAT_DTYPES
            lacks = (
                "that of this one is not known" if is_float else f"this one holds {layout.dtype}"
            )
            raise ConfigError(
                f"the codec {self.name} needs a KV cache of {', '.join(FLOAT_DTYPES)} in a known "
                f"layout, and {lacks}; use zstd or none."
            )
        self._layout = layout
        self._lossless = ZstdCodec(layout)
        self._blocks = list(_blocks(layout, channel_group))
        self._num_scales = sum(block.num_scales for block in self._blocks)
        self._num_elements = layout.page_bytes // layout.item_bytes
        self._header = pack_header(
            Header(self.method, layout.item_bytes, layout.digest, layout.page_bytes)
        )

    def encode(self, page: Segments) -> Segments:
        plain = joined(page)
        if plain.nbytes != self._layout.page_bytes:
            return self._lossless.encode_bytes(plain)
        scales = np.empty(self._num_scales * self.scale_bytes, np.uint8)
        codes = np.empty(self._num_elements, np.uint8)
        item_bytes = self._layout.item_bytes
        position = 0
        try:
            for block in self._blocks:
                end = position + block.num_scales * self.scale_bytes
                begin = block.start * item_bytes
                scales[position:end] = self._encode_block(
                    block,
                    plain[begin : begin + block.num_elements * item_bytes],
                    block.elements(codes),
                )
                position = end
        except UnfitPageError:
            return self._lossless.encode_bytes(plain)
        return (memoryview(self._header), *pack_chunk(scales), *pack_chunk(codes))

    def decode(self, data: memoryview, page: Segments) -> None:
        if unpack_header(data).method != self.method:
            self._lossless.decode(data, page)
            return
        page_bytes = sum(segment.nbytes for segment in page)
        if bytes(data[:HEADER_BYTES]) != self._header or page_bytes != self._layout.page_bytes:
            raise CodecError(
                f"a page was encoded as {unpack_header(data)}, not for {page_bytes} bytes of "
                f"layout {self._layout.digest:#010x}"
            )
        reader = ChunkReader(data[HEADER_BYTES:])
        scales = reader.chunk(self._num_scales * self.scale_bytes)
        codes = reader.chunk(self._num_elements)
        reader.finish()
        spread(self._decoded_blocks(scales, codes), page)

    def _decoded_blocks(self, scales: Bytes, codes: Bytes) -> Iterator[Bytes]:
        position = 0
        for block in self._blocks:
            end = position + block.num_scales * self.scale_bytes
            yield self._decode_block(block, scales[position:end], block.elements(codes))
            position = end

    @abstractmethod
    def _encode_block(self, block: Block, plain: Bytes, codes: Bytes) -> Bytes:
        """Write the codes (of the block's shape), return the scales. Raises ``UnfitPageError``."""

    @abstractmethod
    def _decode_block(self, block: Block, scales: Bytes, codes: Bytes) -> Bytes:
        """The block's elements as flat bytes. Raises ``CodecError``."""


def _blocks(layout: PageLayout, channel_group: int) -> Iterator[Block]:
    """Blocks of a few rows of the slowest axis; one per segment if that is the tokens' axis."""
    start = 0
    for segment in layout.segments:
        axes, shape = segment.axes, segment.shape
        if "token" not in axes:
            axes, shape = ("token", *axes), (1, *shape)
        token_axis = axes.index("token")
        num_rows = row = shape[0]
        if token_axis > 0:
            row = max(1, _BLOCK_ELEMENTS * num_rows // segment.num_elements)
        for first in range(0, num_rows, row):
            rows = min(row, num_rows - first)
            block = Block(start, (rows, *shape[1:]), token_axis, channel_group)
            yield block
            start += block.num_elements


CHANNEL_GROUP = 16

# Bits of bfloat16, without the sign: exponent (bias 127) << 7 | mantissa.
_LARGEST = 0x43E0  # 448, the largest e4m3
_FP8_TOO_LARGE = {
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
    """e4m3 (torch's ``float8_e4m3fn``) times a power of two per head and 16 channels. Keeps a
    relative error of at most 2**-4 for values not far below the largest of their group.

    A float keeps its relative error whatever the scale, so a power of two, which makes scaling
    exact and one byte of scale enough, loses nothing against a finer one. The scale puts the
    largest element of its group into the upper binade of e4m3 that holds it. Elements 2**14 times
    smaller and less lose bits of their mantissa, those 2**18 times smaller become zero.
    """

    name = "fp8"
    method = METHOD_FP8
    scale_bytes = 1

    def __init__(self, layout: PageLayout) -> None:
        super().__init__(layout, CHANNEL_GROUP)
        self._too_large = _FP8_TOO_LARGE[layout.dtype]

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


GROUP_ELEMENTS = 64
"""Elements per scale of 4 bytes, at least: in pages with fewer tokens, channels share a scale."""

_NUM_STEPS = 255
# Above it, the end of a range, rounded outwards, might be infinite.
_INT8_TOO_LARGE = {"bfloat16": 2.0**120, "float32": 2.0**120, "float16": 61440.0}


class Int8Codec(QuantizingCodec):
    """256 even steps from the least to the largest value of each channel, per head. Errs by at most
    half a step (the channel's range over 510) and the rounding of the dtype.

    Asymmetric, because keys sit around a value of their own in many channels; per channel, because
    the ranges of channels differ by far more than those of tokens. The least value and the step are
    kept as bfloat16, rounded outwards so that the range still covers the group.
    """

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
        self._too_large = _INT8_TOO_LARGE[layout.dtype]

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

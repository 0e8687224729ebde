"""The lossy codecs, ``fp8`` and ``int8``: scales per head and group of channels, codes of one byte.

A group is some neighbouring channels of one head and layer over all tokens of the page.
``PageCodec`` stores some pages exactly instead. They are not of the layout's length, or hold a
number that could not come back as a finite one near it (NaN, infinity, the very largest).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.codecs.base import FLOAT_DTYPES, float32_to_bytes, to_float32, widened
from sglang_tiered.codecs.encoded import (
    HEADER_BYTES,
    METHOD_FP8,
    METHOD_INT8,
    ChunkReader,
    Header,
    PageCodec,
    joined,
    pack_chunk,
    pack_header,
)
from sglang_tiered.errors import CodecError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from sglang_tiered.codecs.base import PageLayout, Segments

    Bytes = NDArray[np.uint8]
    Floats = NDArray[np.float32]


_BLOCK_ELEMENTS = 1 << 17
"""Elements per block, about: arrays that fit a core's cache, and few calls."""


_LARGEST = {"bfloat16": 2.0**120, "float32": 2.0**120, "float16": 61440.0}
"""Above it, what is rounded up or outwards might be infinite."""


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


class QuantizingCodec(PageCodec):
    """A codec with one code of a byte per element and ``scale_bytes`` per group. What it cannot
    express is stored exactly."""

    method: int
    scale_bytes: int

    def __init__(self, layout: PageLayout, channel_group: int) -> None:
        super().__init__(layout)
        if not layout.is_known or layout.dtype not in FLOAT_DTYPES:
            is_float = layout.dtype in FLOAT_DTYPES
            lacks = (
                "that of this one is not known" if is_float else f"this one holds {layout.dtype}"
            )
            raise ConfigError(
                f"the codec {self.name} needs a KV cache of {', '.join(FLOAT_DTYPES)} in a known "
                f"layout, and {lacks}; use zstd or none."
            )
        self._blocks = list(_blocks(layout, channel_group))
        self._num_scales = sum(block.num_scales for block in self._blocks)
        self._num_elements = layout.page_bytes // layout.item_bytes
        self._header = pack_header(
            Header(self.method, layout.item_bytes, self._layout_digest, layout.page_bytes)
        )

    def encode(self, page: Segments) -> Segments:
        plain = joined(page)
        if plain.nbytes != self._layout.page_bytes:
            return super().encode((plain.data,))
        scales = np.empty(self._num_scales * self.scale_bytes, np.uint8)
        codes = np.empty(self._num_elements, np.uint8)
        dtype, item_bytes = self._layout.dtype, self._layout.item_bytes
        position = 0
        for block in self._blocks:
            part = plain[block.start * item_bytes :][: block.num_elements * item_bytes]
            values = to_float32(part, dtype).reshape(block.shape)
            least, largest = block.reduce(np.minimum, values), block.reduce(np.maximum, values)
            # A NaN makes the comparison false.
            if not (least.min() >= -_LARGEST[dtype] and largest.max() <= _LARGEST[dtype]):
                return super().encode((plain.data,))
            end = position + block.num_scales * self.scale_bytes
            scales[position:end] = self._encode_block(
                block, values, least, largest, block.elements(codes)
            )
            position = end
        return (memoryview(self._header), *pack_chunk(scales), *pack_chunk(codes))

    def _decoded(self, header: Header, data: memoryview) -> Iterable[Bytes]:
        if header.method != self.method:
            return super()._decoded(header, data)
        if header.page_bytes != self._layout.page_bytes:
            raise CodecError(f"a page of {header.page_bytes} bytes is not of the layout")
        reader = ChunkReader(data[HEADER_BYTES:])
        scales = reader.chunk(self._num_scales * self.scale_bytes)
        codes = reader.chunk(self._num_elements)
        reader.finish()
        return self._decoded_blocks(scales, codes)

    def _decoded_blocks(self, scales: Bytes, codes: Bytes) -> Iterator[Bytes]:
        position = 0
        for block in self._blocks:
            end = position + block.num_scales * self.scale_bytes
            values = self._decode_block(block, scales[position:end], block.elements(codes))
            yield float32_to_bytes(values, self._layout.dtype)
            position = end

    @abstractmethod
    def _encode_block(
        self, block: Block, values: Floats, least: Floats, largest: Floats, codes: Bytes
    ) -> Bytes:
        """Write the codes of ``values`` (of the block's shape), return the scales. ``least`` and
        ``largest`` are of each group."""

    @abstractmethod
    def _decode_block(self, block: Block, scales: Bytes, codes: Bytes) -> Floats:
        """The block's elements. Raises ``CodecError``."""


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

_MIN_SCALE, _MAX_SCALE, _SCALE_BIAS = -110, 112, 128
_SMALLEST_NORMAL = 2.0**-6
_EXPONENT_OFFSET = np.uint32(120 << 3)  # of e4m3's bias, 7, below float32's
_DROPPED_BITS = np.uint32(20)  # of float32's mantissa


def _e4m3_numbers() -> Floats:
    """The number of each code, exactly. Code 0x7f, and that with a sign, stand for none."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa / 512)
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


_E4M3 = _e4m3_numbers()
_E4M3_IS_NAN = (np.arange(256) & 0x7F) == 0x7F


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

    def _encode_block(
        self, block: Block, values: Floats, least: Floats, largest: Floats, codes: Bytes
    ) -> Bytes:
        # The least power of two by which the largest is at most 448, e4m3's: 0.875 * 2**9.
        mantissa, exponent = np.frexp(np.maximum(-least, largest))
        scale = np.where(mantissa > 0, exponent - 9 + (mantissa > 0.875), _MIN_SCALE)
        scale = np.maximum(scale, _MIN_SCALE)
        codes[...] = _to_e4m3(values * block.spread(np.ldexp(np.float32(1), -scale)))
        scales: Bytes = (scale + _SCALE_BIAS).astype(np.uint8)
        return scales.reshape(-1)

    def _decode_block(self, block: Block, scales: Bytes, codes: Bytes) -> Floats:
        scale = scales.astype(np.int32).reshape(block.scale_shape) - _SCALE_BIAS
        if int(scale.min()) < _MIN_SCALE or int(scale.max()) > _MAX_SCALE:
            raise CodecError("a scale is one that is never written")
        if _E4M3_IS_NAN[codes].any():
            raise CodecError("a code is not a number")
        values: Floats = _E4M3[codes]
        values *= block.spread(np.ldexp(np.float32(1), scale))
        return values


def _to_e4m3(values: Floats) -> NDArray[np.uint32]:
    """Codes of numbers of at most 448, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    codes = bits & np.uint32(0x7FFFFFFF)
    small = np.flatnonzero(codes < np.float32(_SMALLEST_NORMAL).view(np.uint32))
    is_odd = codes >> _DROPPED_BITS
    is_odd &= np.uint32(1)
    codes += is_odd
    codes += np.uint32((1 << 19) - 1)
    codes >>= _DROPPED_BITS
    codes -= _EXPONENT_OFFSET
    if small.size:  # in usual pages, one element in thousands; its code counts multiples of 2**-9
        codes.reshape(-1)[small] = np.rint(np.abs(values.reshape(-1)[small]) * np.float32(512))
    codes |= (bits >> np.uint32(24)) & np.uint32(0x80)
    return codes


GROUP_ELEMENTS = 64
"""Elements per scale of 4 bytes, at least: in pages with fewer tokens, channels share a scale."""

_NUM_STEPS = 255


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

    def _encode_block(
        self, block: Block, values: Floats, least: Floats, largest: Floats, codes: Bytes
    ) -> Bytes:
        low = _to_bfloat16(least, up=False)
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

    def _decode_block(self, block: Block, scales: Bytes, codes: Bytes) -> Floats:
        pairs = np.ascontiguousarray(scales).view(np.uint16).reshape(*block.scale_shape, 2)
        low, step = widened(pairs[..., 0]), widened(pairs[..., 1])
        bound = np.float32(_LARGEST[self._layout.dtype] * 1.02)
        # Also false of a NaN.
        if not (np.abs(low).max() <= bound and step.min() >= 0 and step.max() <= bound / 100):
            raise CodecError("a scale is one that is never written")
        values = codes.astype(np.float32)
        values *= block.spread(step)
        values += block.spread(low)
        return values


def _to_bfloat16(values: Floats, *, up: bool) -> NDArray[np.uint16]:
    """The bits of the next bfloat16 not below (``up``) or not above each value."""
    bits = values.view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    is_cut = (bits & np.uint32(0xFFFF)) != 0
    is_negative = (bits >> np.uint32(31)).astype(bool)
    # Cutting bits off brings a value nearer to zero: down if positive, up if negative.
    upper += is_cut & (is_negative != up)
    return upper

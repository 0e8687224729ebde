"""The common part of the lossy codecs: scales per head and group of channels, codes of one byte.

A group is some neighbouring channels of one head and layer over all tokens of the page.
``ZstdCodec`` stores some pages exactly instead. They are not of the layout's length, or hold a
number that could not come back as a finite one near it (NaN, infinity, the very largest).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.codecs.chunks import ChunkReader, pack_chunk
from sglang_tiered.codecs.dtypes import FLOAT_DTYPES
from sglang_tiered.codecs.encoded import (
    HEADER_BYTES,
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

__all__ = ["Block", "QuantizingCodec", "UnfitPageError"]


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

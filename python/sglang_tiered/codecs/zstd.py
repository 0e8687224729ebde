"""``zstd``: bytes of equal significance form a plane, and each plane is compressed if that pays.

The exponents of keys and values take few of their 256 values, the lower bytes of the mantissas all.
Together they look random to a compressor. Apart, one plane in two (16-bit elements) or four
(32-bit) shrinks to about a third and the others stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.codecs.encoded import (
    HEADER_BYTES,
    METHOD_PLANES,
    METHOD_RAW,
    ChunkReader,
    Header,
    joined,
    pack_chunk,
    pack_header,
    spread,
    unpack_header,
)
from sglang_tiered.errors import CodecError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sglang_tiered.codecs.base import PageLayout, Segments


class ZstdCodec:
    """Exact, for pages of any length. It uses only the element length of the layout."""

    name = "zstd"

    def __init__(self, layout: PageLayout) -> None:
        self._item_bytes = layout.item_bytes
        self._layout_digest = layout.digest

    def encode(self, page: Segments) -> Segments:
        return self.encode_bytes(joined(page))

    def encode_bytes(self, plain: NDArray[np.uint8]) -> Segments:
        """The encoding of ``plain``, which is 1-D and holds all bytes of a page."""
        item_bytes = self._item_bytes
        num_elements, num_tail_bytes = divmod(plain.nbytes, item_bytes)
        whole = plain[: num_elements * item_bytes].reshape(num_elements, item_bytes)
        parts = [self._header(METHOD_PLANES, plain.nbytes)]
        for index in range(item_bytes if num_elements else 0):
            parts += pack_chunk(np.ascontiguousarray(whole[:, index]))
        if num_tail_bytes:
            parts.append(plain[-num_tail_bytes:].data)
        if sum(map(len, parts)) >= plain.nbytes + HEADER_BYTES:
            parts = [self._header(METHOD_RAW, plain.nbytes), plain.data]
        return tuple(parts)

    def decode(self, data: memoryview, page: Segments) -> None:
        header = unpack_header(data)
        page_bytes = sum(segment.nbytes for segment in page)
        if header != (header.method, self._item_bytes, self._layout_digest, page_bytes):
            raise CodecError(
                f"a page was encoded as {header}, not for {page_bytes} bytes of layout "
                f"{self._layout_digest:#010x}"
            )
        spread([plain_page(data)], page)

    def _header(self, method: int, page_bytes: int) -> memoryview:
        header = Header(method, self._item_bytes, self._layout_digest, page_bytes)
        return memoryview(pack_header(header))


def plain_page(data: memoryview) -> NDArray[np.uint8]:
    """Return a page that was encoded exactly: its header says all of it. Raises ``CodecError``."""
    header = unpack_header(data)
    reader = ChunkReader(data[HEADER_BYTES:])
    if header.method == METHOD_RAW:
        plain = np.frombuffer(reader.take(header.page_bytes), np.uint8)
    elif header.method == METHOD_PLANES and header.item_bytes:
        plain = _from_planes(reader, header.page_bytes, header.item_bytes)
    else:
        raise CodecError(f"an encoded page has the method {header.method}")
    reader.finish()
    return plain


def _from_planes(reader: ChunkReader, page_bytes: int, item_bytes: int) -> NDArray[np.uint8]:
    num_elements, num_tail_bytes = divmod(page_bytes, item_bytes)
    plain = np.empty(page_bytes, np.uint8)
    whole = plain[: page_bytes - num_tail_bytes].reshape(num_elements, item_bytes)
    for index in range(item_bytes if num_elements else 0):
        whole[:, index] = reader.chunk(num_elements)
    if num_tail_bytes:
        plain[-num_tail_bytes:] = np.frombuffer(reader.take(num_tail_bytes), np.uint8)
    return plain

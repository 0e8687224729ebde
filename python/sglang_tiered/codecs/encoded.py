"""The bytes of an encoded page: the header, chunks that are compressed if that pays, and copies
between pages and flat arrays. And the codec that all others fall back to, ``zstd``.

``README.md`` has the grammar, ``test_codecs.py`` worked bytes.
"""

from __future__ import annotations

import struct
import threading
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import zstandard

from sglang_tiered.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from sglang_tiered.codecs.base import PageLayout, Segments

    Bytes = NDArray[np.uint8]


MAGIC = 0xC5
VERSION = 1
METHOD_RAW, METHOD_PLANES, METHOD_FP8, METHOD_INT8 = range(4)

_HEADER = struct.Struct("<BBBBII")
HEADER_BYTES = _HEADER.size


class Header(NamedTuple):
    """The header of an encoded page."""

    method: int
    item_bytes: int
    layout_digest: int
    page_bytes: int


def pack_header(header: Header) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, *header)


def unpack_header(data: memoryview) -> Header:
    if data.nbytes < HEADER_BYTES:
        raise CodecError(f"an encoded page of {data.nbytes} bytes has no header")
    magic, version, *rest = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CodecError(f"an encoded page begins with {magic:#04x}, not {MAGIC:#04x}")
    if version != VERSION:
        raise CodecError(f"an encoded page has version {version}, not {VERSION}")
    return Header(*rest)


def copied(page: Sequence[memoryview]) -> Bytes:
    """The bytes of a page in memory of their own. ``bytes.join`` would hold the GIL meanwhile."""
    return np.concatenate([np.frombuffer(segment, np.uint8) for segment in page])


def joined(page: Segments) -> Bytes:
    """The bytes of a page as one array; not copied if the page is one segment."""
    return np.frombuffer(page[0], np.uint8) if len(page) == 1 else copied(page)


def spread(parts: Iterable[Bytes], page: Segments) -> None:
    """Copy ``parts``, one after the other, into the segments of a page of the same length."""
    segments = iter(page)
    left = memoryview(b"")
    for part in parts:
        position = 0
        while position < part.nbytes:
            while not left.nbytes:
                left = next(segments)
            count = min(left.nbytes, part.nbytes - position)
            np.frombuffer(left, np.uint8)[:count] = part[position : position + count]
            left = left[count:]
            position += count


_CHUNK = struct.Struct("<I")
_IS_COMPRESSED = 1 << 31

# The exponents of a page have no long repeats to look for, only uneven frequencies, which zstd's
# Huffman stage takes. A search with a small table and long minimum matches finds what little there
# is at twice the speed of level 1, and does not hide the frequencies behind short matches.
_LEVEL = 1
_PARAMETERS = {"min_match": 7, "hash_log": 6, "window_log": 17}
_MAX_WINDOW_BYTES = 1 << 17

MIN_SAVED_SHARE = 1 / 32
"""A chunk that compression shortens by less is stored plain: decoding it would cost more than the
bytes are worth."""


class _Contexts(threading.local):
    """This thread's zstd context: one serves one thread at a time."""

    @cached_property
    def compressor(self) -> zstandard.ZstdCompressor:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            _LEVEL, strategy=zstandard.STRATEGY_FAST, **_PARAMETERS
        )
        return zstandard.ZstdCompressor(compression_params=parameters)

    @cached_property
    def decompressor(self) -> zstandard.ZstdDecompressor:
        return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)


_contexts = _Contexts()


def pack_chunk(array: Bytes) -> Segments:
    """Length and bytes of a chunk, compressed if that pays; else they are not copied."""
    plain, flag = array.data, 0
    compressed = memoryview(_contexts.compressor.compress(plain))
    if compressed.nbytes <= plain.nbytes * (1 - MIN_SAVED_SHARE):
        plain, flag = compressed, _IS_COMPRESSED
    return memoryview(_CHUNK.pack(plain.nbytes | flag)), plain


class ChunkReader:
    """Reads chunks in order. Raises ``CodecError`` for a chunk of another length than the caller
    expects, before memory is taken for it."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def chunk(self, num_bytes: int) -> Bytes:
        """The next chunk, which must hold ``num_bytes``; read-only if it was not compressed."""
        (length,) = _CHUNK.unpack(self.take(_CHUNK.size))
        if not length & _IS_COMPRESSED:
            if length != num_bytes:
                raise CodecError(f"a chunk has {length} bytes, expected {num_bytes}")
            return np.frombuffer(self.take(length), np.uint8)
        stored = self.take(length & ~_IS_COMPRESSED)
        try:
            content_bytes = zstandard.frame_content_size(stored)
            if content_bytes != num_bytes:
                raise CodecError(f"a chunk expands to {content_bytes} bytes, not {num_bytes}")
            plain = _contexts.decompressor.decompress(stored, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"a chunk does not decompress: {error}") from error
        if len(plain) != num_bytes:
            raise CodecError(f"a chunk expanded to {len(plain)} bytes, not {num_bytes}")
        return np.frombuffer(plain, np.uint8)

    def take(self, num_bytes: int) -> memoryview:
        """The next bytes, which are not a chunk."""
        end = self._position + num_bytes
        if end > self._data.nbytes:
            raise CodecError(f"what was encoded ends at {self._data.nbytes}, before {end}")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def finish(self) -> None:
        if self._position != self._data.nbytes:
            raise CodecError(f"{self._data.nbytes - self._position} bytes follow what was encoded")


class PageCodec:
    """What every codec is, with the rules of ``base``; by itself ``zstd``: exact, for pages of any
    length. It uses only the element length of the layout.

    Bytes of equal significance form a plane, and each plane is compressed if that pays. The
    exponents of keys and values take few of their 256 values, the lower bytes of the mantissas all.
    Together they look random to a compressor. Apart, one plane in two (16-bit elements) or four
    (32-bit) shrinks to about a third and the others stay as they are.
    """

    name = "zstd"

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._layout_digest = layout.digest

    def encode(self, page: Segments) -> Segments:
        """The encoded page in parts, of which some may be memory of the page itself: to join them
        is a copy, and the caller's."""
        plain, item_bytes = joined(page), self._layout.item_bytes
        num_elements, num_tail_bytes = divmod(plain.nbytes, item_bytes)
        whole = plain[: num_elements * item_bytes].reshape(num_elements, item_bytes)
        own = item_bytes, self._layout_digest, plain.nbytes
        parts = [memoryview(pack_header(Header(METHOD_PLANES, *own)))]
        for index in range(item_bytes if num_elements else 0):
            parts += pack_chunk(np.ascontiguousarray(whole[:, index]))
        if num_tail_bytes:
            parts.append(plain[-num_tail_bytes:].data)
        if sum(map(len, parts)) >= plain.nbytes + HEADER_BYTES:
            parts = [memoryview(pack_header(Header(METHOD_RAW, *own))), plain.data]
        return tuple(parts)

    def decode(self, data: memoryview, page: Segments) -> None:
        """Fill the segments of ``page``, whose total length is that of the encoded page however it
        is cut. Raises ``CodecError`` for anything that does not fit; the segments are then
        undefined, and nothing outside them was written."""
        header = unpack_header(data)
        page_bytes = sum(segment.nbytes for segment in page)
        if header != (header.method, self._layout.item_bytes, self._layout_digest, page_bytes):
            raise CodecError(
                f"a page was encoded as {header}, not for {page_bytes} bytes of layout "
                f"{self._layout_digest:#010x}"
            )
        spread(self._decoded(header, data), page)

    def _decoded(self, header: Header, data: memoryview) -> Iterable[Bytes]:
        """The page in parts. Raises ``CodecError``."""
        return [plain_page(data)]


def plain_page(data: memoryview) -> Bytes:
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


def _from_planes(reader: ChunkReader, page_bytes: int, item_bytes: int) -> Bytes:
    num_elements, num_tail_bytes = divmod(page_bytes, item_bytes)
    plain = np.empty(page_bytes, np.uint8)
    whole = plain[: page_bytes - num_tail_bytes].reshape(num_elements, item_bytes)
    for index in range(item_bytes if num_elements else 0):
        whole[:, index] = reader.chunk(num_elements)
    if num_tail_bytes:
        plain[-num_tail_bytes:] = np.frombuffer(reader.take(num_tail_bytes), np.uint8)
    return plain

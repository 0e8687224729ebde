"""Bytes of an encoded page: the header, chunks, and the way between pages and flat arrays.

``README.md`` has the grammar with worked bytes.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import zstandard

from sglang_tiered.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from sglang_tiered.storage.base import Page

    Bytes = NDArray[np.uint8]

__all__ = [
    "HEADER_BYTES",
    "METHOD_FP8",
    "METHOD_INT8",
    "METHOD_PLANES",
    "METHOD_RAW",
    "VERSION",
    "ChunkReader",
    "Header",
    "joined",
    "pack_chunk",
    "pack_header",
    "spread",
    "unpack_header",
]

MAGIC = 0xC5
VERSION = 1
METHOD_RAW, METHOD_PLANES, METHOD_FP8, METHOD_INT8 = range(4)

_HEADER = struct.Struct("<BBBBII")
HEADER_BYTES = _HEADER.size
_CHUNK = struct.Struct("<I")
_IS_COMPRESSED = 1 << 31

# The exponents of a page have no long repeats to look for, only uneven frequencies, which zstd's
# Huffman stage takes. A search with a small table and long minimum matches finds what little there
# is at twice the speed of level 1, and does not hide the frequencies behind short matches.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17
)
_MAX_WINDOW_BYTES = 1 << 17

MIN_SAVED_SHARE = 1 / 32
"""A chunk that compression shortens by less stays as it is: decoding it would cost more than the
bytes are worth."""


class _Contexts(threading.local):
    """A zstd context serves one thread at a time."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)


_contexts = _Contexts()


class Header(NamedTuple):
    """What an encoded page says of itself."""

    method: int
    item_bytes: int
    layout_digest: int
    page_bytes: int


def pack_header(header: Header) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        header.method,
        header.item_bytes,
        header.layout_digest,
        header.page_bytes,
    )


def unpack_header(data: memoryview) -> Header:
    if data.nbytes < HEADER_BYTES:
        raise CodecError(f"an encoded page of {data.nbytes} bytes has no header")
    magic, version, *rest = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CodecError(f"an encoded page begins with {magic:#04x}, not {MAGIC:#04x}")
    if version != VERSION:
        raise CodecError(f"an encoded page has version {version}, not {VERSION}")
    return Header(*rest)


def pack_chunk(array: Bytes) -> list[bytes | memoryview]:
    """Length and bytes of a chunk, compressed where that pays. Not copied where it does not."""
    plain = array.data
    compressed = _contexts.compressor.compress(plain)
    if len(compressed) <= plain.nbytes * (1 - MIN_SAVED_SHARE):
        return [_CHUNK.pack(len(compressed) | _IS_COMPRESSED), compressed]
    return [_CHUNK.pack(plain.nbytes), plain]


class ChunkReader:
    """Chunks in order. Raises ``CodecError`` for a chunk of another length than the caller knows
    it must have, before memory is taken for it."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def chunk(self, num_bytes: int) -> Bytes:
        """The next chunk, which must hold ``num_bytes``; read-only where it was not compressed."""
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
        """The next bytes as they are."""
        end = self._position + num_bytes
        if end > self._data.nbytes:
            raise CodecError(f"an encoded page ends at {self._data.nbytes}, before {end}")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def finish(self) -> None:
        if self._position != self._data.nbytes:
            raise CodecError(f"{self._data.nbytes - self._position} bytes follow an encoded page")


def joined(page: Page) -> Bytes:
    """The bytes of a page as one array; not copied where the page is one segment."""
    if len(page) == 1:
        return np.frombuffer(page[0], np.uint8)
    return np.concatenate([np.frombuffer(segment, np.uint8) for segment in page])


def spread(parts: Iterable[Bytes], page: Page) -> None:
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

"""The bytes of an encoded page: the header, and copies between pages and flat arrays.

``README.md`` has the grammar, ``test_worked_example.py`` worked bytes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from sglang_tiered.codecs.base import Segments

    Bytes = NDArray[np.uint8]

__all__ = [
    "HEADER_BYTES",
    "METHOD_FP8",
    "METHOD_INT8",
    "METHOD_PLANES",
    "METHOD_RAW",
    "VERSION",
    "Header",
    "copied",
    "joined",
    "pack_header",
    "spread",
    "unpack_header",
]

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

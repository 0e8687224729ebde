"""Finds the extents of a region, by its footer or without, and reads what may not be readable.

A read that fails says nothing about the bytes: it is tried again, and what still cannot be read is
kept as it is. Only what was read and does not verify is damaged.
"""

from __future__ import annotations

import errno
import functools
from typing import TYPE_CHECKING, TypeVar

import xxhash

from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    MAX_EXTENT_HEADER_BYTES,
    Contents,
    Extent,
    padded,
    peek_extent_header_bytes,
    unpack_extent_header,
    unpack_footer,
    unpack_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.storage.region.device import Device, Files
    from sglang_tiered.storage.region.regions import Region

__all__ = [
    "NOT_A_FILE_ERRNOS",
    "UNREADABLE_ERRNOS",
    "WINDOW_BYTES",
    "all_contents",
    "bad_pages",
    "persist",
    "read_footer",
    "read_run",
    "walk",
]

WINDOW_BYTES = 4 << 20

_NUM_TRIES = 3
_T = TypeVar("_T")

# What bears one of our names is no file of ours, and never was.
NOT_A_FILE_ERRNOS = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
# Errors of the device, which concern one file. Any other, such as too many open files, says
# something about this process or the whole directory.
UNREADABLE_ERRNOS = (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN)


def persist(read: Callable[[], _T]) -> _T:
    """Return what ``read`` does, which is tried again where the device fails. Raises
    ``OSError``."""
    for _ in range(_NUM_TRIES - 1):
        try:
            return read()
        except OSError as error:
            if error.errno not in UNREADABLE_ERRNOS:
                raise
    return read()


def read_run(device: Files, fd: int, buffer: memoryview, offset: int) -> bool:
    """Fill the buffer; false where the file ends before. Raises ``OSError`` for what cannot be
    read, however often it is tried."""
    return persist(lambda: device.readv(fd, [buffer], offset)) == buffer.nbytes


def walk(device: Device, region: Region, durable_tail: int) -> tuple[list[Extent], OSError | None]:
    """Return the extents that verify, from block 1 to the first that does not; with an error, to
    the first that cannot be read. Payloads before ``durable_tail`` are known to have been on the
    device and are not read: every load verifies its page anyway."""
    extents: list[Extent] = []
    tail = BLOCK_BYTES
    header = aligned_buffer(MAX_EXTENT_HEADER_BYTES)
    window = aligned_buffer(WINDOW_BYTES)
    read = functools.partial(read_run, device, region.fd)
    while True:
        try:
            extent = _read_extent_header(device, region, tail, len(extents), header)
            if extent is None:
                return extents, None
            is_known = extent.end <= durable_tail
            if not is_known and next(bad_pages(read, extent, window), None) is not None:
                return extents, None
        except OSError as error:
            if error.errno not in UNREADABLE_ERRNOS:
                raise
            return extents, error
        extents.append(extent)
        tail = extent.end


def _read_extent_header(
    device: Device, region: Region, tail: int, ordinal: int, buffer: memoryview
) -> Extent | None:
    block = buffer[:BLOCK_BYTES]
    if not read_run(device, region.fd, block, tail):
        return None
    header_bytes = peek_extent_header_bytes(block)
    if header_bytes is None:
        return None
    rest = buffer[BLOCK_BYTES:header_bytes]
    if rest.nbytes and not read_run(device, region.fd, rest, tail + BLOCK_BYTES):
        return None
    extent = unpack_extent_header(buffer[:header_bytes], tail, region.nonce, ordinal)
    return extent if extent is not None and extent.end < region.nbytes else None


def bad_pages(
    read: Callable[[memoryview, int], bool], extent: Extent, window: memoryview
) -> Iterator[int]:
    """Yield the positions of an extent's pages whose bytes do not verify. ``read`` fills a buffer
    from an offset in the region; false where it cannot."""
    loaded_at = loaded = 0  # the window holds [loaded_at, loaded_at + loaded) of the region
    end, pages = extent.end, extent.pages
    columns = extent.page_offsets(), pages["length"], pages["key"], pages["checksum"]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for index, (start, length, key, checksum) in enumerate(rows):
        state = xxhash.xxh3_64(extent.namespace + key)
        position, stop = start, start + length
        while position < stop:
            if not loaded_at <= position < loaded_at + loaded:
                loaded_at, loaded = position, min(window.nbytes, end - position)
                if not read(window[:loaded], loaded_at):
                    # Perhaps only what lies behind this page cannot be read.
                    loaded = min(window.nbytes, padded(stop - position))
                    if not read(window[:loaded], loaded_at):
                        loaded = 0
                        break
            state.update(window[position - loaded_at : min(stop - loaded_at, loaded)])
            position = min(stop, loaded_at + loaded)
        if position < stop or state.intdigest() != checksum:
            yield index


def read_footer(device: Device, region: Region) -> Contents | None:
    """Return what the footer lists; None where it does not verify. Raises ``OSError``."""
    block = aligned_buffer(BLOCK_BYTES)
    if not read_run(device, region.fd, block, region.nbytes - BLOCK_BYTES):
        return None
    trailer = unpack_trailer(block, region.nonce, region.nbytes)
    if trailer is None:
        return None
    footer = aligned_buffer(trailer.footer_bytes)
    if not read_run(device, region.fd, footer, trailer.footer_offset):
        return None
    return unpack_footer(footer, region.nonce)


def all_contents(device: Device, region: Region, extents: Sequence[Extent]) -> Contents | None:
    """Return all that a start may find in a region, ``extents`` while it has no footer. None where
    more may be there than is known: what could not be read, or a write that failed half-way."""
    if region.kept:
        return None
    try:
        contents = Contents.of(extents)
        if region.sealed and not extents:
            footer = read_footer(device, region)
            if footer is None:
                return None
            contents = footer
        end = BLOCK_BYTES
        if len(contents.pages):
            end = int(contents.page_offsets()[-1]) + padded(int(contents.pages["length"][-1]))
        header = aligned_buffer(MAX_EXTENT_HEADER_BYTES)
        if _read_extent_header(device, region, end, len(contents.extents), header) is not None:
            return None
    except OSError:
        return None
    return contents

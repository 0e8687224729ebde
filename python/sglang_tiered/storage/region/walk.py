"""Finds the extents of a region, by its footer or without, and reads what may not be readable.

A read that fails says nothing about the bytes: it is tried again, and what still cannot be read is
kept as it is. Only what was read and does not verify is damaged.
"""

from __future__ import annotations

import errno
import functools
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import xxhash

from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    MAX_EXTENT_HEADER_BYTES,
    MAX_EXTENT_PAGES,
    Contents,
    Extent,
    footer_bytes,
    padded,
    peek_extent_header_bytes,
    unpack_extent_header,
    unpack_footer,
    unpack_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sglang_tiered.storage.region.device import Device, Files
    from sglang_tiered.storage.region.format import Trailer
    from sglang_tiered.storage.region.regions import Region

__all__ = [
    "NOT_A_FILE_ERRNOS",
    "UNREADABLE",
    "UNREADABLE_ERRNOS",
    "Problem",
    "RegionScan",
    "all_contents",
    "is_blank",
    "persist",
    "read_run",
]

WINDOW_BYTES = 4 << 20

_NUM_TRIES = 3
_T = TypeVar("_T")

# What bears one of our names is no file of ours, and never was.
NOT_A_FILE_ERRNOS = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
# Errors of the device, which concern one file. Any other, such as too many open files, says
# something about this process or the whole directory.
UNREADABLE_ERRNOS = (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN)
UNREADABLE = "cannot be read"


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


class Problem(NamedTuple):
    """Says what is wrong in a region file, and where."""

    part: str  # file, header, trailer, footer, extent or page
    offset: int
    length: int
    what: str
    ordinal: int | None = None  # of the extent
    namespace: bytes = b""
    key: bytes = b""


class RegionScan:
    """Reads one region: its footer, or extent by extent. Notes what is wrong with it, and the first
    error of the device; raises any other ``OSError``. One thread's."""

    def __init__(
        self,
        device: Files,
        fd: int,
        nbytes: int,
        nonce: bytes = b"",
        *,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``advance`` hears of bytes read."""
        self._device = device
        self._fd = fd
        self._advance = advance
        self._file_bytes = nbytes
        self.nbytes = nbytes
        self.nonce = nonce
        self.is_sealed = False  # its trailer verifies
        self.torn_bytes = 0  # behind what was found: placed, and not verifying
        self.problems: list[Problem] = []
        self.error: OSError | None = None

    @functools.cached_property
    def _header(self) -> memoryview:
        return aligned_buffer(MAX_EXTENT_HEADER_BYTES)

    @functools.cached_property
    def _window(self) -> memoryview:
        return aligned_buffer(WINDOW_BYTES)

    def footer(self) -> Contents | None:
        """Return what the footer lists; None where it does not verify, or is not there."""
        offset = self.nbytes - BLOCK_BYTES
        block = self.read(offset, aligned_buffer(BLOCK_BYTES))
        if block is None:
            if self.nbytes <= self._file_bytes:
                self.report("trailer", offset, BLOCK_BYTES, UNREADABLE)
            return None
        trailer = unpack_trailer(block, self.nonce, self.nbytes)
        if trailer is None:
            if not is_blank(block):
                self.report("trailer", offset, BLOCK_BYTES, "does not verify")
            return None
        self.is_sealed = True
        # The longest footer there can be: every block a page, every second one an extent header.
        num_blocks = self.nbytes // BLOCK_BYTES
        if trailer.footer_bytes > footer_bytes(num_blocks // 2, num_blocks):
            self.report("trailer", offset, BLOCK_BYTES, "is impossible")
            return None
        footer = self.read(trailer.footer_offset, aligned_buffer(trailer.footer_bytes))
        contents = None if footer is None else unpack_footer(footer, self.nonce)
        if contents is None:
            what = UNREADABLE if footer is None else "does not verify"
        else:
            what = _misfit(contents, trailer)
        if what:
            self.report("footer", trailer.footer_offset, trailer.footer_bytes, what)
            return None
        return contents

    def walk(
        self, durable_tail: int, written_tail: int | None = None, *, full: bool = False
    ) -> Contents:
        """Find the extents by their headers, up to the first that does not verify.

        Those before ``written_tail`` had been written, all before ``durable_tail`` was synced:
        the payloads of these are read with ``full`` only, as every load verifies its page anyway.
        """
        written_tail = durable_tail if written_tail is None else written_tail
        extents: list[Extent] = []
        tail = BLOCK_BYTES
        while isinstance(found := self.extent_at(tail, len(extents)), Extent):
            written = found.end <= written_tail
            if not written and not self._is_intact(found):
                self.torn_bytes = found.end - found.offset
                break
            if written and full:
                self.report_pages(len(extents), found, self.bad_pages(found))
            extents.append(found)
            tail = found.end
        else:
            if tail < durable_tail or (found and (tail < written_tail or found == UNREADABLE)):
                what = f"header {found or 'is missing'}; what lies behind it cannot be found"
                self.report("extent", tail, max(durable_tail - tail, 0), what, len(extents))
            elif found:
                self.torn_bytes = BLOCK_BYTES
        return Contents.of(extents)

    def extent_at(self, offset: int, ordinal: int) -> Extent | str | None:
        """Return the extent at ``offset``, what is wrong with its header, or None without one."""
        block = self.read(offset, self._header[:BLOCK_BYTES])
        if block is None:
            return UNREADABLE if offset < self._file_bytes else None
        nbytes = peek_extent_header_bytes(block)
        if nbytes is None:
            return None
        rest = self._header[BLOCK_BYTES:nbytes]
        if rest.nbytes and self.read(offset + BLOCK_BYTES, rest) is None:
            return UNREADABLE
        extent = unpack_extent_header(self._header[:nbytes], offset, self.nonce, ordinal)
        return "does not verify" if extent is None or extent.end >= self.nbytes else extent

    def bad_pages(self, extent: Extent) -> list[int]:
        """Return the positions of the pages whose bytes do not verify."""
        return list(_bad_pages(self.read, extent, self._window))

    def _is_intact(self, extent: Extent) -> bool:
        """Return whether all its pages verify; looks no further than the first read that fails, as
        a device may take seconds for each."""
        is_failing = False

        def read(offset: int, buffer: memoryview) -> memoryview | None:
            nonlocal is_failing
            found = None if is_failing else self.read(offset, buffer)
            is_failing = found is None
            return found

        return next(_bad_pages(read, extent, self._window), None) is None

    def read(self, offset: int, buffer: memoryview) -> memoryview | None:
        """Fill the buffer with whole blocks; None if they are damaged or missing."""
        if offset + buffer.nbytes > self._file_bytes:
            return None
        try:
            if not read_run(self._device, self._fd, buffer, offset):
                return None
        except OSError as error:
            if error.errno not in UNREADABLE_ERRNOS:
                raise
            self.error = self.error or error
            return None
        self._advance(buffer.nbytes)
        return buffer

    def report(
        self, part: str, offset: int, length: int, what: str, ordinal: int | None = None
    ) -> None:
        self.problems.append(Problem(part, offset, length, what, ordinal))

    def report_pages(self, ordinal: int, extent: Extent, indexes: Iterable[int]) -> None:
        starts = extent.page_offsets().tolist()
        for index in indexes:
            page = extent.pages[index]
            start, length, key = starts[index], int(page["length"]), page["key"].tobytes()
            cut = start + length > self._file_bytes
            what = "lies behind the end of the file" if cut else "does not match its checksum"
            found = Problem("page", start, length, what, ordinal, extent.namespace, key)
            self.problems.append(found)


def is_blank(block: memoryview) -> bool:
    return block.tobytes().count(0) == block.nbytes


def _misfit(contents: Contents, trailer: Trailer) -> str:
    """Return why a footer that verifies cannot be of this region; empty where it can."""
    starts = np.concatenate([[BLOCK_BYTES], contents.ends()])
    extents = contents.extents
    wrong = (extents["offset"] != starts[:-1]) | (extents["num_pages"] > MAX_EXTENT_PAGES)
    if wrong.any():
        return f"lists no extent at {starts[wrong.argmax()]}"
    if starts[-1] > trailer.footer_offset or len(extents) != trailer.num_extents:
        return "does not fit its trailer"
    return ""


def _bad_pages(
    read: Callable[[int, memoryview], memoryview | None], extent: Extent, window: memoryview
) -> Iterator[int]:
    """Yield the positions of an extent's pages whose bytes do not verify. ``read`` fills a buffer
    from an offset in the region; None where it cannot."""
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
                if read(loaded_at, window[:loaded]) is None:
                    # Perhaps only what lies behind this page cannot be read.
                    loaded = min(window.nbytes, padded(stop - position))
                    if read(loaded_at, window[:loaded]) is None:
                        loaded = 0
                        break
            state.update(window[position - loaded_at : min(stop - loaded_at, loaded)])
            position = min(stop, loaded_at + loaded)
        if position < stop or state.intdigest() != checksum:
            yield index


def all_contents(device: Device, region: Region, extents: Sequence[Extent]) -> Contents | None:
    """Return all that a start may find in a region, ``extents`` while it has no footer. None where
    more may be there than is known: what could not be read, or a write that failed half-way."""
    if region.kept:
        return None
    scan = RegionScan(device, region.fd, region.nbytes, region.nonce)
    try:
        contents = scan.footer() if region.sealed and not extents else Contents.of(extents)
        if contents is None:
            return None
        behind = scan.extent_at(contents.end, len(contents.extents))
    except OSError:
        return None
    return None if scan.error or isinstance(behind, Extent) else contents

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
    extent_header_bytes,
    footer_bytes,
    other_version,
    padded,
    peek_extent_header_bytes,
    region_name,
    unpack_extent_header,
    unpack_footer,
    unpack_region_header,
    unpack_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sglang_tiered.storage.region.device import FileDevice, FileReader
    from sglang_tiered.storage.region.format import RegionHeader
    from sglang_tiered.storage.region.regions import Region


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


def read_run(device: FileReader, fd: int, buffer: memoryview, offset: int) -> bool:
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
    """Reads one region: its header, and its footer, or extent by extent. Notes what is wrong with
    it, and the first error of the device; raises any other ``OSError``. One thread's."""

    def __init__(
        self,
        device: FileReader,
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
        self.file_bytes = nbytes
        self.nbytes = nbytes
        self.nonce = nonce
        self.version: int | None = None  # of another format; nothing else is known then
        self.is_new = False  # nothing was written to it so far
        self.is_sealed = False  # its trailer verifies
        self.torn_bytes = 0  # behind what was found: placed, and not verifying
        self.bad_rows: list[int] = []  # pages of what was walked that do not verify
        self.problems: list[Problem] = []
        self.error: OSError | None = None

    @functools.cached_property
    def _header(self) -> memoryview:
        return aligned_buffer(MAX_EXTENT_HEADER_BYTES)

    @functools.cached_property
    def _window(self) -> memoryview:
        return aligned_buffer(WINDOW_BYTES)

    def drop_buffers(self) -> None:
        """Keep only what was found."""
        for name in ("_header", "_window"):
            vars(self).pop(name, None)
        self.error = None  # its traceback holds them too

    def read_header(self, sequence: int) -> RegionHeader | None:
        """Return the header, if it is of our format and of the region of that number."""
        block = self.read(0, aligned_buffer(BLOCK_BYTES))
        self.is_new = self.file_bytes == 0 or (block is not None and _is_blank(block))
        if block is None:
            if self.file_bytes >= BLOCK_BYTES:
                self.report("header", 0, BLOCK_BYTES, UNREADABLE)
            else:
                what = f"has only {self.file_bytes} bytes" if self.file_bytes else "is empty"
                self.report("file", 0, self.file_bytes, what)
            return None
        header = unpack_region_header(block)
        if header is None:
            self.version = other_version(block)
            if self.version is None:
                what = "is all zeros" if self.is_new else "does not verify"
                self.report("header", 0, BLOCK_BYTES, what)
            return None
        if header.sequence != sequence:
            what = f"belongs to {region_name(header.sequence)}: the file was renamed"
            self.report("header", 0, BLOCK_BYTES, what)
            return None
        self.nbytes, self.nonce = header.nbytes, header.nonce
        return header

    def read_contents(self, *, full: bool) -> Contents:
        """Return what the footer lists, or else the extents that are found; ``full`` checks all of
        them, and every page."""
        if self.nbytes != self.file_bytes:
            what = f"has {self.file_bytes} bytes, should {self.nbytes}"
            self.report("file", 0, self.file_bytes, what)
        contents = self.footer()
        if contents is None:
            was_sealed = self.is_sealed or any(p.part == "trailer" for p in self.problems)
            return self.walk(was_sealed=was_sealed, full=full)
        if full:
            self._check(contents)
        return contents

    def _check(self, contents: Contents) -> None:
        """Compare what the footer lists with the headers of the extents, and check every page."""
        nbytes = footer_bytes(len(contents.extents), len(contents.pages))
        place = self.nbytes - BLOCK_BYTES - nbytes, nbytes
        for ordinal, extent in enumerate(contents.each()):
            found = self.extent_at(extent.offset, ordinal)
            if not isinstance(found, Extent):
                length, what = extent_header_bytes(len(extent.pages)), found or "is missing"
                self.report("extent", extent.offset, length, f"header {what}", ordinal)
            elif found.identity != extent.identity:
                what = f"disagrees with the header of extent {ordinal} at {extent.offset}"
                self.report("footer", *place, what)
            self.report_pages(ordinal, extent, self.bad_pages(extent))
        unlisted = self.extent_at(contents.end, len(contents.extents))
        if isinstance(unlisted, Extent) and not self.bad_pages(unlisted):
            self.report("footer", *place, f"does not list the extent at {contents.end}")

    def footer(self) -> Contents | None:
        """Return what the footer lists; None where it does not verify, or is not there."""
        offset = self.nbytes - BLOCK_BYTES
        block = self.read(offset, aligned_buffer(BLOCK_BYTES))
        if block is None:
            if self.nbytes <= self.file_bytes:
                self.report("trailer", offset, BLOCK_BYTES, UNREADABLE)
            return None
        trailer = unpack_trailer(block, self.nonce, self.nbytes)
        if trailer is None:
            if not _is_blank(block):
                self.report("trailer", offset, BLOCK_BYTES, "does not verify")
            return None
        self.is_sealed = True
        # The longest footer there can be: every block a page, every second one an extent header.
        num_blocks = self.nbytes // BLOCK_BYTES
        num_extents, footer_at, nbytes = trailer
        if nbytes > footer_bytes(num_blocks // 2, num_blocks):
            self.report("trailer", offset, BLOCK_BYTES, "is impossible")
            return None
        footer = self.read(footer_at, aligned_buffer(nbytes))
        contents = None if footer is None else unpack_footer(footer, self.nonce)
        if contents is None:
            what = UNREADABLE if footer is None else "does not verify"
        else:
            what = _misfit(contents, footer_at, num_extents)
        if what:
            self.report("footer", footer_at, nbytes, what)
            return None
        return contents

    def walk(self, *, was_sealed: bool = False, full: bool = False) -> Contents:
        """Find the extents by their headers, up to the first that does not verify.

        The payloads are read too, but of what ``was_sealed``, and so was written, with ``full``
        only. Where the last extent has a page that does not verify, it is torn, and left out. Of
        one that another follows, such pages are damage: ``bad_rows`` says which, among all that are
        found.
        """
        extents: list[Extent] = []
        tail, num_pages = BLOCK_BYTES, 0
        found = self.extent_at(tail, 0)
        while isinstance(found, Extent):
            following = self.extent_at(found.end, len(extents) + 1)
            bad = [] if was_sealed and not full else self.bad_pages(found, gives_up=not full)
            if bad and not was_sealed and (self.error or not isinstance(following, Extent)):
                self.torn_bytes = found.end - found.offset
                return Contents.of(extents)
            self.report_pages(len(extents), found, bad)
            self.bad_rows += [num_pages + position for position in bad]
            extents.append(found)
            tail, num_pages, found = found.end, num_pages + len(found.pages), following
        if found and (was_sealed or found == UNREADABLE):
            what = f"header {found}; what lies behind it cannot be found"
            self.report("extent", tail, 0, what, len(extents))
        elif found:
            self.torn_bytes = BLOCK_BYTES
        return Contents.of(extents)

    def extent_at(self, offset: int, ordinal: int) -> Extent | str | None:
        """Return the extent at ``offset``, what is wrong with its header, or None without one."""
        block = self.read(offset, self._header[:BLOCK_BYTES])
        if block is None:
            return UNREADABLE if offset < self.file_bytes else None
        nbytes = peek_extent_header_bytes(block)
        if nbytes is None:
            return None
        rest = self._header[BLOCK_BYTES:nbytes]
        if rest.nbytes and self.read(offset + BLOCK_BYTES, rest) is None:
            return UNREADABLE
        extent = unpack_extent_header(self._header[:nbytes], offset, self.nonce, ordinal)
        return "does not verify" if extent is None or extent.end >= self.nbytes else extent

    def bad_pages(self, extent: Extent, *, gives_up: bool = False) -> list[int]:
        """Return the positions of the pages whose bytes do not verify. One that ``gives_up`` looks
        no further than the first read that fails, as a device may take seconds for each."""
        window, bad = self._window, list[int]()
        loaded_at = loaded = 0  # the window holds [loaded_at, loaded_at + loaded) of the region
        end, pages, has_failed = extent.end, extent.pages, False
        columns = extent.page_offsets(), pages["length"], pages["key"], pages["checksum"]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for index, (start, length, key, checksum) in enumerate(rows):
            state = xxhash.xxh3_64(extent.namespace + key)
            position, stop = start, start + length
            while position < stop:
                if not loaded_at <= position < loaded_at + loaded:
                    loaded_at = position
                    # Behind a read that fails: perhaps only what follows this page cannot be read.
                    for size in (end - position, padded(stop - position)):
                        loaded = min(window.nbytes, size)
                        if has_failed and gives_up or self.read(position, window[:loaded]) is None:
                            has_failed, loaded = True, 0
                        else:
                            break
                    if not loaded:
                        break
                state.update(window[position - loaded_at : min(stop - loaded_at, loaded)])
                position = min(stop, loaded_at + loaded)
            if position < stop or state.intdigest() != checksum:
                bad.append(index)
        return bad

    def read(self, offset: int, buffer: memoryview) -> memoryview | None:
        """Fill the buffer with whole blocks; None if they are damaged or missing."""
        if offset + buffer.nbytes > self.file_bytes:
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
            cut = start + length > self.file_bytes
            what = "lies behind the end of the file" if cut else "does not match its checksum"
            found = Problem("page", start, length, what, ordinal, extent.namespace, key)
            self.problems.append(found)


def _is_blank(block: memoryview) -> bool:
    return block.tobytes().count(0) == block.nbytes


def _misfit(contents: Contents, footer_at: int, num_extents: int) -> str:
    """Return why a footer that verifies cannot be of this region; empty where it can."""
    starts = np.concatenate([[BLOCK_BYTES], contents.ends()])
    extents = contents.extents
    wrong = (extents["offset"] != starts[:-1]) | (extents["num_pages"] > MAX_EXTENT_PAGES)
    if wrong.any():
        return f"lists no extent at {starts[wrong.argmax()]}"
    if starts[-1] > footer_at or len(extents) != num_extents:
        return "does not fit its trailer"
    return ""


def all_contents(device: FileDevice, region: Region, extents: Sequence[Extent]) -> Contents | None:
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

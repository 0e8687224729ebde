"""Looks at region files without owning them: nothing is locked, written, sealed or removed.

For tools that run beside a server. A region may be written, sealed or unlinked while it is read. A
page that was placed and not synced yet is no damage when it does not verify, and a file that was
unlinked meanwhile is reported as gone. What a view lists is what recovery would find.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    MAX_EXTENT_PAGES,
    Contents,
    Extent,
    RegionHeader,
    Trailer,
    extent_header_bytes,
    footer_bytes,
    other_version,
    parse_region_name,
    peek_extent_header_bytes,
    region_name,
    unpack_extent_header,
    unpack_footer,
    unpack_region_header,
    unpack_trailer,
)
from sglang_tiered.storage.region.walk import (
    UNREADABLE_ERRNOS,
    WINDOW_BYTES,
    bad_pages,
    read_run,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from sglang_tiered.storage.region.device import Files

__all__ = ["Problem", "RegionView", "inspect_region"]

_UNREADABLE = "cannot be read"
# They say something about this process, not about the file.
_OWN_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Problem(NamedTuple):
    """Says what is wrong in a region file, and where."""

    part: str  # file, header, trailer, footer, extent or page
    offset: int
    length: int
    what: str
    ordinal: int | None = None  # of the extent
    namespace: bytes = b""
    key: bytes = b""


@dataclass(slots=True)
class RegionView:
    """Holds what one region file says of itself."""

    name: str
    sequence: int
    file_bytes: int = 0
    header: RegionHeader | None = None
    version: int | None = None  # of another format version; nothing else is known then
    sealed: bool = False
    gone: bool = False  # unlinked before or while it was read
    contents: Contents = field(default_factory=lambda: Contents.of([]))
    tail: int = 0  # behind the last extent that counts
    torn_bytes: int = 0  # behind the tail, placed but not verifying: in flight, or cut by a crash
    problems: list[Problem] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Return ``other format``, ``damaged``, ``sealed`` or ``open``."""
        if self.version is not None:
            return "other format"
        if self.problems:
            return "damaged"
        return "sealed" if self.sealed else "open"

    @property
    def payload_bytes(self) -> int:
        return int(self.contents.pages["length"].sum(dtype=np.int64))

    def page_ordinals(self) -> npt.NDArray[np.int64]:
        """Return the extent that each page is in."""
        counts = self.contents.extents["num_pages"].astype(np.int64)
        return np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def inspect_region(
    device: Files,
    name: str,
    *,
    full: bool,
    durable_tails: Mapping[tuple[int, bytes], int],
    may_be_new: bool,
    advance: Callable[[int], None] = lambda _: None,
) -> RegionView:
    """Read one region file through a device whose descriptors are the system's.

    ``full`` checks every extent header and every page; without it only what recovery would look
    at. ``durable_tails`` is the checkpoint by sequence and nonce; ``may_be_new``: a server may be
    creating this file right now. ``advance`` hears of bytes read. Raises ``OSError`` only for
    conditions of this process, such as too many open files.
    """
    sequence = parse_region_name(name)
    assert sequence is not None, f"{name!r} does not name a region"
    view = RegionView(name, sequence)
    try:
        fd = device.open(name)
    except FileNotFoundError:
        view.gone = True
        return view
    except OSError as error:
        if error.errno in _OWN_ERRNOS:
            raise
        view.problems.append(Problem("file", 0, 0, f"cannot be opened ({error.strerror})"))
        return view
    try:
        view.file_bytes = os.fstat(fd).st_size
        _Inspection(device, fd, view, full, advance).run(durable_tails, may_be_new)
        view.gone = os.fstat(fd).st_nlink == 0
    except OSError as error:
        if error.errno in _OWN_ERRNOS:
            raise
        view.problems.append(Problem("file", 0, 0, f"cannot be read ({error.strerror})"))
    finally:
        device.close(fd)
    return view


class _Inspection:
    """Reads one region file once, into its view."""

    def __init__(
        self,
        device: Files,
        fd: int,
        view: RegionView,
        full: bool,
        advance: Callable[[int], None],
    ) -> None:
        self._device = device
        self._fd = fd
        self._view = view
        self._full = full
        self._advance = advance
        self._window = aligned_buffer(WINDOW_BYTES)

    def run(self, durable_tails: Mapping[tuple[int, bytes], int], may_be_new: bool) -> None:
        view = self._view
        header = self._read_header(may_be_new)
        if header is None:
            return
        view.header = header
        if header.nbytes != view.file_bytes:
            self._report(
                "file", 0, view.file_bytes, f"has {view.file_bytes} bytes, should {header.nbytes}"
            )
        trailer = self._read_trailer(header)
        if trailer is not None:
            view.sealed = True
            contents = self._read_footer(header, trailer)
            if contents is not None:
                view.contents = contents
                self._check_sealed(header, trailer, contents)
                return
        # Whatever was sealed had been written; so had what the checkpoint says was synced.
        was_sealed = view.sealed or any(p.part == "trailer" for p in view.problems)
        durable_tail = durable_tails.get((header.sequence, header.nonce), 0)
        self._walk(header, view.file_bytes if was_sealed else durable_tail, durable_tail)

    def _read_header(self, may_be_new: bool) -> RegionHeader | None:
        view = self._view
        block = self._read(0, BLOCK_BYTES)
        if may_be_new and (view.file_bytes == 0 or (block is not None and _is_blank(block))):
            return None
        if block is None:
            what = "is empty" if view.file_bytes == 0 else f"has only {view.file_bytes} bytes"
            if view.file_bytes < BLOCK_BYTES:
                self._report("file", 0, view.file_bytes, what)
            else:
                self._report("header", 0, BLOCK_BYTES, _UNREADABLE)
            return None
        view.version = other_version(block)
        if view.version is not None:
            return None
        header = unpack_region_header(block)
        if header is None:
            what = "is all zeros" if _is_blank(block) else "does not verify"
            self._report("header", 0, BLOCK_BYTES, what)
        elif header.sequence != view.sequence:
            name = region_name(header.sequence)
            self._report("header", 0, BLOCK_BYTES, f"belongs to {name}: the file was renamed")
            return None
        return header

    def _read_trailer(self, header: RegionHeader) -> Trailer | None:
        offset = header.nbytes - BLOCK_BYTES
        block = self._read(offset, BLOCK_BYTES)
        if block is None:
            if header.nbytes <= self._view.file_bytes:
                self._report("trailer", offset, BLOCK_BYTES, _UNREADABLE)
            return None
        trailer = unpack_trailer(block, header.nonce, header.nbytes)
        if trailer is None and not _is_blank(block):
            self._report("trailer", offset, BLOCK_BYTES, "does not verify")
        return trailer

    def _read_footer(self, header: RegionHeader, trailer: Trailer) -> Contents | None:
        offset, nbytes = trailer.footer_offset, trailer.footer_bytes
        # The longest footer there can be: every block a page, every second one an extent header.
        num_blocks = header.nbytes // BLOCK_BYTES
        if not 0 < nbytes <= footer_bytes(num_blocks // 2, num_blocks):
            self._report("trailer", header.nbytes - BLOCK_BYTES, BLOCK_BYTES, "is impossible")
            return None
        footer = self._read(offset, nbytes)
        if footer is None:
            self._report("footer", offset, nbytes, _UNREADABLE)
            return None
        contents = unpack_footer(footer, header.nonce)
        if contents is None:
            self._report("footer", offset, nbytes, "does not verify")
            return None
        tail = BLOCK_BYTES
        for extent in _extents(contents):
            if extent.offset != tail or not 0 < len(extent.pages) <= MAX_EXTENT_PAGES:
                self._report("footer", offset, nbytes, f"lists no extent at {tail}")
                return None
            tail = extent.end
        if tail > offset or len(contents.extents) != trailer.num_extents:
            self._report("footer", offset, nbytes, "does not fit its trailer")
            return None
        return contents

    def _check_sealed(self, header: RegionHeader, trailer: Trailer, contents: Contents) -> None:
        self._view.tail = BLOCK_BYTES
        for ordinal, extent in enumerate(_extents(contents)):
            self._view.tail = extent.end
            if not self._full:
                continue
            found = self._read_extent(header, extent.offset, ordinal)
            if isinstance(found, Extent):
                same = (found.namespace, found.tenant) == (extent.namespace, extent.tenant)
                if not same or found.pages.tobytes() != extent.pages.tobytes():
                    what = f"disagrees with the header of extent {ordinal} at {extent.offset}"
                    self._report("footer", trailer.footer_offset, trailer.footer_bytes, what)
            else:
                length = extent_header_bytes(len(extent.pages))
                what = f"header {found or 'is missing'}"
                self._report("extent", extent.offset, length, what, ordinal)
            self._report_pages(ordinal, extent, self._bad_pages(extent))
        if self._full:
            tail = self._view.tail
            unlisted = self._read_extent(header, tail, len(contents.extents))
            if isinstance(unlisted, Extent) and not self._bad_pages(unlisted):
                what = f"does not list the extent at {tail}"
                self._report("footer", trailer.footer_offset, trailer.footer_bytes, what)

    def _walk(self, header: RegionHeader, written_tail: int, durable_tail: int) -> None:
        """Find the extents by their headers. Those that end before ``written_tail`` had been
        written; behind it the log ends at the first that does not verify."""
        view = self._view
        extents: list[Extent] = []
        tail = BLOCK_BYTES
        while True:
            found = self._read_extent(header, tail, len(extents))
            if not isinstance(found, Extent):
                if tail < durable_tail or (found and (tail < written_tail or found == _UNREADABLE)):
                    what = f"header {found or 'is missing'}; what lies behind it cannot be found"
                    self._report("extent", tail, max(durable_tail - tail, 0), what, len(extents))
                elif found:
                    view.torn_bytes = BLOCK_BYTES
                break
            written = found.end <= written_tail
            bad = self._bad_pages(found) if self._full or not written else []
            if bad and not written:
                view.torn_bytes = found.end - found.offset
                break
            self._report_pages(len(extents), found, bad)
            extents.append(found)
            tail = found.end
        view.tail = tail
        view.contents = Contents.of(extents)

    def _read_extent(self, header: RegionHeader, offset: int, ordinal: int) -> Extent | str | None:
        """Return the extent at ``offset``, what is wrong with its header, or ``None`` without
        one."""
        block = self._read(offset, BLOCK_BYTES)
        if block is None:
            return _UNREADABLE if offset < self._view.file_bytes else None
        nbytes = peek_extent_header_bytes(block)
        if nbytes is None:
            return None
        data = block if nbytes == BLOCK_BYTES else self._read(offset, nbytes)
        if data is None:
            return _UNREADABLE
        extent = unpack_extent_header(data, offset, header.nonce, ordinal)
        if extent is None or extent.end >= header.nbytes:
            return "does not verify"
        return extent

    def _bad_pages(self, extent: Extent) -> list[int]:
        return list(bad_pages(self._fill, extent, self._window))

    def _report(
        self, part: str, offset: int, length: int, what: str, ordinal: int | None = None
    ) -> None:
        self._view.problems.append(Problem(part, offset, length, what, ordinal))

    def _report_pages(self, ordinal: int, extent: Extent, indexes: Sequence[int]) -> None:
        starts = extent.page_offsets().tolist()
        for index in indexes:
            page = extent.pages[index]
            length = int(page["length"])
            cut = starts[index] + length > self._view.file_bytes
            what = "lies behind the end of the file" if cut else "does not match its checksum"
            self._view.problems.append(
                Problem(
                    "page",
                    starts[index],
                    length,
                    what,
                    ordinal,
                    extent.namespace,
                    page["key"].tobytes(),
                )
            )

    def _read(self, offset: int, nbytes: int) -> memoryview | None:
        """Read whole blocks into memory of their own; ``None`` if they are damaged or missing."""
        if offset + nbytes > self._view.file_bytes:
            return None
        buffer = aligned_buffer(nbytes)
        return buffer if self._fill(buffer, offset) else None

    def _fill(self, buffer: memoryview, offset: int) -> bool:
        try:
            filled = read_run(self._device, self._fd, buffer, offset)
        except OSError as error:
            if error.errno not in UNREADABLE_ERRNOS:
                raise
            filled = False
        if filled:
            self._advance(buffer.nbytes)
        return filled


def _is_blank(block: memoryview) -> bool:
    return block.tobytes().count(0) == block.nbytes


def _extents(contents: Contents) -> Iterator[Extent]:
    start = 0
    for row in contents.extents:
        stop = start + int(row["num_pages"])
        yield Extent(
            int(row["offset"]),
            row["namespace"].tobytes(),
            contents.pages[start:stop],
            row["tenant"].tobytes(),
        )
        start = stop

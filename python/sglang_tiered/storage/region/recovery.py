"""Brings index and regions back from the files. Runs once, before any thread of the store.

The steps, as in ``README.md``:

1. List the region files and order them by sequence number.
2. Open each and read its header. A newer format refuses the store; nothing was touched so far.
3. Remove files whose header does not verify, or is not that of the sequence in their name.
4. Remove the oldest regions while the rest exceeds the cap.
5. Read trailer and footer of each region, oldest first: its extents, payloads unread.
6. Where they do not verify, walk the extents from block 1 with all payloads, up to the first that
   does not verify.
7. Seal a walked region as it now is, or remove it when the walk found nothing.
8. Index the pages of our namespace; a key met again in a later region points there from now on.

Damage never raises: it is counted. ``OSError`` means the process may not use its own directory
(permissions, descriptors), in which case no file was removed for that reason.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from sglang_tiered.errors import StoreFormatError
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    MAX_EXTENT_HEADER_BYTES,
    Extent,
    newer_version,
    parse_region_name,
    peek_extent_header_bytes,
    region_name,
    unpack_extent_header,
    unpack_footer,
    unpack_region_header,
    unpack_trailer,
)
from sglang_tiered.storage.region.index import Entry, Index, Region, RegionTable
from sglang_tiered.storage.region.writer import seal_region

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress

    from sglang_tiered.storage.region.device import Device

__all__ = ["RecoveryReport", "recover"]

logger = logging.getLogger(__name__)

_WINDOW_BYTES = 1 << 20
_PROGRESS_AFTER_S = 1.0
# Errors that say "these bytes are lost". Any other, such as too many open files, says something
# about this process, and must not cost the user his data.
_DAMAGE = (errno.EIO, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODATA, errno.EBADMSG)


@dataclass(slots=True)
class RecoveryReport:
    """What recovery found. ``next_sequence`` is above every number ever seen in a name."""

    next_sequence: int = 0
    num_regions: int = 0
    num_walked: int = 0
    num_damaged: int = 0  # removed: header did not verify
    num_over_cap: int = 0  # removed: the cap is lower than it was
    num_pages: int = 0
    num_foreign_pages: int = 0  # of other namespaces: kept, not indexed


def recover(
    device: Device, namespace: bytes, capacity_bytes: int, regions: RegionTable, index: Index
) -> RecoveryReport:
    """Fill ``regions`` and ``index``. Raises ``StoreFormatError`` and ``OSError``, in both cases
    with every descriptor closed again."""
    report = RecoveryReport()
    found: list[Region] = []
    try:
        _recover(device, namespace, capacity_bytes, regions, index, report, found)
    except BaseException:
        for region in found:
            _close(device, region)
        raise
    return report


def _recover(
    device: Device,
    namespace: bytes,
    capacity_bytes: int,
    regions: RegionTable,
    index: Index,
    report: RecoveryReport,
    found: list[Region],
) -> None:
    # 1, 2
    sequences = sorted(
        sequence for sequence in map(parse_region_name, device.list_names()) if sequence is not None
    )
    report.next_sequence = sequences[-1] + 1 if sequences else 0
    damaged: list[int] = []
    for sequence in sequences:
        region = _open_region(device, sequence)
        if region is None:
            damaged.append(sequence)
        else:
            found.append(region)
    # 3
    for sequence in damaged:
        _unlink(device, region_name(sequence))
    report.num_damaged = len(damaged)
    # 4
    excess = sum(region.nbytes for region in found) - capacity_bytes
    while excess > 0:
        region = found.pop(0)
        _close(device, region)
        _unlink(device, region.name)
        excess -= region.nbytes
        report.num_over_cap += 1
    with _LateProgress(len(found)) as progress:
        for region in list(found):
            extents = _read_footer(device, region)  # 5
            if extents is None:
                extents = _walk(device, region)  # 6
                report.num_walked += 1
                if not extents:
                    found.remove(region)
                    _close(device, region)
                    _unlink(device, region.name)
                    progress.advance()
                    continue
                _seal(device, region, extents)  # 7
            _index(region, extents, namespace, regions, index, report)  # 8
            progress.advance()
    report.num_regions = len(regions)
    report.num_pages = len(index)


def _open_region(device: Device, sequence: int) -> Region | None:
    name = region_name(sequence)
    try:
        fd = device.open(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _DAMAGE:
            return None
        raise
    region = None
    try:
        block = aligned_buffer(BLOCK_BYTES)
        if _read(device, fd, block, 0):
            version = newer_version(block)
            if version is not None:
                raise StoreFormatError(
                    f"{name} was written in format {version}, newer than {FORMAT_VERSION}, which "
                    "this version reads; upgrade sglang-tiered or pass another --tier-dir"
                )
            header = unpack_region_header(block)
            if header is not None and header.sequence == sequence:
                region = Region(sequence, fd, header.nbytes, header.nonce, sealed=True)
    finally:
        if region is None:
            with contextlib.suppress(OSError):
                device.close(fd)
    return region


def _read(device: Device, fd: int, buffer: memoryview, offset: int) -> bool:
    """Fill the buffer; false where the bytes are damaged, missing or cannot be had."""
    try:
        return device.readv(fd, [buffer], offset) == buffer.nbytes
    except OSError as error:
        if error.errno in _DAMAGE:
            return False
        raise


def _read_footer(device: Device, region: Region) -> list[Extent] | None:
    block = aligned_buffer(BLOCK_BYTES)
    if not _read(device, region.fd, block, region.nbytes - BLOCK_BYTES):
        return None
    trailer = unpack_trailer(block, region.nonce, region.nbytes)
    if trailer is None:
        return None
    footer = aligned_buffer(trailer.footer_bytes)
    if not _read(device, region.fd, footer, trailer.footer_offset):
        return None
    return unpack_footer(footer, region.nonce)


def _walk(device: Device, region: Region) -> list[Extent]:
    """The extents that verify, from block 1 to the first that does not."""
    extents: list[Extent] = []
    region.tail = BLOCK_BYTES
    window = aligned_buffer(_WINDOW_BYTES)
    while True:
        extent = _read_extent_header(device, region, len(extents))
        if extent is None or not _payload_verifies(device, region, extent, window):
            return extents
        extents.append(extent)
        region.tail = extent.end


def _read_extent_header(device: Device, region: Region, ordinal: int) -> Extent | None:
    buffer = aligned_buffer(MAX_EXTENT_HEADER_BYTES)
    block = buffer[:BLOCK_BYTES]
    if not _read(device, region.fd, block, region.tail):
        return None
    header_bytes = peek_extent_header_bytes(block)
    if header_bytes is None:
        return None
    rest = buffer[BLOCK_BYTES:header_bytes]
    if rest.nbytes and not _read(device, region.fd, rest, region.tail + BLOCK_BYTES):
        return None
    extent = unpack_extent_header(buffer[:header_bytes], region.tail, region.nonce, ordinal)
    return extent if extent is not None and extent.end < region.nbytes else None


def _payload_verifies(device: Device, region: Region, extent: Extent, window: memoryview) -> bool:
    loaded_at = loaded = 0  # the window holds [loaded_at, loaded_at + loaded) of the region
    for page, start in extent.placements():
        state = xxhash.xxh3_64(extent.namespace)
        state.update(page.key)
        position, stop = start, start + page.length
        while position < stop:
            if position >= loaded_at + loaded:
                loaded_at = position
                loaded = min(window.nbytes, extent.end - position)
                if not _read(device, region.fd, window[:loaded], loaded_at):
                    return False
            piece = window[position - loaded_at : min(stop - loaded_at, loaded)]
            state.update(piece)
            position = min(stop, loaded_at + loaded)
        if state.intdigest() != page.checksum:
            return False
    return True


def _seal(device: Device, region: Region, extents: list[Extent]) -> None:
    region.extents = extents
    try:
        seal_region(device, region)
    except OSError as error:
        # The pages are served all the same; the next recovery walks the region again.
        logger.warning("%s could not be sealed (%s) and stays unsealed", region.name, error)
    region.extents = []


def _index(
    region: Region,
    extents: list[Extent],
    namespace: bytes,
    regions: RegionTable,
    index: Index,
    report: RecoveryReport,
) -> None:
    regions.reserve(region.nbytes)
    regions.add(region)
    for extent in extents:
        if extent.namespace != namespace:
            report.num_foreign_pages += len(extent.pages)
            continue
        for page, offset in extent.placements():
            index.put(page.key, Entry(region, offset, page.length, page.checksum))


def _close(device: Device, region: Region) -> None:
    with contextlib.suppress(OSError):
        device.close(region.fd)


def _unlink(device: Device, name: str) -> None:
    """What cannot be removed stays and is ignored: its number is never used again."""
    try:
        device.unlink(name)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s could not be removed (%s) and is ignored", name, error.strerror)


class _LateProgress:
    """A bar on stderr that shows itself only when recovery takes longer than a second."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._started = time.monotonic()
        self._progress: Progress | None = None

    def __enter__(self) -> _LateProgress:
        return self

    def advance(self) -> None:
        self._done += 1
        if self._progress is None and time.monotonic() - self._started > _PROGRESS_AFTER_S:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.add_task("recovering regions", total=self._total)
            self._progress.start()
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._done)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

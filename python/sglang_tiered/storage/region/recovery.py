"""Brings index and regions back from the files. Runs once, before any thread of the store.

The steps:

1. List the region files and order them by sequence number; read the erase log and the pins, if
   there are any.
2. Open each region and read its header. A newer format refuses the store; nothing was touched so
   far.
3. Remove files whose header does not verify, is of an older format, or is not that of the sequence
   in their name; and pins that do not verify. Leave those that cannot be read where they are.
4. Remove the oldest regions while the rest exceeds the cap; sync the names of those left.
5. Read trailer and footer of each. Where they do not verify or fit, walk the extents from block 1,
   up to the first that does not verify. Their payloads are read too.
6. Seal a walked region as it now is, or remove it when the walk found nothing. One with a damaged
   page stays open, or a footer would list that. A region of which something could not be read stays
   as it is and is not reclaimed.
7. Index the pages of our namespace that were not erased and fit a region of today, oldest region
   first; a key met again points to the later one. Remove a region that was erased altogether.

Damage never raises: it is counted. Nor does a region or pin that cannot be read, which is tried
again by the next start. ``OSError`` means that the store cannot be opened: the process may not use
its own directory (permissions, descriptors), or the erase log or most of the regions cannot be
read. No file was removed for that reason.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.storage.region import erase_log, pins
from sglang_tiered.storage.region.erase_log import Bound, Erased
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    EARLIER_NAMES,
    ERASED_NAME,
    FORMAT_VERSION,
    Contents,
    newer_format,
    parse_region_name,
    region_name,
)
from sglang_tiered.storage.region.regions import Region
from sglang_tiered.storage.region.walk import (
    NOT_A_FILE_ERRNOS,
    UNREADABLE_ERRNOS,
    RegionScan,
    persist,
)
from sglang_tiered.storage.region.writer import write_footer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    import numpy.typing as npt

    from sglang_tiered.storage.region.disk import Disk
    from sglang_tiered.storage.region.pins import FoundPins, Pin

    # A region, what it holds, whether its footer did not verify, which of its pages do not, and
    # the error that left something unread.
    _Read = tuple[Region, Contents, bool, list[int], OSError | None]


logger = logging.getLogger(__name__)

_PAGES_AT_ONCE = 1 << 15


@dataclass(slots=True)
class RecoveryReport:
    """What recovery found. ``next_sequence`` is above every number ever seen in a name."""

    next_sequence: int = 0
    num_regions: int = 0
    num_walked: int = 0
    num_damaged: int = 0  # removed: header did not verify
    num_outdated: int = 0  # removed: an older format
    num_over_cap: int = 0  # removed: the cap is lower than it was
    num_unread: int = 0  # kept, in part or whole unread: the device fails
    num_pages: int = 0
    num_foreign_pages: int = 0  # of other namespaces: kept, not indexed
    num_erased_pages: int = 0  # dead: kept until reclaimed, not indexed


class Recovery:
    """Fills the regions and the index of the store's state, once, before the store has threads.
    ``max_page_bytes`` is what a region holds from now on."""

    def __init__(
        self, disk: Disk, capacity_bytes: int, max_page_bytes: int, num_threads: int = 1
    ) -> None:
        self._disk, self._device = disk, disk.device
        self._state, self._regions = disk.state, disk.state.regions
        self._capacity_bytes = capacity_bytes
        self._max_page_bytes = max_page_bytes
        self._num_threads = num_threads
        self.report = RecoveryReport()
        self.erased = Erased()
        self.pins: list[Pin] = []
        self.has_unread_pins = False
        self._found: list[Region] = []  # the oldest first
        self._useless: list[int] = []  # sequences of files to remove
        self._unread: dict[int, OSError] = {}  # sequences of files to leave alone
        self._unread_bytes = 0  # of regions that stay as they are
        # On their way into the index: pages, slots, offsets and places of tenants, of some regions.
        self._pages: list[tuple[npt.NDArray[Any], ...]] = []
        self._num_pages = 0

    def run(self) -> None:
        """Raises ``StoreFormatError`` and ``OSError``, in both cases with every descriptor closed
        again."""
        try:
            self._run()
        except BaseException:
            for region in self._found:
                self._close(region)
            raise

    def _run(self) -> None:
        device, report = self._device, self.report
        # 1
        names = device.list_names()
        numbers = map(parse_region_name, names)
        sequences = sorted(sequence for sequence in numbers if sequence is not None)
        report.next_sequence = sequences[-1] + 1 if sequences else 0
        self.erased = erase_log.read(device)
        found_pins = pins.read_all(device, names)
        self.pins, self.has_unread_pins = found_pins.pins, bool(found_pins.unread)
        if not self.erased.damaged:
            report.next_sequence = max(report.next_sequence, self.erased.next_sequence())
        with ThreadPoolExecutor(self._num_threads) as pool:
            # 2
            list(pool.map(self._open, sequences))  # which raises what they do
            self._found.sort(key=lambda region: region.sequence)
            # 3
            self._set_unread_aside()
            for sequence in self._useless:
                self._unlink(region_name(sequence))
            self._tell_of_pins(found_pins)
            earlier = EARLIER_NAMES.intersection(names)
            for name in (*found_pins.damaged, *found_pins.unfinished, *earlier):
                self._unlink(name)
            # 4
            self._shrink()
            self._sync_names()
            for region, contents, is_walked, bad_rows, error in self._read_ahead(pool):  # 5
                report.num_walked += is_walked
                is_synced = False
                if error is not None:
                    region.kept = True
                    self._tell_unread(region.sequence, region.nbytes, error)
                elif is_walked and not len(contents.extents):
                    self._remove(region)
                    continue
                elif is_walked and not bad_rows:
                    is_synced = self._seal(region, contents)  # 6
                self._index(region, contents, bad_rows, is_synced)  # 7
            self._put()
        self._settle_erased(names)
        report.num_regions, report.num_pages = len(self._regions), len(self._state.index)

    def _tell_of_pins(self, found: FoundPins) -> None:
        for name in found.newer:
            logger.warning("%s is a pin of a newer version: its pages are not kept", name)
        for name in found.damaged:
            logger.warning("%s is damaged and removed: what it pinned is not kept", name)
        for name in found.unread:
            logger.warning(
                "%s cannot be read: what it pins is not kept until a start can read it", name
            )

    def _settle_erased(self, names: Sequence[str]) -> None:
        """Leave a file that verifies and says no more than it must."""
        erased, device = self.erased, self._device
        if erased.damaged:
            logger.warning("%s is damaged: all stored pages are erased", ERASED_NAME)
            erased.everyone = Bound(self.report.next_sequence, 0)
        try:
            erase_log.drop_gone(device, erased)
            has_file = ERASED_NAME in names or erased.damaged
            if has_file and erased.num_bytes != erased.packed_bytes:
                erase_log.rewrite(self._disk, erased)
        except OSError as error:
            logger.warning("%s cannot be written (%s); it stays as it was", ERASED_NAME, error)

    def _close(self, region: Region) -> None:
        with contextlib.suppress(OSError):
            self._device.close(region.fd)

    def _unlink(self, name: str) -> None:
        """Remove a file. One that cannot be removed is skipped: its number is not used again."""
        try:
            self._disk.unlink(name)
        except OSError as error:
            logger.warning("%s could not be removed (%s); it is skipped", name, error.strerror)

    def _remove(self, region: Region) -> None:
        self._found.remove(region)
        self._close(region)
        self._unlink(region.name)

    def _open(self, sequence: int) -> None:
        """Open a region file and read its header. Several threads at once."""
        device, name = self._device, region_name(sequence)
        try:
            fd = persist(lambda: device.open(name))
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in NOT_A_FILE_ERRNOS:
                self._useless.append(sequence)
                self.report.num_damaged += 1
            elif error.errno in UNREADABLE_ERRNOS:
                self._unread[sequence] = error
            else:
                raise
            return
        region = None
        try:
            scan = RegionScan(device, fd, BLOCK_BYTES)
            header, version = scan.read_header(sequence), scan.version
            if scan.error is not None:
                self._unread[sequence] = scan.error
                return
            if version is not None and version > FORMAT_VERSION:
                raise newer_format(name, version, FORMAT_VERSION)
            if header is None:
                self._useless.append(sequence)
                self.report.num_outdated += version is not None
                self.report.num_damaged += version is None
                return
            region = Region(sequence, fd, header.nbytes, header.nonce, sealed=True)
            self._found.append(region)
        finally:
            if region is None:
                with contextlib.suppress(OSError):
                    device.close(fd)

    def _set_unread_aside(self) -> None:
        """Take no room twice: a file that is left where it is counts."""
        for sequence, error in sorted(self._unread.items()):
            try:
                nbytes = self._device.file_bytes(region_name(sequence))
            except OSError:
                nbytes = 0
            self._regions.aside_bytes += nbytes
            self._regions.reserve(nbytes)
            self._tell_unread(sequence, nbytes, error)

    def _tell_unread(self, sequence: int, nbytes: int, error: OSError) -> None:
        """Tell of a region that stays as it is. Raises ``OSError`` where that leaves too little for
        a store."""
        logger.warning(
            "%s cannot be read (%s): it is kept, takes its room, and is read again by the next "
            "start; remove it if the disk has lost it",
            region_name(sequence),
            error.strerror or error,
        )
        self.report.num_unread += 1
        self._unread_bytes += nbytes
        if 2 * self._unread_bytes > self._capacity_bytes:
            raise OSError(
                errno.EIO,
                f"{self.report.num_unread} or more of its region files cannot be read, and take "
                f"{self._unread_bytes} of the {self._capacity_bytes} bytes it may take; remove "
                "them if the disk has lost them",
            )

    def _shrink(self) -> None:
        taken = self._regions.physical_bytes + sum(region.nbytes for region in self._found)
        excess = taken - self._capacity_bytes
        while excess > 0 and self._found:
            excess -= self._found[0].nbytes
            self._remove(self._found[0])
            self.report.num_over_cap += 1

    def _sync_names(self) -> None:
        """Have those survive a loss of power that are left: no region comes while we recover."""
        try:
            if self._found:
                self._disk.sync_names()
            for region in self._found:
                region.has_name = True
        except OSError as error:
            logger.warning("the names of regions could not be synced (%s)", error)

    def _read_ahead(self, pool: ThreadPoolExecutor) -> Iterator[_Read]:
        """Yield what was found, oldest first, with its contents, and read some of the next. All
        contents together may take as much as the index."""
        reading: deque[Future[_Read]] = deque()
        for region in list(self._found):
            reading.append(pool.submit(self._read, region))
            if len(reading) > 2 * self._num_threads:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()

    def _read(self, region: Region) -> _Read:
        """Read the footer of a region, or find its extents without one. Several threads at
        once."""
        scan = RegionScan(self._device, region.fd, region.nbytes, region.nonce)
        contents = scan.footer()
        if contents is not None:
            return region, contents, False, [], scan.error
        contents = scan.walk()
        if len(contents.extents):
            region.tail = contents.end
        return region, contents, True, scan.bad_rows, scan.error

    def _seal(self, region: Region, contents: Contents) -> bool:
        """Write the footer of a region that was walked; true once all of it is durable."""
        try:
            write_footer(self._disk, region, contents)
        except OSError as error:
            # The pages are served all the same; the next recovery walks the region again.
            logger.warning("%s could not be sealed (%s); it stays unsealed", region.name, error)
            return False
        try:
            self._disk.sync(region)
        except OSError as error:
            logger.warning("%s could not be synced (%s)", region.name, error)
            return False
        return region.has_name

    def _index(
        self, region: Region, contents: Contents, bad_rows: list[int], is_synced: bool
    ) -> None:
        regions, tenants = self._regions, self._state.index.tenants
        num_pages = contents.extents["num_pages"]
        alive = ~self.erased.dead_pages(region.sequence, contents)
        self.report.num_erased_pages += int((~alive).sum())
        if not alive.any() and not region.kept:
            self._remove(region)
            return
        regions.reserve(region.nbytes)
        regions.add(region)
        pages, offsets = contents.pages, contents.page_offsets()
        # A killed process may have left what it wrote in a cache: the next sync covers it.
        region.dirty = bool(len(pages)) and not is_synced
        ours = np.repeat(contents.of_namespace(self._state.namespace), num_pages)
        region.num_foreign = int((alive & ~ours).sum())
        self.report.num_foreign_pages += region.num_foreign
        # A larger page could not be written again when its region goes.
        ours &= alive & (pages["length"] <= self._max_page_bytes)
        ours[bad_rows] = False
        names, inverse = _distinct(contents.extents["tenant"])
        payload = np.bincount(inverse, contents.payload_bytes(), len(names))
        for name, nbytes in zip(names, payload.tolist(), strict=True):
            regions.charge(region, name.tobytes(), int(nbytes))
        places = np.full(len(names), -1, np.int32)
        by_page = np.repeat(inverse, num_pages)
        for number in np.flatnonzero(np.bincount(by_page[ours], minlength=len(names))):
            places[number] = tenants.place_of(names[number].tobytes())
        owners = places[by_page]
        if not ours.all():
            pages, offsets, owners = pages[ours], offsets[ours], owners[ours]
        self._pages.append((pages, np.full(len(pages), region.slot, np.int32), offsets, owners))
        self._num_pages += len(pages)
        if self._num_pages >= _PAGES_AT_ONCE:
            self._put()

    def _put(self) -> None:
        """Index pages of many regions at once: those of a small one alone cost as much as of
        thousands."""
        if self._pages:
            pages, slots, offsets, owners = map(np.concatenate, zip(*self._pages, strict=True))
            self._pages.clear()
            self._num_pages = 0
            words = np.ascontiguousarray(pages["key"]).view("<u8").reshape(-1, 4)
            lengths, checksums = pages["length"], pages["checksum"]
            self._state.index.put(words, slots, offsets, lengths, checksums, owners)


def _distinct(tenants: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return the tenants of extents, each once, and the place of each extent's among them."""
    if (tenants == tenants[:1]).all():  # most regions have one, and to sort takes its time
        return tenants[:1], np.zeros(len(tenants), np.int64)
    names, inverse = np.unique(tenants, return_inverse=True)
    return names, inverse

"""The open end of the log: gives pages a place in it. Runs on the store's writer thread.

Placing is apart from hashing and writing, which other threads do: while extents are on their way to
the device, the next is placed. Extents become visible in the order of the
log, so what is acknowledged has no hole before it and recovery finds all of it. After a failed
write the log is rewound to where the failed extent began.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import math
import os
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.codecs.encoded import spread
from sglang_tiered.storage.base import NO_TENANT, Reason
from sglang_tiered.storage.filesystem import FULL_ERRNOS
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.erase_log import Bound
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    MAX_EXTENT_PAGES,
    NONCE_BYTES,
    Contents,
    Extent,
    RegionHeader,
    extent_header_bytes,
    fits_region,
    pack_footer,
    pack_region_header,
    pack_trailer,
    padded,
    page_table,
    region_name,
)
from sglang_tiered.storage.region.pending import MAX_EXTENT_BYTES, ExtentWrite, page_bytes
from sglang_tiered.storage.region.reclaim import MAX_SAVED_BYTES
from sglang_tiered.storage.region.regions import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.base import Page
    from sglang_tiered.storage.encoding import PageEncoding
    from sglang_tiered.storage.region.disk import Disk
    from sglang_tiered.storage.region.pending import Part, StoreTicket
    from sglang_tiered.storage.region.reclaim import Reclaimer

    Stored = list[tuple[Page, int]]


logger = logging.getLogger(__name__)

_NUM_SHARES = 4  # of an extent to encode: it has as many pages of 8 MiB
_MAX_WRITE_FAILURES = 3


def _encode(encoding: PageEncoding, pages: list[Page], *, is_full: bool) -> Stored:
    """Return what to store of pages, and of how many bytes. Where that fails it is the pages as
    they came, for which there is always memory."""
    try:
        return _in_blocks([encoding.encode(page, is_full=is_full) for page in pages], pages)
    except Exception as error:
        encoding.tell(error)
        return [(page, page_bytes(page)) for page in pages]


def _in_blocks(encoded: list[Page], pages: list[Page]) -> Stored:
    """Return pages and their lengths, those that were encoded in memory that direct I/O takes: it
    ends with their last block, in zeros. That memory is fresh, and its first touch takes most of
    the time: a copy by numpy does it without the GIL."""
    lengths = [page_bytes(page) for page in encoded]
    whole = [0 if e is p else padded(n) for e, p, n in zip(encoded, pages, lengths, strict=True)]
    if not any(whole):
        return list(zip(encoded, lengths, strict=True))
    memory = aligned_buffer(sum(whole))
    found: Stored = []
    for page, length, num_bytes in zip(encoded, lengths, whole, strict=True):
        found.append(((memory[:num_bytes],) if num_bytes else page, length))
        if num_bytes:
            spread([np.frombuffer(part, np.uint8) for part in page], (memory[:length],))
            memory = memory[num_bytes:]
    return found


def write_footer(disk: Disk, region: Region, contents: Contents) -> None:
    """Write footer and trailer. Raises ``OSError`` when the device refuses; the region is readable
    all the same, and recovery walks it instead."""
    footer = pack_footer(contents, region.nonce)
    offset = region.nbytes - BLOCK_BYTES - len(footer)
    assert region.tail <= offset, f"{region.name}: footer at {offset} over tail {region.tail}"
    trailer = pack_trailer(region.nonce, len(contents.extents), offset, len(footer))
    disk.write(region.fd, [memoryview(footer + trailer)], offset)


class RegionWriter:
    """Owns the open region. Call its methods without the lock held, unless one says otherwise."""

    def __init__(
        self, disk: Disk, reclaimer: Reclaimer, region_bytes: int, next_sequence: int
    ) -> None:
        self._disk, self._state, self._reclaimer = disk, disk.state, reclaimer
        self._region_bytes = region_bytes
        self._next_sequence = next_sequence
        self._region: Region | None = None
        self._num_pages = 0  # in the open region
        self._num_failures = 0  # writes in a row at the open region's tail
        self._is_rewound = False  # bytes may lie behind that tail
        self._num_evicted = (0, 0)  # pages, when the region before the open one and it were made

    def open_region(self) -> None:
        """Make sure there is a region to write to. Raises ``OSError``; ``FULL_ERRNOS`` when
        neither the cap nor the disk has room."""
        region = self._region
        if region is not None:
            is_usable = self._num_failures < _MAX_WRITE_FAILURES and not region.suspect
            if is_usable:
                with self._disk.watch():
                    is_usable = self._disk.device.is_intact(region.fd, region.nbytes)
            if is_usable:
                return
            # The file was deleted or cut, the device rejects this place, or a sync was lost.
            self.roll()
        self._region = self._create()
        self._num_pages = self._num_failures = 0
        self._is_rewound = False
        self._num_evicted = (self._num_evicted[1], self._reclaimer.num_pages_evicted)
        leaving = self._reclaimer.leaving
        # The first took the room that is kept for this. As the next ones free more than they
        # take, there is an empty region for stores in the end, however large their pages are.
        while leaving is not None:
            if not self._relocate(leaving, self._region) or not self._reclaimer.evict(leaving):
                break
            with self._state.lock:
                if self._reclaimer.has_room(self._region_bytes):
                    break
                leaving = self._reclaimer.next_leaving()

    def rescue(self, victim: Region) -> None:
        """Write the pinned pages of a region again at the end of the log, with nothing under way.
        Raises ``OSError``."""
        while self._reclaimer.has_pinned(victim):
            self.open_region()
            region = self._region
            assert region is not None
            if self._reclaimer.has_pinned(victim) and not self._relocate(victim, region):
                self.roll()

    def _relocate(self, victim: Region, region: Region) -> bool:
        """Write the pinned pages of a region again, as far as they fit behind the extents of the
        open one, which has none under way; true when none is left. They are found in their new
        place once they are durable there. Raises ``OSError``, and the open region takes no more."""
        while self._reclaimer.has_pinned(victim):
            if not self._relocate_some(victim, region):
                return False
        return True

    def _relocate_some(self, victim: Region, region: Region) -> bool:
        """Move as many as may lie in memory at once; false where not all of those did."""
        state = self._state
        is_full = False
        writes: list[ExtentWrite] = []
        failure: Exception | None = None
        try:
            for ticket in self._reclaimer.copies(victim, lambda i: i.pinned_rows(victim.slot)):
                with state.lock:
                    state.reinsert(ticket, victim.slot)
                    wanted = ticket.num_left
                    parts = self._take(deque([ticket]))
                    state.drop_rest(ticket, Reason.NO_SPACE)
                if parts:
                    writes.append(self._place(parts))
                is_full = ticket.num_placed < wanted
                if is_full or sum(write.payload_bytes for write in writes) >= MAX_SAVED_BYTES:
                    break
        except Exception as error:
            failure = error
        with state.lock:
            while not all(write.done for write in writes):
                state.store_ready.wait()
        failure = failure or next((write.error for write in writes if write.error), None)
        try:
            if writes and failure is None:
                self._disk.sync(region)
                self._disk.sync_names([region])
        except OSError as error:
            failure = error
        if failure is not None:
            self.rewind(writes, Reason.IO_ERROR)
            self.roll()
            raise failure
        with state.lock:
            for write in writes:
                state.publish(write)
            region.has_name = True
        return bool(writes) and not is_full

    def append(self) -> None:
        """Hand the leading stores of the queue to the threads that write, as one extent: in a new
        region where the first page does not fit the open one. Raises ``OSError``."""
        state = self._state
        for is_new in (False, True):
            self.open_region()
            with state.lock:
                parts = self._take(state.stores) if state.next_store is not None else []
                has_store = state.next_store is not None
            if parts:
                self._place(parts)
            if parts or is_new or not has_store:
                return
            self.roll()

    def _take(self, stores: deque[StoreTicket]) -> list[Part]:
        """Take the leading pages of these stores that fit the open region as one extent; the list
        is empty when the first does not fit. The caller holds the lock."""
        region = self._region
        assert region is not None
        parts: list[Part] = []
        count = payload = 0
        while stores:
            ticket = stores[0]
            whose = ticket.namespace, ticket.tenant
            first = parts[0][0] if parts else ticket
            is_other = whose != (first.namespace, first.tenant)
            if parts and (ticket.job.cancelled or is_other):
                break
            room = self.share_left(ticket)
            taken = 0
            while taken < ticket.num_left and count < MAX_EXTENT_PAGES:
                size = padded(ticket.length(ticket.num_placed + taken))
                if payload + size > room or not self._fits(region, count + 1, payload + size):
                    break
                count, payload, taken = count + 1, payload + size, taken + 1
            if taken:
                parts.append((ticket, range(ticket.num_placed, ticket.num_placed + taken)))
                ticket.num_placed += taken
            if ticket.num_left:
                break
            stores.popleft()
        self._state.placing = parts
        return parts

    def share_left(self, ticket: StoreTicket) -> float:
        """Return the payload bytes that a store's tenant may still place. Pinned pages that reclaim
        saved were there before, and stay where the share has become smaller since. The caller holds
        the lock."""
        tenant, is_kept = ticket.tenant, ticket.reinserted and len(self._state.pins)
        if tenant == NO_TENANT or is_kept:
            return math.inf
        return self._state.max_tenant_bytes - self._state.regions.tenant_bytes[tenant]

    def _fits(self, region: Region, count: int, payload: int) -> bool:
        if count > 1 and payload > MAX_EXTENT_BYTES:
            return False
        end = region.tail + extent_header_bytes(count) + payload
        return fits_region(region.nbytes, end, len(region.extents) + 1, self._num_pages + count)

    def _place(self, parts: list[Part]) -> ExtentWrite:
        """Append the pages to the open region and hand them to the threads that write. Where
        that fails, they fail too."""
        try:
            write = self._extent_of(parts)
        except Exception:
            with self._state.lock:
                self._state.placing = []
                self._state.fail_parts(parts, Reason.IO_ERROR)
            raise
        region, extent = write.region, write.extent
        with self._state.lock:
            region.extents.append(extent)
            region.tail = extent.end
            region.num_writing += 1
            self._state.regions.charge(region, extent.tenant, write.payload_bytes)
            self._state.queue_extent(write)
        self._num_pages += len(write.pages)
        return write

    def _extent_of(self, parts: list[Part]) -> ExtentWrite:
        region = self._region
        assert region is not None
        places = [(ticket, index) for ticket, indexes in parts for index in indexes]
        pages = [ticket.page(index) for ticket, index in places]
        lengths = [ticket.length(index) for ticket, index in places]
        memory_bytes = sum(lengths)
        encoding = self._state.encoding
        if encoding is not None and encoding.encodes:
            # Saved pages are as they were stored.
            rows = [row for row, (ticket, _) in enumerate(places) if not ticket.reinserted]
            encoded = self._encoded(encoding, [pages[row] for row in rows])
            for row, (page, length) in zip(rows, encoded, strict=True):
                pages[row], lengths[row] = page, length
        keys = [ticket.key(index) for ticket, index in places]
        table = page_table([(key, length, 0) for key, length in zip(keys, lengths, strict=True)])
        first, _ = parts[0]
        extent = Extent(region.tail, first.namespace, table, first.tenant)
        return ExtentWrite(region, extent, len(region.extents), parts, pages, memory_bytes)

    def _encoded(self, encoding: PageEncoding, pages: list[Page]) -> Stored:
        """Return what to store of pages, and of how many bytes. Threads that write help where they
        are free: those of a device that hangs are not."""
        state = self._state
        # Whether pages go for what is stored, be it for the cap, the disk or a tenant's share. A
        # region or two are looked at, as a share is not full at the same place in each.
        is_full = self._reclaimer.num_pages_evicted > self._num_evicted[0]
        size = max(1, -(-len(pages) // _NUM_SHARES))
        shares = [pages[start : start + size] for start in range(0, len(pages), size)]
        ends: list[Future[Stored]] = [Future() for _ in shares]

        def encode(number: int) -> None:
            try:
                ends[number].set_result(_encode(encoding, shares[number], is_full=is_full))
            except BaseException as error:
                ends[number].set_exception(error)

        with state.lock:
            state.encodings.extend(functools.partial(encode, number) for number in range(len(ends)))
            state.io_ready.notify(len(ends))
        while True:
            with state.lock:
                work = state.encodings.popleft() if state.encodings else None
            if work is None:
                return list(itertools.chain.from_iterable(each.result() for each in ends))
            work()

    def rewind(self, writes: Sequence[ExtentWrite], reason: Reason) -> None:
        """Forget extents of one region that nothing is under way of, the first of which could not
        be written, and all behind them. Bytes they left behind are taken for data only if they
        verify under this region's nonce at their ordinal, and then they are what was stored under
        their keys."""
        if not writes:
            return
        region, tail = writes[0].region, writes[0].extent.offset
        with self._state.lock:
            for write in writes:
                self._state.take_out(write)
                region.num_writing -= 1
                self._state.fail_parts(write.parts, reason)
            for extent in region.extents:
                if extent.offset >= tail:
                    self._state.regions.charge(region, extent.tenant, -extent.payload_bytes)
            region.extents = [e for e in region.extents if e.offset < tail]
            region.tail = tail
        self.seal(region)
        if region is self._region:
            self._num_pages = sum(len(extent.pages) for extent in region.extents)
            self._num_failures += 1
            self._is_rewound = True

    def log_end(self) -> Bound:
        """Return where the next extent goes, once all that is placed is settled: behind all bytes
        that were ever written, so that none of what failed half-way lies beyond it."""
        if self._is_rewound:
            self.roll()
        region = self._region
        if region is None:
            return Bound(self._next_sequence, 0)
        return Bound(region.sequence, region.tail)

    def settled(self, write: ExtentWrite) -> None:
        """Note that an extent is in the log."""
        self._num_failures = 0
        self.seal(write.region)

    def roll(self) -> None:
        """Stop appending to the open region; it is sealed once all its extents are written."""
        region, self._region = self._region, None
        if region is not None:
            region.sealed = True
            self.seal(region)

    def seal(self, region: Region) -> None:
        """Write the footer of a region that takes no more, once all its extents are written, unless
        what it would list may be lost. Without one the region is served all the same, and the next
        start walks it."""
        if not region.sealed or region.num_writing or not region.extents or region.retired:
            return
        with self._state.lock:
            extents, region.extents = region.extents, []
        try:
            if not region.suspect:
                write_footer(self._disk, region, Contents.of(extents))
        except OSError as error:
            logger.warning(
                "%s could not be sealed (%s); the next start walks it",
                self._disk.directory / region.name,
                error,
            )
        with self._state.lock:
            self._state.note_dirty(region)

    def abandon(self) -> None:
        """Stop appending to the open region, without a footer: its file is about to go."""
        region, self._region = self._region, None
        if region is not None:
            with self._state.lock:
                region.extents = []
                region.sealed = True

    def finish(self) -> None:
        """Seal the open region before closing; one without extents is removed."""
        region = self._region
        if region is not None and not region.extents:
            self.abandon()
            self._reclaimer.remove(region)
        self.roll()

    def _create(self) -> Region:
        if not self._reclaimer.reserve(self._region_bytes):
            raise OSError(errno.ENOSPC, "the cap leaves no room for a region")
        try:
            return self._create_reserved()
        except OSError as error:
            # So much and no more: where unlinks give no room (a snapshot or a hard link keeps the
            # blocks) further ones would give none either.
            if error.errno not in FULL_ERRNOS or not self._reclaimer.give_up(self._region_bytes):
                raise
            if not self._reclaimer.reserve(self._region_bytes):
                raise
        return self._create_reserved()

    def _create_reserved(self) -> Region:
        """Create a region on the room reserved; gives it back when it raises ``OSError``."""
        # A failed attempt uses its number up, so a leftover file cannot block the next one.
        sequence = self._next_sequence
        self._next_sequence += 1
        nonce = os.urandom(NONCE_BYTES)
        header = RegionHeader(self._region_bytes, sequence, nonce, time.time_ns())
        name = region_name(sequence)
        try:
            with self._disk.watch():
                fd = self._disk.device.create(name, self._region_bytes)
        except OSError:
            with self._state.lock:
                self._state.regions.reserve(-self._region_bytes)
            raise
        region = Region(sequence, fd, self._region_bytes, nonce, tail=BLOCK_BYTES)
        with self._state.lock:
            self._state.regions.add(region)
        try:
            self._disk.write(fd, [memoryview(pack_region_header(header))], 0)
        except OSError:
            region.sealed = True  # and useless: where it cannot go now, it goes before all others
            self._reclaimer.remove(region)
            raise
        return region

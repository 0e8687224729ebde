"""What the store's threads share: books, queues and the one lock that guards them all.

The lock is never held across I/O or logging, so the scheduler thread may take it.
"""

from __future__ import annotations

import errno
import itertools
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.storage.base import PinInfo, PinRefusal, Reason
from sglang_tiered.storage.jobs import JobBook
from sglang_tiered.storage.region.index import PageIndex, key_words
from sglang_tiered.storage.region.pending import (
    ExtentWrite,
    LoadTicket,
    Order,
    StoreTicket,
    Wanted,
    page_bytes,
)
from sglang_tiered.storage.region.pins import MAX_KEYS, MAX_PINS, PinBook
from sglang_tiered.storage.region.regions import RegionTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Erasure, Job, Run
    from sglang_tiered.storage.encoding import PageEncoding
    from sglang_tiered.storage.region.pending import Note, Part
    from sglang_tiered.storage.region.pins import Pin
    from sglang_tiered.storage.region.regions import Region


_MAX_EXPIRED = 1024  # pins, under the lock
_KEYS_AT_ONCE = 4096


class StoreState:
    """State of the store's threads, guarded by ``lock``, which the caller of any method holds."""

    def __init__(
        self,
        namespace: bytes,
        encoding: PageEncoding | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.encoding = encoding
        self.lock = threading.Lock()
        self.store_ready = threading.Condition(self.lock)  # writer: orders, or an extent written
        self.io_ready = threading.Condition(self.lock)  # loads, and pieces of extents
        self.sync_ready = threading.Condition(self.lock)  # syncer
        self.space_freed = threading.Condition(self.lock)
        self.namespace = namespace
        self.generation = 0  # bumped by clear and set_namespace: older stores stay invisible
        self.closed = False
        self.written_all = False  # closed, and the writer has nothing left under way
        self.index = PageIndex()
        self.regions = RegionTable(clock)
        self.capacity_bytes = 0
        self.max_tenant_bytes = math.inf
        self.pins = PinBook(0, wall_clock)
        self.jobs = JobBook()
        self.stores: deque[StoreTicket] = deque()
        self.orders: deque[Order] = deque()  # served ahead of all stores
        self.placing: list[Part] = []  # taken off the queue, not yet an extent of ``writes``
        self.writes: deque[ExtentWrite] = deque()  # placed extents, in the order of the log
        self.writing_bytes = 0  # payload of ``writes``
        self.to_write: deque[ExtentWrite] = deque()  # those that no thread has begun
        self.encodings: deque[Callable[[], None]] = deque()  # of the extent being placed
        self.num_writes = 0  # that the device is at
        self.loads: deque[tuple[LoadTicket, list[Wanted]]] = deque()  # spans of loads
        self.let_go: deque[Region] = deque()  # of loads that were shed: readers unpin them
        self.syncs: list[Future[bool]] = []  # of callers that wait for all to be durable
        self.any_dirty = False  # some region has been published to since the last sync
        self.pending: dict[bytes, StoreTicket] = {}
        self.queued_store_bytes = 0
        self.num_pages_stored = 0
        self.bytes_stored = 0
        self.num_pages_reinserted = 0
        self.bytes_reinserted = 0
        self.num_pages_loaded = 0
        self.bytes_loaded = 0
        self.num_pages_copied = 0
        self.bytes_copied = 0
        self.num_pages_from_memory = 0  # of those copied
        self.bytes_written = 0
        self.num_pages_erased = 0
        self.erased_ids: set[int] = set()  # digests of names of erasures that are durable

    def hide_all(self, *, keep: bool) -> None:
        """Empty the index; stores under way finish, but their pages stay invisible. ``keep``: the
        namespace may be opened again, so its pages are of use."""
        self.generation += 1
        for region in self.regions:
            region.unread.clear()
            if keep:
                region.num_foreign += self.index.num_live(region.slot)
        self.index.clear()
        self.pending.clear()

    def erase(
        self,
        what: Erasure,
        ids: tuple[int, ...],
        notes: tuple[Note, ...],
        durable: Future[bool],
    ) -> None:
        """Hide pages, keep those under way from becoming visible, and have the writer make that
        durable, ahead of all stores: none of what is meant waits among them any more. ``ids`` are
        digests of names to remember with it, and ``notes`` what the owner says of such."""
        placed = itertools.chain(self.placing, *(write.parts for write in self.writes))
        under_way = {*self.stores, *(ticket for ticket, _ in placed)}
        if what.keys is not None:
            gone = set(what.keys)
            pins = self.unpin_pages(what.keys)
            self.num_pages_erased += self.index.discard(key_words(what.keys))
            meant = {self.pending[key] for key in self.pending.keys() & gone}
            # Those of a namespace before are not pending, but a later process may find their pages.
            meant.update(each for each in under_way if each.generation != self.generation)
        else:
            gone = None
            pins = self.pins.of_tenant(what.tenant)
            self.unpin(pins)
            meant = {ticket for ticket in under_way if what.tenant in (None, ticket.tenant)}
            if what.tenant is not None:
                self.num_pages_erased += self.index.tenants.drop(what.tenant)
            else:
                self.num_pages_erased += len(self.index)
                self.hide_all(keep=False)
        emptied = {ticket for ticket in meant if self._forget(ticket, gone)}
        if emptied:
            self.stores = deque(each for each in self.stores if each not in emptied)
        for ticket in emptied:
            self._finish_if_settled(ticket)
        self.order(Order(tuple(pins), durable, what, ids, notes))

    def order(self, order: Order) -> None:
        self.orders.append(order)
        self.store_ready.notify()

    def _forget(self, ticket: StoreTicket, keys: set[bytes] | None) -> bool:
        """Keep pages of a store under way, all for None, from becoming visible, and drop those
        without a place; true where that leaves none in the queue."""
        kept = []
        was_queued = ticket.num_left > 0
        for index, position in enumerate(ticket.positions):
            key = ticket.key(index)
            if keys is not None and key not in keys:
                kept.append(position)
                continue
            self._drop_pending(ticket, index)
            if index < ticket.num_placed:
                ticket.forgotten.add(key)
                kept.append(position)
            else:
                ticket.job.reasons[position] = Reason.CANCELLED
        ticket.positions[:] = kept
        return was_queued and not ticket.num_left

    def hide_failed(self, wanted: Sequence[Wanted], reasons: Sequence[Reason]) -> int:
        """Hide pages that could not be loaded, or a bad sector would fail the same load for ever.
        Returns how many were tried: those behind an error were not, and stay. An error is no
        damage, though: where a pin wants the page, its region is to stay."""
        for number, (item, reason) in enumerate(zip(wanted, reasons, strict=False)):
            if reason in (Reason.CORRUPT, Reason.IO_ERROR) and not item.region.retired:
                self.index.drop(item.key, item.region.slot, item.offset)
            if reason is Reason.IO_ERROR:
                item.region.unread.update(self.pins.wanted([item.key]))
                return number + 1
        return len(wanted)

    def holds_unread(self, region: Region) -> bool:
        """Return whether a region holds what may be the only copy of a page that a pin wants, and
        cannot be read now."""
        if region.kept or not region.unread:
            return region.kept
        wanted = self.pins.wanted(list(region.unread))
        return bool(wanted) and bool((self.index.find(key_words(wanted)) < 0).any())

    # ---- Pins ----

    def pin_refusal(self, pin: Pin) -> PinRefusal | None:
        """Return why a pin, in the place of one of the same name, would be beyond a bound."""
        index, freed = self.index, self.pins.freed_by(pin)
        asked = index.held_bytes(key_words(pin.keys), pinned=False)
        pinned = index.pinned_bytes - index.held_bytes(key_words(freed), pinned=True)
        if not self.pins.bound_bytes:
            why = "nothing can be pinned here: the capacity must be three regions or more"
            return PinRefusal(asked, pinned, 0, why)
        return self.pins.refusal(pin, freed, asked, pinned, max_pins=MAX_PINS, max_keys=MAX_KEYS)

    def adopt(self, pins: Sequence[Pin]) -> None:
        """Keep the pages of new pins that are held, as far as the bound allows."""
        for pin in pins:
            self.pins.add(pin)
        self._pin_pages(list(dict.fromkeys(key for pin in pins for key in pin.keys)))

    def unpin(self, names: Sequence[str], adopt: Sequence[Pin] = ()) -> None:
        """Let go of what no other pin wants, and have others in the place of these."""
        freed = [key for name in names for key in self.pins.remove(name)]
        self.adopt(adopt)
        self.index.unpin(key_words(self.pins.unwanted(freed)))
        self._pin_left_out()

    def set_pin_bound(self, nbytes: int) -> None:
        """Note what pins may keep from now on. What is beyond it stays pinned."""
        is_more = nbytes > self.pins.bound_bytes
        self.pins.bound_bytes = nbytes
        if is_more:
            self._pin_left_out()

    def expire(self) -> list[str]:
        """Let go of pins whose time is over, not too many at once; returns their names."""
        expired = self.pins.expired(_MAX_EXPIRED)
        if expired:
            self.unpin(expired)
        return expired

    def _pin_left_out(self) -> None:
        """Pin what was wanted and found no room, as far as there is some now."""
        left_out = self.pins.left_out
        for _ in range(-(-len(left_out) // _KEYS_AT_ONCE)):
            some = list(itertools.islice(left_out, _KEYS_AT_ONCE))
            for key in some:
                del left_out[key]
            if self._pin_pages(self.pins.wanted(some)):
                return

    def unpin_pages(self, keys: Sequence[bytes]) -> list[str]:
        """Take pages out of all pins; returns the names of the pins that changed."""
        changed = self.pins.forget(keys)
        if changed:
            self.index.unpin(key_words(keys))
            self._pin_left_out()
        return changed

    def pinned(self, name: str) -> PinInfo | None:
        pin = self.pins.get(name)
        if pin is None:
            return None
        rows = self.index.find(key_words(pin.keys))
        rows = rows[rows >= 0]
        nbytes = self.index.padded_bytes(rows)
        return PinInfo(name, pin.tenant, len(rows), nbytes, pin.until_s, pin.data)

    def _pin_pages(self, keys: Sequence[bytes]) -> bool:
        """Pin those of these pages that are held; true where the bound has no room for all."""
        room = self.pins.bound_bytes - self.index.pinned_bytes
        left_out = self.index.pin(key_words(keys), room) if keys else []
        self.pins.left_out.update((keys[position], None) for position in left_out)
        return bool(left_out)

    # ---- Stores ----

    @property
    def next_store(self) -> StoreTicket | None:
        """Return the store whose turn it is; none has it while an erasure waits, as what is stored
        since must lie behind the end of the log that it notes."""
        return self.stores[0] if self.stores and not self.erases else None

    @property
    def erases(self) -> bool:
        """Return whether an erasure waits for the writer."""
        return any(order.what is not None for order in self.orders)

    def queue_store(
        self, job: Job, positions: list[int], lengths: Sequence[int], num_bytes: int
    ) -> None:
        ticket = StoreTicket(job, self.namespace, self.generation, positions, lengths, num_bytes)
        self.pending.update((job.run.keys[position], ticket) for position in positions)
        self.queued_store_bytes += num_bytes
        self.stores.append(ticket)
        self.store_ready.notify()

    def reinsert(self, ticket: StoreTicket, slot: int) -> None:
        """Note that pages of a region are on their way back into the log, but for those that were
        forgotten or stored again since they were read."""
        keys = ticket.job.run.keys
        if ticket.generation == self.generation and keys:
            held = self.index.are_in(slot, key_words(keys))
            ticket.positions = [i for i, k in enumerate(keys) if held[i] and k not in self.pending]
            self.pending.update((keys[position], ticket) for position in ticket.positions)

    def queue_extent(self, write: ExtentWrite) -> None:
        """Hand a placed extent to the threads that write."""
        self.placing = []
        self.writes.append(write)
        self.writing_bytes += write.payload_bytes
        self.queue_write(write)

    def queue_write(self, write: ExtentWrite) -> None:
        """Hand an extent to the threads that write, for the first time or once more."""
        write.done = False
        write.error = None
        write.num_tries += 1
        self.to_write.append(write)
        self.io_ready.notify()

    def finish_write(self, write: ExtentWrite, error: OSError | None) -> None:
        """Note that nothing of the extent is under way; the writer thread settles it."""
        write.error = error
        write.done = True
        self.store_ready.notify()

    def take_out(self, write: ExtentWrite) -> None:
        """Count an extent as under way no longer."""
        self.writes.remove(write)
        self.writing_bytes -= write.payload_bytes

    def publish(self, write: ExtentWrite) -> None:
        """Make the pages of a written extent visible and settle their stores."""
        self.take_out(write)
        pages, offsets = write.extent.pages, write.extent.page_offsets()
        region = write.region
        start = 0
        for ticket, indexes in write.parts:
            rows = slice(start, start + len(indexes))
            start += len(indexes)
            num_bytes = sum(map(ticket.length, indexes))
            keys = list(map(ticket.key, indexes))
            places, entries = offsets[rows], pages[rows]
            if ticket.forgotten:
                seen = [key not in ticket.forgotten for key in keys]
                keys = list(itertools.compress(keys, seen))
                places, entries = places[seen], entries[seen]
            if ticket.generation == self.generation:
                for key in keys:
                    del self.pending[key]
                if keys:
                    self.index.put(
                        key_words(keys),
                        region.slot,
                        places,
                        entries["length"],
                        entries["checksum"],
                        self.index.tenants.place_of(ticket.tenant),
                    )
                if len(self.pins) and (wanted := self.pins.wanted(keys)):
                    self._pin_pages(wanted)
            else:
                region.num_foreign += len(keys)  # perhaps: of the namespace before
            if ticket.reinserted:
                self.num_pages_reinserted += len(indexes)
                self.bytes_reinserted += num_bytes
            else:
                self.num_pages_stored += len(indexes)
                self.bytes_stored += num_bytes
            self._settle(ticket, indexes, Reason.OK)
        region.num_writing -= 1
        self.note_dirty(region)

    def note_dirty(self, region: Region) -> None:
        """Have a region synced that was written to."""
        region.dirty = True
        if not self.any_dirty:
            self.any_dirty = True
            self.sync_ready.notify()

    def fail_parts(self, parts: Sequence[Part], reason: Reason) -> None:
        """Settle pages that were placed but are not in the log."""
        for ticket, indexes in parts:
            for index in indexes:
                self._drop_pending(ticket, index)
            self._settle(ticket, indexes, reason)

    def drop_rest(self, ticket: StoreTicket, reason: Reason) -> None:
        """Settle what has no place yet of a store that has left the queue."""
        first = ticket.num_placed
        for index in range(first, len(ticket.positions)):
            self._drop_pending(ticket, index)
            ticket.job.reasons[ticket.positions[index]] = reason
        del ticket.positions[first:]
        self._finish_if_settled(ticket)

    def _drop_pending(self, ticket: StoreTicket, index: int) -> None:
        key = ticket.key(index)
        if self.pending.get(key) is ticket:
            del self.pending[key]

    def _settle(self, ticket: StoreTicket, indexes: range, reason: Reason) -> None:
        for index in indexes:
            ticket.job.reasons[ticket.positions[index]] = reason
        ticket.num_settled += len(indexes)
        self._finish_if_settled(ticket)

    def _finish_if_settled(self, ticket: StoreTicket) -> None:
        if ticket.num_settled < len(ticket.positions) or ticket.reinserted:
            return
        self.queued_store_bytes -= ticket.num_bytes
        self.jobs.finish(ticket.job)

    # ---- Loads ----

    def find_pages(self, run: Run, stored_lengths: Sequence[int] = ()) -> list[Wanted]:
        """Return the pages of a run that are held in the length asked for, or perhaps encoded, with
        their places: each counts as hit, which reclaim goes by. With ``stored_lengths``, those held
        in just these."""
        rows = self.index.find(key_words(run.keys))
        positions = np.flatnonzero(rows >= 0)
        places = zip(positions.tolist(), self.index.places(rows[positions]), strict=True)
        may_decode = self.encoding is not None and not stored_lengths
        wanted = []
        for position, (slot, offset, length, checksum) in places:
            page = run.pages[position]
            asked = stored_lengths[position] if stored_lengths else page_bytes(page)
            if length == asked or (length < asked and may_decode):
                region = self.regions.at(slot)
                key = run.keys[position]
                wanted.append(Wanted(position, key, region, offset, length, checksum, page))
        if not stored_lengths:
            self.index.hit(rows[[item.position for item in wanted]])
            now = self.regions.clock()
            for item in wanted:
                item.region.used_s = now
        return wanted

    def queue_load(
        self, ticket: LoadTicket, spans: Sequence[list[Wanted]], *, goes_first: bool = False
    ) -> None:
        queue = self.loads.appendleft if goes_first else self.loads.append
        ticket.num_spans_left = len(spans)
        for wanted in spans:
            region = wanted[0].region
            self.regions.pin(region)
            queue((ticket, wanted))
        self.io_ready.notify(len(spans))

    def finish_span(
        self, ticket: LoadTicket, wanted: Sequence[Wanted], reasons: Sequence[Reason]
    ) -> None:
        """Record the outcome of one span; the load is done with its last one."""
        for item, reason in zip(wanted, reasons, strict=True):
            ticket.job.reasons[item.position] = reason
            if reason is Reason.OK and ticket.for_request:
                self.num_pages_loaded += 1
                self.bytes_loaded += sum(segment.nbytes for segment in item.page)
            elif reason is Reason.OK:
                self.num_pages_copied += 1
                self.bytes_copied += item.length
        ticket.num_spans_left -= 1
        if ticket.num_spans_left == 0:
            self.jobs.finish(ticket.job)

    def shed(self, store_reason: Reason, load_reason: Reason) -> None:
        """Empty both queues. Queued stores are settled as far as they have no place yet. The caller
        may be the scheduler, so the readers unpin the regions of the loads: that may close a file,
        for which a disk that hangs takes its time too."""
        for store in self.stores:
            self.drop_rest(store, store_reason)
        self.stores.clear()
        self._shed_unbegun_writes(store_reason)
        for ticket, wanted in self.loads:
            self.let_go.append(wanted[0].region)
            self.finish_span(ticket, wanted, [load_reason] * len(wanted))
        self.loads.clear()
        self.io_ready.notify_all()

    def _shed_unbegun_writes(self, reason: Reason) -> None:
        """Let go of placed extents of which nothing was handed to the device yet, the last of the
        log. The writer finds them failed, and rewinds it."""
        for write in self.to_write:
            self.fail_parts(write.parts, reason)
            write.parts, write.pages = [], []
            cause = "not written, as the device fails or hangs"
            self.finish_write(write, OSError(errno.ECANCELED, cause))
        self.to_write.clear()

    def check_integrity(self) -> None:
        bound = self.pins.bound_bytes
        assert self.index.pinned_bytes <= bound, f"{self.index.pinned_bytes} pinned, bound {bound}"
        writing = sum(write.payload_bytes for write in self.writes)
        assert self.writing_bytes == writing, f"{writing} under way, not {self.writing_bytes}"
        queued = self.stores or self.erases or self.writes
        idle = self.jobs.num_inflight == 0 and not queued
        self.index.check_integrity({region.slot: region.nbytes for region in self.regions})
        is_syncing = any(region.syncing for region in self.regions)
        being_let_go = is_syncing or self.let_go or self.regions.retiring_bytes
        self.regions.check_integrity(idle=idle and not being_let_go)
        if idle:
            assert not self.pending, f"{len(self.pending)} keys pending while idle"
            assert not self.loads, f"{len(self.loads)} spans queued while idle"
            assert not self.to_write, f"{len(self.to_write)} extents queued while idle"
            assert self.queued_store_bytes == 0, f"{self.queued_store_bytes} bytes queued, idle"

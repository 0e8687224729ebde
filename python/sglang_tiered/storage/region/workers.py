"""What the threads of a store do: one places stores in the log, some read and write, one syncs.

Durable means against loss of power; death of the process loses nothing that was written. Periodic
syncs and barriers have a thread of their own, so the writer never waits for a flush.
"""

from __future__ import annotations

import errno
import functools
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from sglang_tiered.checksummed import page_checksum
from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.filesystem import FULL_ERRNOS
from sglang_tiered.storage.promises import keep
from sglang_tiered.storage.region.device import aligned_buffer, batches
from sglang_tiered.storage.region.format import BLOCK_BYTES, pack_extent_header, padded
from sglang_tiered.storage.region.pending import stored_blocks, stored_bytes
from sglang_tiered.storage.region.pins import file_of, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.storage.region.disk import Disk
    from sglang_tiered.storage.region.erase_log import EraseLog
    from sglang_tiered.storage.region.pending import ExtentWrite, Order, StoreTicket
    from sglang_tiered.storage.region.reader import RegionReader
    from sglang_tiered.storage.region.reclaim import CapacityControl, Reclaimer
    from sglang_tiered.storage.region.regions import Region
    from sglang_tiered.storage.region.writer import RegionWriter


logger = logging.getLogger(__name__)

_MAX_WRITING_BYTES = 64 << 20  # placed and not settled: enough that its threads never starve
_SWEEP_PAUSE_S = 0.001  # a lock that is taken again at once never reaches those that wait for it
_CHUNK_BYTES = 2 << 20  # one write: large enough for bandwidth, short enough for a load to wait
_ZEROS = aligned_buffer(BLOCK_BYTES).toreadonly()


class StoreWorker:
    """Takes stores in order of submission; its ``run`` is the writer thread. It never ends by an
    exception: a job that is never finished would keep the caller's memory forever."""

    def __init__(
        self,
        disk: Disk,
        writer: RegionWriter,
        reclaimer: Reclaimer,
        erase_log: EraseLog,
        capacity: CapacityControl,
    ) -> None:
        self._disk, self._state = disk, disk.state
        self._writer = writer
        self._reclaimer = reclaimer
        self._erase_log = erase_log
        self._capacity = capacity
        self._head: StoreTicket | None = None  # that is being placed
        self._out_of_space = False  # nothing can be placed until what is written is settled
        self._unsettled: set[str] = set()  # pins whose files are not as the book says

    def run(self) -> None:
        """Store until the store is closed and all that was placed is settled."""
        while self._step():
            pass
        try:
            self._writer.finish()
        except Exception:
            logger.exception(
                "%s: internal error while closing; recovery walks it", self._disk.directory
            )
        with self._state.lock:
            self._state.written_all = True
            self._state.sync_ready.notify()
            self._state.io_ready.notify_all()

    def _step(self) -> bool:
        """Do one thing; false when there is nothing left to do. Where it fails the store goes that
        it was about, or it would fail for ever."""
        state, self._head = self._state, None
        try:
            self._erase_log.sweep()  # a little at a time, as stores wait
            return self._serve()
        except OSError as error:
            reason = self._failed(error)
        except Exception:
            logger.exception(
                "%s: internal error while storing pages; they are dropped", self._disk.directory
            )
            reason = Reason.IO_ERROR
        with state.lock:
            if self._head is not None and state.next_store is self._head:
                state.stores.popleft()
                state.drop_rest(self._head, reason)
        return True

    def _serve(self) -> bool:
        """Settle one extent, or place one; false when there is nothing left to do."""
        state = self._state
        with state.lock:
            while True:
                written = bool(state.writes) and state.writes[0].done
                pause_s = state.pins.pause_s()
                # An erasure means what is in the log by then, with nothing under way.
                may_obey = state.orders and not (state.erases and state.writes)
                # What was hot in a region that went is written before another goes, not held.
                is_saving = bool(state.stores) and state.stores[0].reinserted
                is_free = not (state.closed or state.erases or is_saving)
                shrinks = self._capacity.is_due and is_free
                if may_obey or pause_s == 0.0 or shrinks:
                    break
                if written or self._may_place():
                    break
                if state.index.tenants.any_dead:
                    state.store_ready.wait(_SWEEP_PAUSE_S)
                    return True
                if state.closed and not (state.stores or state.orders or state.writes):
                    return False
                state.store_ready.wait(pause_s)
        if may_obey or pause_s == 0.0:
            self._obey()
        elif written:
            self._settle(state.writes[0])
        elif shrinks:
            self._capacity.step()
        else:
            self._place()
        return True

    def _may_place(self) -> bool:
        """Return whether the next store may be served now. The caller holds the lock."""
        state = self._state
        if state.next_store is None:
            return False
        return not state.writes if self._out_of_space else state.writing_bytes < _MAX_WRITING_BYTES

    def _place(self) -> None:
        state = self._state
        is_ours = self._disk.is_ours()
        with state.lock:
            head = self._head = state.next_store
            if head is None:
                return
            reason = None
            if not self._disk.accepts_stores() or not is_ours:
                reason = Reason.REJECTED
            elif head.job.cancelled:
                reason = Reason.CANCELLED
            if reason is not None:
                state.stores.popleft()
                state.drop_rest(head, reason)
                return
        if not self._has_share(head):
            return
        try:
            self._writer.append()
        except OSError as error:
            with state.lock:
                waits = bool(state.writes)
            if error.errno not in FULL_ERRNOS or not waits:
                raise
            # What is being written occupies the only region that could go.
            self._out_of_space = True

    def _has_share(self, head: StoreTicket) -> bool:
        """Make room for a page within its tenant's share, at the tenant's own cost, or drop the
        rest of its store. False when that cannot be placed now."""
        state = self._state
        while True:
            with state.lock:
                if state.next_store is not head:
                    return False  # shed or erased meanwhile
                if padded(head.length(head.num_placed)) <= self._writer.share_left(head):
                    return True
            if not self._evict_own(head.tenant):
                break
            if self._out_of_space:
                return False  # what is pinned goes behind what is being written
        with state.lock:
            if state.next_store is head:
                state.stores.popleft()
                state.drop_rest(head, Reason.OVER_SHARE)
        return False

    def _evict_own(self, tenant: bytes) -> bool:
        """Evict a region of a tenant, unless ``_out_of_space`` says afterwards that it must wait;
        false when none could go."""
        victim = self._reclaimer.own_victim(tenant)
        if victim is None:
            return False
        if self._reclaimer.has_pinned(victim):
            with self._state.lock:
                self._out_of_space = bool(self._state.writes)
            if self._out_of_space:
                return True
            self._writer.rescue(victim)
        return victim.retired or bool(self._reclaimer.evict(victim, besides=tenant))

    def _settle(self, write: ExtentWrite) -> None:
        """Settle the oldest extent under way, which is written."""
        state = self._state
        self._out_of_space = False
        if write.error is not None:
            self._settle_failed(write, write.error)
            return
        with state.lock:
            state.publish(write)
        self._writer.settled(write)
        self._disk.stores.succeed()
        self._disk.log.settle("store")
        self._disk.log.settle("space")

    def _settle_failed(self, first: ExtentWrite, error: OSError) -> None:
        """Fail extents behind a hole, which recovery could not find, or retry with new room."""
        state = self._state
        with state.lock:
            while not all(write.done for write in state.writes):
                state.store_ready.wait()
            failed = [write for write in state.writes if write.region is first.region]
        is_full = error.errno in FULL_ERRNOS and first.num_tries == 1
        if is_full and self._reclaimer.evict_one():
            with state.lock:
                for write in failed:
                    if write.error is not None and write.pages:
                        state.queue_write(write)
            return
        withdrawn = error.errno == errno.ECANCELED  # by ``StoreState.shed``; nothing was tried
        reason = Reason.CANCELLED if withdrawn else self._failed(error)
        self._writer.rewind(failed, reason)

    def _failed(self, error: OSError) -> Reason:
        disk = self._disk
        disk.stores.fail()
        if error.errno in FULL_ERRNOS:
            disk.log.report(
                "space",
                "%s has no room for another page (%s); stores are dropped until it has",
                disk.directory,
                error.strerror,
            )
            return Reason.NO_SPACE
        disk.log.report(
            "store",
            "%s cannot be written (%s); stores are dropped and retried with growing pauses",
            disk.directory,
            error,
        )
        return Reason.IO_ERROR

    # ---- Orders ----

    def _obey(self) -> None:
        """Serve all orders that wait, and take out the pins whose time is over."""
        state = self._state
        with state.lock:
            names = state.expire()
            orders: list[Order] = []
            if not (state.erases and state.writes):
                orders, state.orders = list(state.orders), deque()
        names += [name for order in orders for name in order.pins]
        erasing = [order for order in orders if order.what is not None]
        try:
            if not self._disk.is_ours():
                return
            # The log's end is where what is meant ends.
            bound = self._writer.log_end() if erasing else None
            if any(order.what is not None and order.what.is_everything for order in erasing):
                self._writer.abandon()
            self._settle_pins(names)
            is_erased = bound is not None and self._erase_log.erase(erasing, bound)
            for order in orders:
                if order.what is None:
                    keep(order.durable, self._unsettled.isdisjoint(order.pins))
                else:
                    keep(order.durable, is_erased and not self._unsettled)
        finally:
            for order in orders:
                keep(order.durable, False)

    def _settle_pins(self, names: Sequence[str]) -> None:
        """Have the files ``PIN-*`` say what the book does: write the pins of these names, or remove
        the files of those that are gone. What failed before is tried again."""
        log = self._disk.log
        self._unsettled.update(names)
        failed: set[str] = set()
        failure: OSError | None = None
        removed = False
        for name in self._unsettled:
            try:
                settle = functools.partial(self._settle_pin, name)
                removed = self._reclaimer.with_room(settle) or removed
            except OSError as error:
                failed.add(name)
                failure = error
        try:
            if removed:
                self._disk.sync_names()
            self._unsettled = failed
        except OSError as error:
            failure = error
        if failure is None:
            log.settle("pin")
        else:
            log.report(
                "pin",
                "%s: the file of a pin cannot be changed (%s); until it is tried again a restart "
                "finds the pins as they were",
                self._disk.directory,
                failure,
            )

    def _settle_pin(self, name: str) -> bool:
        """Return whether the directory must be synced: its file was removed, now or before."""
        with self._state.lock:
            pin = self._state.pins.get(name)
        if pin is None:
            self._disk.unlink(file_of(name))
            return True
        self._reclaimer.keep_spare()
        self._disk.replace(file_of(name), pack(pin))
        return False


class IoWorker:
    """Carries out loads, encodes pages, and hashes and writes extents: each of ``num_threads``
    threads runs ``run`` of the same worker. Loads come first, and one thread is left to them."""

    def __init__(self, disk: Disk, reader: RegionReader, num_threads: int) -> None:
        self._disk, self._state, self._reader = disk, disk.state, reader
        self._max_writing = num_threads - 1
        self._num_writing = 0

    def run(self) -> None:
        """Work until the store is closed and the writer thread has nothing left under way."""
        state = self._state
        while True:
            with state.lock:
                while (work := self._next()) is None:
                    if state.written_all:
                        return
                    state.io_ready.wait()
            work()
            del work  # its pages are the caller's memory

    def _next(self) -> Callable[[], None] | None:
        """Return what to do. The caller holds the state's lock."""
        state = self._state
        if state.let_go:
            return functools.partial(self._disk.unpin, state.let_go.popleft())
        if state.loads:
            return functools.partial(self._reader.load, *state.loads.popleft())
        if self._num_writing < self._max_writing and (state.encodings or state.to_write):
            self._num_writing += 1
            if state.encodings:
                return functools.partial(self._store, state.encodings.popleft())
            write = functools.partial(self._write, state.to_write.popleft())
            return functools.partial(self._store, write)
        return None

    def _store(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._state.lock:
                self._num_writing -= 1

    def _write(self, write: ExtentWrite) -> None:
        error = None
        try:
            for offset, segments in hashed_writes(write):
                self._put(write, segments, offset)
        except OSError as failure:
            error = failure
        except Exception as fault:
            logger.exception("internal error while storing pages; they are dropped")
            error = OSError(f"internal error: {fault}")
        with self._state.lock:
            self._state.finish_write(write, error)

    def _put(self, write: ExtentWrite, segments: list[memoryview], offset: int) -> None:
        """Write a piece of an extent. While loads wait, one write at a time goes on."""
        state = self._state
        while True:
            with state.lock:
                load = state.loads.popleft() if state.num_writes and state.loads else None
                state.num_writes += load is None
            if load is None:
                break
            self._reader.load(*load)
        began = time.perf_counter()
        try:
            written = self._disk.write(write.region.fd, segments, offset)
            if state.encoding is not None:
                state.encoding.note_write(time.perf_counter() - began, written, write.memory_bytes)
        finally:
            with state.lock:
                state.num_writes -= 1


def hashed_writes(write: ExtentWrite) -> Iterator[tuple[int, list[memoryview]]]:
    """Enter the checksums of an extent's pages, then yield what is to be written: whole blocks, and
    where they go in the region. The header comes last, or with all pages: where it is found, a
    death of the process has torn nothing of the extent."""
    extent = write.extent
    keys, lengths = extent.pages["key"].tolist(), extent.pages["length"].tolist()
    extent.pages["checksum"] = [
        page_checksum(extent.namespace, key, stored_bytes(page, length))
        for key, page, length in zip(keys, write.pages, lengths, strict=True)
    ]
    packed = pack_extent_header(extent, write.region.nonce, write.ordinal)
    header = aligned_buffer(len(packed))
    header[:] = packed
    segments: list[memoryview] = []
    for page in write.pages:
        segments.extend(stored_blocks(page, _ZEROS))
    if extent.end - extent.offset <= _CHUNK_BYTES:
        yield extent.offset, [header, *segments]
        return
    offset = extent.offset + len(packed)
    for batch, nbytes in batches(segments, _CHUNK_BYTES):
        yield offset, batch
        offset += nbytes
    yield extent.offset, [header]


class SyncWorker:
    """Makes pages durable; its ``run`` is the syncer thread. ``interval_s`` bounds how long a
    published page waits for its sync, beyond the time a sync takes. The thread does not end by an
    exception: without it nothing becomes durable, and no error would show it."""

    def __init__(self, disk: Disk, interval_s: float) -> None:
        self._disk, self._state = disk, disk.state
        self._interval_s = interval_s

    def run(self) -> None:
        """Sync until the store is closed and all that was written is sealed."""
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Wait for work and do it; false when it was the last."""
        state = self._state
        with state.lock:
            last = self._wait()
            orders, state.syncs = state.syncs, []
            dirty = [region for region in state.regions if region.dirty]
            state.any_dirty = False
            for region in dirty:
                region.dirty = False
        durable = False
        try:
            durable = self._sync_all([region for region in dirty if not region.suspect])
        except Exception:
            logger.exception(
                "%s: internal error while syncing; lookups miss for a while, and it is tried again",
                self._disk.directory,
            )
            self._disk.fault("internal error while syncing")
            with state.lock:
                for region in dirty:  # next time
                    region.dirty = state.any_dirty = True
        for order in orders:
            keep(order, durable)
        return not last

    def _wait(self) -> bool:
        """Wait until it is time to sync; returns whether it is the last time. The caller holds the
        lock."""
        state = self._state
        due: float | None = None
        while not state.written_all and not state.syncs:
            now = time.monotonic()
            if not state.any_dirty:
                due = None
            elif due is None:
                due = now + self._interval_s
            elif now >= due:
                break
            state.sync_ready.wait(None if due is None else due - now)
        return state.written_all

    def _sync_all(self, regions: list[Region]) -> bool:
        """Sync the regions and their names; true when all that is published is durable now."""
        state = self._state
        failure: OSError | None = None
        synced = []
        for region in regions:
            try:
                if self._sync(region):
                    synced.append(region)
            except OSError as error:
                failure = error
        names_synced = True
        if regions:
            try:
                self._disk.sync_names(synced)
            except OSError as error:
                failure, names_synced = error, False
        with state.lock:
            for region in synced:
                if names_synced:
                    region.has_name = True
                elif not region.suspect:
                    region.dirty = state.any_dirty = True
            any_suspect = any(r.suspect and state.index.num_live(r.slot) for r in state.regions)
        if failure is not None:
            # Stores go on: what cannot be written says so itself, and a page that is not durable
            # is still a hit.
            self._disk.log.report(
                "sync",
                "%s cannot be synced (%s); pages stored lately may not survive loss of power",
                self._disk.directory,
                failure,
            )
        elif regions:
            self._disk.log.settle("sync")
        return failure is None and not any_suspect

    def _sync(self, region: Region) -> bool:
        """Sync a region, unless it has gone meanwhile. It is pinned for no longer: after a start
        all regions are synced, and reclaim waits for the room of those that are pinned."""
        with self._state.lock:
            if region.retired:
                return False
            region.syncing = True
            self._state.regions.pin(region)
        try:
            self._disk.sync(region)
        finally:
            with self._state.lock:  # once: a pin of no sync would be a reader's
                region.syncing = False
                unused = self._state.regions.unpin(region)
            if unused:
                self._disk.dispose(region)
        return True

"""What the writer thread does: places stores in the log and settles what was written."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.filesystem import FULL_ERRNOS
from sglang_tiered.storage.promises import keep
from sglang_tiered.storage.region.device import write_fully
from sglang_tiered.storage.region.format import padded
from sglang_tiered.storage.region.part import StorePart
from sglang_tiered.storage.region.pending import hashed_writes
from sglang_tiered.storage.region.pins import file_of, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.region.erase_log import EraseLog
    from sglang_tiered.storage.region.part import Common
    from sglang_tiered.storage.region.pending import ExtentWrite, LoadSpan, StoreTicket
    from sglang_tiered.storage.region.reader import RegionReader
    from sglang_tiered.storage.region.reclaim import CapacityControl, Reclaimer
    from sglang_tiered.storage.region.writer import RegionWriter


logger = logging.getLogger(__name__)

_MAX_WRITING_BYTES = 64 << 20  # placed and not settled: enough that its threads never starve
_SWEEP_PAUSE_S = 0.001  # a lock that is taken again at once never reaches those that wait for it


class StoreWorker(StorePart):
    """Takes stores in order of submission; its ``run`` is the writer thread. It never ends by an
    exception: a job that is never finished would keep the caller's memory forever."""

    def __init__(
        self,
        common: Common,
        writer: RegionWriter,
        reclaimer: Reclaimer,
        erase_log: EraseLog,
        capacity: CapacityControl,
    ) -> None:
        super().__init__(common)
        self._writer = writer
        self._capacity = capacity
        self._reclaimer = reclaimer
        self._erase_log = erase_log
        self._pin_files = PinFiles(common, reclaimer)
        self._head: StoreTicket | None = None  # that is being placed
        self._out_of_space = False  # nothing can be placed until what is written is settled

    def run(self) -> None:
        """Store until the store is closed and all that was placed is settled."""
        while self._step():
            pass
        try:
            self._writer.finish()
        except Exception:
            logger.exception("%s: internal error while closing; recovery walks it", self._directory)
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
                "%s: internal error while storing pages; they are dropped", self._directory
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
        is_ours = self.is_ours()
        with state.lock:
            head = self._head = state.next_store
            if head is None:
                return
            reason = None
            if not self._health.accepts_stores() or not is_ours:
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
        self._health.stores.succeed()
        self._log.settle("store")
        self._log.settle("space")

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
        self._health.stores.fail()
        if error.errno in FULL_ERRNOS:
            self._log.report(
                "space",
                "%s has no room for another page (%s); stores are dropped until it has",
                self._directory,
                error.strerror,
            )
            return Reason.NO_SPACE
        self._log.report(
            "store",
            "%s cannot be written (%s); stores are dropped and retried with growing pauses",
            self._directory,
            error,
        )
        return Reason.IO_ERROR

    def _obey(self) -> None:
        """Serve all orders that wait, and take out the pins whose time is over."""
        state = self._state
        with state.lock:
            names = state.expire()
            orders = []
            if not (state.erases and state.writes):
                orders, state.orders = list(state.orders), deque()
        names += [name for order in orders for name in order.pins]
        erasing = [order for order in orders if order.what is not None]
        try:
            if not self.is_ours():
                return
            # The log's end is where what is meant ends.
            bound = self._writer.log_end() if erasing else None
            if any(order.what is not None and order.what.is_everything for order in erasing):
                self._writer.abandon()
            self._pin_files.settle(names)
            is_erased = bound is not None and self._erase_log.erase(erasing, bound)
            for order in orders:
                if order.what is None:
                    keep(order.durable, self._pin_files.has_settled(order.pins))
                else:
                    keep(order.durable, is_erased and self._pin_files.is_settled)
        finally:
            for order in orders:
                keep(order.durable, False)


class PinFiles(StorePart):
    """Owns the files ``PIN-*`` while the store is open, and keeps them as the book says. On the
    writer thread, without the lock held."""

    def __init__(self, common: Common, reclaimer: Reclaimer) -> None:
        super().__init__(common)
        self._reclaimer = reclaimer
        self._unsettled: set[str] = set()

    @property
    def is_settled(self) -> bool:
        """Return whether all that was ever asked is durable."""
        return not self._unsettled

    def has_settled(self, names: Sequence[str]) -> bool:
        """Return whether what was asked of these pins is durable."""
        return self._unsettled.isdisjoint(names)

    def settle(self, names: Sequence[str]) -> None:
        """Write the pins of these names, or remove the files of those that are gone. What failed
        before is tried again."""
        self._unsettled.update(names)
        failed: set[str] = set()
        failure: OSError | None = None
        removed = False
        for name in self._unsettled:
            try:
                settle = functools.partial(self._settle, name)
                removed = self._reclaimer.with_room(settle) or removed
            except OSError as error:
                failed.add(name)
                failure = error
        try:
            if removed:
                with self._health.watch():
                    self._device.sync_directory()
            self._unsettled = failed
        except OSError as error:
            failure = error
        if failure is None:
            self._log.settle("pin")
        else:
            self._log.report(
                "pin",
                "%s: the file of a pin cannot be changed (%s); until it is tried again a restart "
                "finds the pins as they were",
                self._directory,
                failure,
            )

    def _settle(self, name: str) -> bool:
        """Returns whether the directory must be synced: its file was removed, now or before."""
        with self._state.lock:
            pin = self._state.pins.get(name)
        if pin is not None:
            self._reclaimer.keep_spare()
            self.replace(file_of(name), pack(pin))
            return False
        with self._health.watch(), contextlib.suppress(FileNotFoundError):
            self._device.unlink(file_of(name))
        return True


class IoWorker(StorePart):
    """Carries out loads, encodes pages, and hashes and writes extents: each of ``num_threads``
    threads runs ``run`` of the same worker. Loads come first, and one thread is left to them."""

    def __init__(self, common: Common, reader: RegionReader, num_threads: int) -> None:
        super().__init__(common)
        self._reader = reader
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
            return functools.partial(self.unpin, state.let_go.popleft())
        if state.loads:
            return functools.partial(self._reader.load, state.loads.popleft())
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
        except Exception as failure:
            error = failure if isinstance(failure, OSError) else _internal(failure)
        with self._state.lock:
            self._state.finish_write(write, error)

    def _put(self, write: ExtentWrite, segments: list[memoryview], offset: int) -> None:
        written = 0
        while (span := self._begin_write()) is not None:
            self._reader.load(span)
        began, encoding = time.perf_counter(), self._state.encoding
        try:
            with self._health.watch():
                written = write_fully(self._device, write.region.fd, segments, offset)
            if encoding is not None:
                took_s = time.perf_counter() - began
                encoding.note_write(took_s, written, write.memory_bytes)
        finally:
            with self._state.lock:
                self._state.end_write(written)

    def _begin_write(self) -> LoadSpan | None:
        """Begin to write, or return a load that comes first: while one waits, one write at a time
        goes on."""
        state = self._state
        with state.lock:
            if state.num_writes and state.loads:
                return state.loads.popleft()
            state.num_writes += 1
            return None


def _internal(fault: Exception) -> OSError:
    logger.exception("internal error while storing pages; they are dropped")
    return OSError(f"internal error: {fault}")

"""``RegionEngine``: the tier engine over a log of region files.

Threads: one writer places stores in the log, ``num_threads`` others hash them and put them on the
device and serve loads, which come first, and one syncer makes stores durable. With a codec those
encode too. What they share, and its one lock, is in ``state``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from typing import TYPE_CHECKING

import xxhash

from sglang_tiered.errors import StoreError
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.base import (
    NO_TENANT,
    Erasure,
    Health,
    Job,
    JobKind,
    LookupResult,
    PinInfo,
    PinRefusal,
    Reason,
    Run,
    Stop,
    TenantUsage,
    TierEngine,
    TierStats,
)
from sglang_tiered.storage.jobs import Workers
from sglang_tiered.storage.promises import Promises, all_true, ended, is_true
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.directory import DirectoryLock, allow_regions
from sglang_tiered.storage.region.disk import Disk
from sglang_tiered.storage.region.erase_log import EraseLog
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    MIN_REGION_BYTES,
    NAMESPACE_BYTES,
    NOTE_NAMES,
    max_page_bytes,
    parse_region_name,
    region_name,
)
from sglang_tiered.storage.region.index import key_words
from sglang_tiered.storage.region.notes import read_note
from sglang_tiered.storage.region.pending import (
    LoadTicket,
    Note,
    Order,
    is_encoded,
    page_bytes,
    plan_spans,
)
from sglang_tiered.storage.region.pins import Pin
from sglang_tiered.storage.region.reader import RegionReader
from sglang_tiered.storage.region.reclaim import CapacityControl, Reclaimer
from sglang_tiered.storage.region.recovery import Recovery
from sglang_tiered.storage.region.state import StoreState
from sglang_tiered.storage.region.view import RegionView
from sglang_tiered.storage.region.workers import IoWorker, StoreWorker, SyncWorker
from sglang_tiered.storage.region.writer import RegionWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from sglang_tiered.storage.encoding import PageEncoding
    from sglang_tiered.storage.region.reader import OwnersMemory


logger = logging.getLogger(__name__)

_KEYS_AT_ONCE = 4096  # erased under the lock

DEFAULT_REGION_BYTES = 256 << 20
DEFAULT_QUEUED_STORE_BYTES = 1 << 30
MAX_PIN_SHARE = 0.5
"""Of the regions that reclaim chooses from, one is then pinned in no more than half of its bytes:
to write those again takes no more than it frees."""


class RegionEngine(TierEngine):
    """Pages in the region files of one directory, which it locks for as long as it is open.

    Opening recovers what earlier processes stored. Raises ``StoreLockedError`` when another process
    has the directory, ``StoreFormatError`` when a newer version wrote it, ``StoreError`` when the
    directory cannot be used.

    ``namespace`` digests everything that gives the bytes their meaning; pages stored under another
    one are never served. ``capacity_bytes`` bounds the files, headers and padding included, and
    holds at least one region; below four, each eviction takes a large share of the store.
    ``capacity`` changes it later, up to ``most_bytes``.
    ``max_tenant_bytes`` bounds the padded payload that one tenant has in them, dead pages included.
    ``max_queued_store_bytes`` bounds the callers' memory that stores keep referenced behind each
    other. A store that finds nothing queued is taken whole, since its pages wait in its caller's
    memory either way. Of any other the leading pages are taken that fit. A stored page survives
    death of the process at once, and loss of power after ``sync_interval_s`` and the time a flush
    takes. ``pin_share`` bounds what pins keep: of the capacity, in whole regions, without two of
    them, the one that is written to and one that is free while anything is pinned. ``encoding``
    encodes what is stored and decodes what is loaded; without it pages are stored as they are, and
    encoded ones are misses. ``wall_clock`` says when pins expire.
    """

    def __init__(
        self,
        directory: Path,
        *,
        namespace: bytes,
        capacity_bytes: int,
        most_bytes: int | None = None,
        region_bytes: int = DEFAULT_REGION_BYTES,
        num_threads: int = 8,
        io_timeout_s: float = 30.0,
        sync_interval_s: float = 1.0,
        max_queued_store_bytes: int = DEFAULT_QUEUED_STORE_BYTES,
        max_tenant_bytes: int | None = None,
        pin_share: float = MAX_PIN_SHARE,
        encoding: PageEncoding | None = None,
        device: FileDevice | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        assert len(namespace) == NAMESPACE_BYTES, f"a namespace of {len(namespace)} bytes"
        assert MIN_REGION_BYTES <= region_bytes <= capacity_bytes, f"regions of {region_bytes}"
        assert region_bytes % BLOCK_BYTES == 0, f"regions of {region_bytes} are not whole blocks"
        assert num_threads >= 2, "one for loads, and one for stores"
        assert 0 <= pin_share <= MAX_PIN_SHARE, f"a share of {pin_share} for pins"
        self.directory = directory
        self._max_page_bytes = max_page_bytes(region_bytes)
        self._max_queued_store_bytes = max_queued_store_bytes
        self._io_timeout_s = io_timeout_s
        self._promises = Promises()
        self._state = state = StoreState(namespace, encoding, clock, wall_clock)
        recovery = self._open(
            device, capacity_bytes, most_bytes or 0, region_bytes, num_threads, clock
        )
        disk = self._disk
        self._first_sequence = recovery.report.next_sequence
        self._has_unread_pins = recovery.has_unread_pins  # which may name what is erased
        self.erased_notes = tuple(recovery.erased.notes.values())
        """What was noted of erasures before the store was opened, the oldest first."""
        self.view = RegionView(state)
        self._reader = reader = RegionReader(disk)
        self._reclaimer = reclaimer = Reclaimer(disk, reader, region_bytes, io_timeout_s)
        self.capacity = capacity = CapacityControl(
            disk, reclaimer, capacity_bytes, region_bytes, pin_share, max_tenant_bytes
        )
        state.adopt(recovery.pins)
        writer = RegionWriter(disk, reclaimer, region_bytes, self._first_sequence)
        erase_log = EraseLog(disk, reclaimer, recovery.erased)
        worker = StoreWorker(disk, writer, reclaimer, erase_log, capacity)
        self._workers = workers = Workers()
        workers.start("tier-writer", worker.run)
        workers.start("tier-syncer", SyncWorker(disk, sync_interval_s).run)
        workers.start("tier-io", IoWorker(disk, reader, num_threads).run, num_threads)

    def _open(
        self,
        device: FileDevice | None,
        capacity_bytes: int,
        most_bytes: int,
        region_bytes: int,
        num_threads: int,
        clock: Callable[[], float],
    ) -> Recovery:
        directory, state = self.directory, self._state
        self._own_device: FileDevice | None = None
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(directory, error) from error
        self._lock = lock = DirectoryLock(directory)
        try:
            if device is None:
                allow_regions(directory, max(capacity_bytes, most_bytes), region_bytes)
                device = self._own_device = FileDevice(directory, lock=lock.directory)
            self._device, log = device, OnceLog(logger)
            self._disk = disk = Disk(
                directory, device, state, log, lock.is_held, clock, self._io_timeout_s
            )
            recovery = Recovery(disk, capacity_bytes, self._max_page_bytes, num_threads)
            recovery.run()
        except OSError as error:
            self._let_go()
            raise _unusable(directory, error) from error
        except BaseException:
            self._let_go()
            raise
        logger.info("%s recovered: %s", directory, recovery.report)
        state.any_dirty = any(region.dirty for region in state.regions)
        with contextlib.suppress(OSError):  # it is only for the advice
            free = device.free_bytes() + state.regions.physical_bytes
            if free < capacity_bytes:
                logger.warning(
                    "%s may take %d bytes but its filesystem has room for %d; it will stay smaller",
                    directory,
                    capacity_bytes,
                    free,
                )
        return recovery

    @property
    def encoding(self) -> PageEncoding | None:
        """Return how pages are encoded and decoded here."""
        return self._state.encoding

    @property
    def namespace(self) -> bytes:
        """Return the namespace that pages are found and stored under."""
        return self._state.namespace

    @property
    def health(self) -> Health:
        """Return the health of now. When the device just went bad, what is queued is shed: nothing
        may wait behind an I/O that hangs."""
        state = self._state
        if state.closed:
            return Health.FAILED
        health, why = self._disk.health()
        if health is Health.RUNNING:
            self._disk.log.settle("device")
            return health
        self._disk.log.report(
            "device",
            "%s cannot be used (%s); every lookup misses until it can",
            self.directory,
            why,
        )
        with state.lock:
            state.shed(Reason.REJECTED, Reason.IO_ERROR)
        return health

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        if self.health is not Health.RUNNING:
            return LookupResult(0, Stop.UNHEALTHY)
        state = self._state
        with state.lock:
            num_hits = state.index.num_leading(keys)
            if num_hits == len(keys):
                return LookupResult(num_hits, Stop.END)
            stop = Stop.PENDING if keys[num_hits] in state.pending else Stop.MISS
            return LookupResult(num_hits, stop)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self.health is not Health.RUNNING:
            return [False] * len(keys)
        return self.view.contains(keys)

    def some_keys(self, limit: int) -> list[bytes]:
        if self.health is not Health.RUNNING:
            return []
        with self._state.lock:
            index = self._state.index
            return index.keys(index.some_rows(limit))

    def submit_store(self, run: Run) -> Job:
        health = self.health
        state = self._state
        lengths = [page_bytes(page) for page in run.pages]
        with state.lock:
            job = state.jobs.open(JobKind.STORE, run)
            if state.closed:
                state.jobs.finish(job)
                return job
            positions: list[int] = []
            num_bytes = 0
            queued = state.queued_store_bytes
            room = self._max_queued_store_bytes - queued if queued else math.inf
            held = (state.index.find(key_words(run.keys)) >= 0).tolist()
            for position, (key, length) in enumerate(zip(run.keys, lengths, strict=True)):
                if health is not Health.RUNNING:
                    job.reasons[position] = Reason.REJECTED
                elif held[position] or key in state.pending:
                    job.reasons[position] = Reason.DUPLICATE
                elif length > self._max_page_bytes:
                    job.reasons[position] = Reason.NO_SPACE
                elif num_bytes + length > room:
                    job.reasons[position] = Reason.REJECTED
                    room = num_bytes  # a chain is of no use behind its first gap
                else:
                    positions.append(position)
                    num_bytes += length
            if not positions or not self._disk.accepts_stores():
                state.jobs.finish_with(job, positions, Reason.REJECTED)
            else:
                state.queue_store(job, positions, lengths, num_bytes)
        return job

    def submit_load(
        self,
        run: Run,
        *,
        deadline_s: float | None = None,
        stored_lengths: Sequence[int] = (),
        for_request: bool = True,
    ) -> Job:
        """Load as the contract says. ``for_request``: of this server, which times it; what else is
        read counts as copied. ``stored_lengths``: read what is stored in these lengths as it is,
        each page into memory for all of its blocks; that is no use, for which reclaim kept it."""
        health = self.health
        state = self._state
        # A copy takes a thread for a moment only: it waits for none of the reads that are queued.
        goes_first = not (for_request or stored_lengths) and self._reader.may_copy(run)
        with state.lock:
            job = state.jobs.open(JobKind.LOAD, run)
            if state.closed:
                state.jobs.finish(job)
                return job
            job.reasons = [Reason.MISS] * run.num_pages
            wanted = state.find_pages(run, stored_lengths) if health is Health.RUNNING else []
            if wanted:
                # The spans pin their regions from now on: a hit at submission is not evicted
                # before it is read.
                goes_first = goes_first and not any(map(is_encoded, wanted))
                ticket = LoadTicket(job, state.namespace, for_request, bool(stored_lengths))
                state.queue_load(ticket, plan_spans(wanted), goes_first=goes_first)
            else:
                state.jobs.finish(job)
        return job

    def use_memory(self, memory: OwnersMemory) -> None:
        """Copy what is not loaded for requests out of the owner's memory from now on, where that
        has it, in place of reading it. It is verified like what is read. The owner frees that
        memory after ``close``."""
        self._reader.memory = memory

    def stats(self) -> TierStats:
        health = self.health
        reason = "" if health is Health.RUNNING else self._disk.health()[1] or "closed"
        state = self._state
        with state.lock:
            return TierStats(
                health=health,
                health_reason=reason,
                num_pages=len(state.index),
                stored_bytes=state.index.stored_bytes,
                physical_bytes=state.regions.physical_bytes,
                capacity_bytes=state.capacity_bytes,
                num_pages_stored=state.num_pages_stored,
                num_pages_loaded=state.num_pages_loaded,
                num_pages_evicted=self._reclaimer.num_pages_evicted,
                bytes_stored=state.bytes_stored,
                bytes_written=state.bytes_written,
                bytes_loaded=state.bytes_loaded,
                num_pages_copied=state.num_pages_copied,
                bytes_copied=state.bytes_copied,
                num_pages_from_memory=state.num_pages_from_memory,
                num_pages_reinserted=state.num_pages_reinserted,
                bytes_reinserted=state.bytes_reinserted,
                queued_store_bytes=state.queued_store_bytes,
                num_inflight_jobs=state.jobs.num_inflight,
                num_tenants=len(state.index.tenants),
                num_pages_erased=state.num_pages_erased,
                num_regions_stuck=len(self._reclaimer.stuck),
                reasons=dict(state.jobs.outcomes),
                store_durations=state.jobs.store_durations.take(),
                verification_durations=self._reader.verifications.take(),
            )

    def tenants(self, limit: int) -> list[TenantUsage]:
        state = self._state
        with state.lock:
            held, taken = state.index.tenants.usage(), state.regions.tenant_bytes.copy()
        names = sorted(held.keys() | taken.keys(), key=lambda name: -taken[name])
        return [TenantUsage(name, *held.get(name, (0, 0)), taken[name]) for name in names[:limit]]

    def flush(self, timeout_s: float) -> bool:
        """Wait for durability: true once every page stored before the call survives loss of power,
        as far as the device keeps what it has flushed. As a failed flush may have lost what the
        next one does not mention, false also for as long as pages are held that one failed on."""
        state = self._state
        order = self._promises.make()
        with state.lock:
            if state.closed:
                return False
            state.syncs.append(order)
            state.sync_ready.notify()
        return is_true(order, timeout_s)

    def set_namespace(self, namespace: bytes, *, keep: bool = True) -> None:
        """Change the namespace as the contract says. The bytes of the old namespace stay on disk
        until reclaimed, which takes them first unless ``keep`` says that some later process may
        open it again."""
        assert len(namespace) == NAMESPACE_BYTES, f"a namespace of {len(namespace)} bytes"
        state = self._state
        with state.lock:
            state.hide_all(keep=keep)
            state.namespace = namespace

    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        """Erase as the contract says, under every namespace."""
        if what.is_empty:
            return ended(True)
        ids = [each.id for each in what.pieces] if what.id else ()
        *others, last = what.split(_KEYS_AT_ONCE)
        erased = [self._erase(part, (), ()) for part in others]
        return all_true([*erased, self._erase(last, ids, ())])

    def erase_told(self, what: Erasure, erase: Callable[[Erasure], Future[bool]]) -> Future[bool]:
        """Have ``erase`` erase what another server told, but for the pieces of it that were erased
        here already: those that servers told one by one."""
        pieces = what.pieces
        known = self.has_erased([each.id for each in pieces])
        left = list(itertools.compress(pieces, (not is_known for is_known in known)))
        return all_true([erase(each) for each in ([what] if left == [*pieces] else left)])

    def has_erased(self, ids: Iterable[bytes]) -> list[bool]:
        """Return of each name of an erasure whether one of that name is durable here, or was noted
        so: of the last 65,536. Memory only; across restarts."""
        digests = map(xxhash.xxh3_64_intdigest, ids)
        with self._state.lock:
            return [digest in self._state.erased_ids for digest in digests]

    def note_erased(self, ids: Iterable[bytes], notes: Iterable[Note] = ()) -> Future[bool]:
        """Remember names of erasures that were done here under other names, and what the caller
        notes of any. Each note replaces the one of its name, and is kept until its time is over. At
        most 64 MiB and 65,536 of them are kept, the oldest going first. True once a restart knows
        all that. Memory only."""
        return self._erase(Erasure(()), ids, tuple(notes))

    def _erase(self, what: Erasure, ids: Iterable[bytes], notes: tuple[Note, ...]) -> Future[bool]:
        digests = tuple(map(xxhash.xxh3_64_intdigest, ids))
        state, durable = self._state, self._promises.make()
        with state.lock:
            if state.closed:
                return ended(False)
            state.erase(what, digests, notes, durable)
            jobs = state.jobs.about(what)
        unread = [ended(False)] if self._has_unread_pins else []
        return self._promises.watch(all_true([durable, *unread], jobs))

    def pin(
        self,
        name: str,
        keys: Iterable[bytes],
        tenant: bytes = NO_TENANT,
        until_s: float | None = None,
        data: bytes = b"",
        *,
        only_asks: bool = False,
    ) -> Future[bool] | PinRefusal:
        """Keep pages, those that are still to be stored too, until ``until_s`` (seconds since 1970;
        None: until it is unpinned), in the place of a pin of the same name. Memory only, in time
        that grows with the keys. ``only_asks``: say whether it would be refused, and change
        nothing.

        From the call on reclaim keeps them, as far as the bound allows for those that come later.
        True once they are kept after a crash or loss of power too. The pages themselves become
        durable as all do. False when that is not known: the pin holds, until a restart at least;
        ask again. Raises ``ValueError`` for what no pin can be.
        """
        pin = Pin.checked(name, keys, tenant, until_s, data)
        state = self._state
        with state.lock:
            if state.closed:
                return ended(False)
            self._order_pins(state.expire())
            refusal = state.pin_refusal(pin)
            if refusal is not None or only_asks:
                return refusal or ended(True)
            state.unpin([name], adopt=[pin])
            return self._order_pins([name])[0]

    def unpin(self, name: str) -> Future[bool]:
        """Let a pin go, if there is one of that name. True once it does not come back."""
        state = self._state
        with state.lock:
            if state.closed:
                return ended(False)
            state.unpin([name])
            return self._order_pins([name])[0]

    def pins(self) -> list[PinInfo]:
        """Return all pins. For an operator's request: the lock is taken for each in turn, for a
        time that grows with its keys."""
        state = self._state
        with state.lock:
            if not state.closed:
                self._order_pins(state.expire())
            names = state.pins.of_tenant(None)
        infos = []
        for name in names:
            with state.lock:
                info = state.pinned(name)
            if info is not None:
                infos.append(info)
        return infos

    def has_pin(self, name: str) -> bool:
        """Return whether there is a pin of that name. Takes the lock for an instant."""
        with self._state.lock:
            return self._state.pins.get(name) is not None

    def pin_notes(self, tenant: bytes) -> list[tuple[str, bytes]]:
        """Return names and data of a tenant's pins, which may hold a few that have just expired.
        Takes the lock for as long as it looks at each of them."""
        with self._state.lock:
            return self._state.pins.notes_of(tenant)

    @property
    def pinned_bytes(self) -> int:
        """Return what all pinned pages that are held take."""
        with self._state.lock:
            return self._state.index.pinned_bytes

    @property
    def pin_bound_bytes(self) -> int:
        """Return what all pinned pages may take together."""
        return self._state.pins.bound_bytes

    def _order_pins(self, names: list[str]) -> list[Future[bool]]:
        """Have the files of these pins settled; the caller holds the lock."""
        if not names:
            return []
        durable = self._promises.make()
        self._state.order(Order(tuple(names), durable))
        return [durable]

    def read_note(self, name: str) -> bytes:
        """Return what the owner noted last under that name, or nothing. Waits for the disk."""
        return read_note(lambda: self._device.read_file(name))

    def write_note(self, name: str, data: bytes) -> None:
        """Replace a note whole, flushed. Waits for the disk. Raises ``OSError``."""
        assert name in NOTE_NAMES, f"{name} is no name by which files of a shard are recognized"
        self._device.replace_file(name, data)

    def close(self) -> None:
        """Close as the contract says. I/O that hangs is waited for ``io_timeout_s``, then left to
        its thread: its files and the directory lock are then held until the process ends."""
        state = self._state
        with state.lock:
            if state.closed:
                return
            state.closed = True
            state.shed(Reason.CANCELLED, Reason.CANCELLED)
            state.store_ready.notify_all()
            state.io_ready.notify_all()
        has_ended = self._workers.join(self._io_timeout_s)
        self._promises.close()
        if not has_ended:
            logger.warning("%s: the device hangs; its files stay open", self.directory)
            return
        for region in state.regions:
            with contextlib.suppress(OSError):
                self._device.close(region.fd)
        self._let_go()

    def _let_go(self) -> None:
        if self._own_device is not None:
            self._own_device.release()
        self._lock.release()

    def check_integrity(self) -> None:
        """Check as the contract says, with the directory's files. Call it while idle."""
        state = self._state
        with state.lock:
            state.check_integrity()
            known = {region.name for region in state.regions}
            physical_bytes, cap = state.regions.physical_bytes, state.capacity_bytes
        assert physical_bytes <= cap, f"physical {physical_bytes} > cap {cap}"
        sequences = map(parse_region_name, self._device.list_names())
        ours = {region_name(s) for s in sequences if s is not None and s >= self._first_sequence}
        assert ours <= known, f"files not in the books: {sorted(ours - known)}"


def _unusable(directory: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{directory} cannot be used as a store ({error.strerror}); "
        "check the disk, its permissions and limits, or pass another --tier-dir"
    )

"""``BorrowedEngine``: a tier engine that keeps nothing and loads from the process that does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.storage.base import (
    EngineStats,
    Health,
    Job,
    JobKind,
    LookupResult,
    Reason,
    Run,
    Stop,
    WriteTier,
)
from sglang_tiered.storage.jobs import JobBook
from sglang_tiered.storage.lending.wire import (
    Request,
    receive_into,
    receive_message,
    send_message,
    short_path,
)
from sglang_tiered.storage.promises import ended
from sglang_tiered.storage.region.notes import Notes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from sglang_tiered.storage.base import Erasure, TenantUsage

__all__ = ["BorrowedEngine"]

NUM_THREADS = 2
"""Loads that are under way at once: the one that SGLang waits for, and the next."""

RETRY_S = 1.0
"""A lender that could not be reached is tried again after this long."""

_REASONS = tuple(Reason)


class BorrowedEngine(WriteTier):
    """Loads pages from the lender, and keeps none. Lookups answer that every key is held, and
    stores that it is held already: only the lender knows, and the caller takes the minimum of both.
    Nothing is found while ``claim`` or ``lender`` is None: what the pages are taken to be, and the
    shard of the process that has them. A page that the lender lost meanwhile is a miss."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.claim: bytes | None = None
        self.lender: Path | None = None
        self.notes = _NoNotes()
        self._clock = clock
        self._lock = threading.Lock()  # of all below
        self._closed = False
        self._generation = 0  # of erasures
        self._failed_at: float | None = None
        self._idle: list[socket.socket] = []
        self._connections: set[socket.socket] = set()
        self._jobs = JobBook()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tier-borrower")

    @property
    def serves(self) -> bool:
        """Return whether a load could bring anything."""
        return self.health is Health.RUNNING and None not in (self.claim, self.lender)

    @property
    def health(self) -> Health:
        if self._closed:
            return Health.FAILED
        failed_at = self._failed_at
        is_sick = failed_at is not None and self._clock() - failed_at < RETRY_S
        return Health.MISS_ONLY if is_sick else Health.RUNNING

    # ---- Lookups ----

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        if self.health is not Health.RUNNING:
            return LookupResult(0, Stop.UNHEALTHY)
        if not self.serves:
            return LookupResult(0, Stop.MISS if keys else Stop.END)
        return LookupResult(len(keys), Stop.END)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.serves] * len(keys)

    def some_keys(self, limit: int) -> list[bytes]:
        return []  # known here

    # ---- Jobs ----

    def submit_store(self, run: Run) -> Job:
        job = Job(JobKind.STORE, run)
        job.reasons = [Reason.DUPLICATE] * run.num_pages
        job.finish()
        return job

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        with self._lock:
            job = self._jobs.open(JobKind.LOAD, run)
            if self._closed:
                self._jobs.finish(job)
            else:
                self._threads.submit(self._load, job, self.claim, self._generation)
        return job

    def _load(self, job: Job, claim: bytes | None, generation: int) -> None:
        reasons = [Reason.MISS] * job.run.num_pages
        try:
            if claim is not None and self.lender is not None:
                self._ask(job.run, claim, self.lender, reasons)
                self._failed_at = None
        except (OSError, msgspec.MsgspecError):
            self._failed_at = self._clock()
        finally:
            with self._lock:
                if generation != self._generation:  # some of it may be erased
                    reasons = [Reason.CANCELLED] * job.run.num_pages
                job.reasons = reasons
                self._jobs.finish(job)

    def _ask(self, run: Run, claim: bytes, lender: Path, reasons: list[Reason]) -> None:
        """Fill ``reasons`` as pages arrive. Raises ``OSError`` where the lender ends before."""
        lengths = [sum(segment.nbytes for segment in page) for page in run.pages]
        connection = self._connect(lender)
        try:
            request = Request(claim, list(run.keys), lengths)
            send_message(connection, msgspec.msgpack.encode(request))
            at = 0
            while at < run.num_pages:
                piece = receive_message(connection)
                if not piece or len(piece) > run.num_pages - at:
                    raise ConnectionError("the lender ended in the middle of an answer")
                arrived = [_REASONS[number] for number in piece]
                for position, reason in enumerate(arrived, at):
                    if reason is Reason.OK:
                        for segment in run.pages[position]:
                            receive_into(connection, segment)
                    reasons[position] = reason
                at += len(piece)
        except BaseException:
            self._drop(connection)
            raise
        with self._lock:
            self._idle.append(connection)

    def _connect(self, lender: Path) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._lock:
            self._connections.add(connection)
        try:
            with short_path(lender) as path:
                connection.connect(path)
            if self._closed:  # which did not see this one, perhaps
                raise ConnectionError("closed")
        except OSError:
            self._drop(connection)
            raise
        return connection

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    # ---- What concerns the store is its owner's ----

    def set_namespace(self, namespace: bytes, *, keep: bool = True) -> None:
        """Do nothing: ``claim`` says what pages are taken to be."""

    def erase(self, what: Erasure) -> Future[bool]:
        """Fail what is on its way. The borrower keeps nothing that could come back."""
        with self._lock:
            self._generation += 1
        return ended(not self._closed)

    def flush(self, timeout_s: float) -> bool:
        return not self._closed

    def tenants(self, limit: int) -> list[TenantUsage]:
        return []

    # ---- Books ----

    def stats(self) -> EngineStats:
        """Count no pages: the lender counts what it reads for other ranks too."""
        health = self.health
        with self._lock:
            return EngineStats(
                health=health,
                health_reason="" if health is Health.RUNNING else "the rank with the pages is gone",
                num_pages=0,
                stored_bytes=0,
                physical_bytes=0,
                capacity_bytes=0,
                num_pages_stored=0,
                num_pages_loaded=0,
                num_pages_evicted=0,
                bytes_stored=0,
                bytes_written=0,
                bytes_loaded=0,
                num_pages_reinserted=0,
                bytes_reinserted=0,
                num_inflight_jobs=self._jobs.num_inflight,
                queued_store_bytes=0,
                num_tenants=0,
                num_pages_erased=0,
                num_regions_stuck=0,
                reasons={},
            )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections)
        for connection in connections:  # ends the wait for an answer
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(wait=True)
        self._idle.clear()
        for connection in list(self._connections):
            self._drop(connection)

    def check_integrity(self) -> None:
        with self._lock:
            idle = set(self._idle)
            assert idle <= self._connections, f"{len(idle - self._connections)} unknown connections"


class _NoNotes(Notes):
    """Keeps no notes: the lender keeps them."""

    def __init__(self) -> None:
        """Use no device."""

    def read(self, name: str) -> bytes:
        return b""

    def write(self, name: str, data: bytes) -> None:
        """Do nothing."""

    def remove(self, name: str) -> None:
        """Do nothing."""

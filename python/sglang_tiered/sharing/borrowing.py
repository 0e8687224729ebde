"""``BorrowedEngine``: a tier engine that keeps nothing and loads from the process that does."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from sglang_tiered.sharing.lending import SETTINGS, LendingSocket, namespace_of
from sglang_tiered.sharing.pages.client import PageClient
from sglang_tiered.sharing.pages.landing import PageOutcome
from sglang_tiered.storage.base import (
    Health,
    Job,
    JobKind,
    Reason,
    Run,
    TierEngine,
    TierStats,
)
from sglang_tiered.storage.jobs import JobBook
from sglang_tiered.storage.promises import ended
from sglang_tiered.storage.region.notes import Notes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from sglang_tiered.sharing.pages.landing import PageFetch
    from sglang_tiered.storage.base import Erasure

__all__ = ["BorrowedEngine"]

RETRY_S = 1.0
"""A lender that could not be reached is tried again after this long."""

_REASONS = {
    PageOutcome.OK: Reason.OK,
    PageOutcome.DAMAGED: Reason.CORRUPT,
    PageOutcome.LATE: Reason.IO_ERROR,
}


class BorrowedEngine(TierEngine):
    """Loads pages from the process that has a shard open, and keeps none. Lookups answer that every
    key is held, and stores that it is held already: only the lender knows, and the caller takes the
    minimum of both. Nothing is found before ``open``, nor while ``claim`` is None: what the pages
    are taken to be. A page that the lender lost meanwhile is a miss."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.claim: bytes | None = None
        self.notes = _NoNotes()
        self._clock = clock
        self._lock = threading.Lock()  # of all below
        self._lender: tuple[LendingSocket, PageClient] | None = None
        self._closed = False
        self._generation = 0  # of erasures
        self._failed_at: float | None = None
        self._jobs = JobBook()

    def open(self, shard: Path) -> None:
        """Borrow from the process that has this shard open, now or later. Once. Raises
        ``OSError``."""
        self._lender = LendingSocket(shard), PageClient(SETTINGS)

    @property
    def serves(self) -> bool:
        """Return whether a load could bring anything."""
        return self.health is Health.RUNNING and None not in (self.claim, self._lender)

    @property
    def health(self) -> Health:
        if self._closed:
            return Health.FAILED
        failed_at = self._failed_at
        is_sick = failed_at is not None and self._clock() - failed_at < RETRY_S
        return Health.MISS_ONLY if is_sick else Health.RUNNING

    # ---- Lookups ----

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.serves] * len(keys)

    # ---- Jobs ----

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        with self._lock:
            job = self._jobs.open(JobKind.LOAD, run)
            claim, lender, generation = self.claim, self._lender, self._generation
            if self._closed:
                self._jobs.finish(job)
                return job
        if claim is None or lender is None:
            self._end(job, generation, [Reason.MISS] * run.num_pages)
            return job
        socket, client = lender
        client.fetch(
            socket.address,
            namespace_of(claim),
            run.keys,
            run.pages,
            deadline_s=deadline_s,
            done=partial(self._fetched, job, generation),
        )
        return job

    def _fetched(self, job: Job, generation: int, fetch: PageFetch) -> None:
        """End a load, on the client's thread."""
        is_gone = PageOutcome.LOST in fetch.outcomes and not fetch.num_heard
        reasons = [_REASONS.get(outcome, Reason.MISS) for outcome in fetch.outcomes]
        self._end(job, generation, reasons, is_gone=is_gone)

    def _end(
        self, job: Job, generation: int, reasons: list[Reason], *, is_gone: bool = False
    ) -> None:
        with self._lock:
            self._failed_at = self._clock() if is_gone else None
            job.reasons = reasons
            if generation != self._generation:  # some of it may be erased
                job.reasons = [Reason.CANCELLED] * job.run.num_pages
            self._jobs.finish(job)

    # ---- What concerns the store is its owner's ----

    def set_namespace(self, namespace: bytes, *, keep: bool = True) -> None:
        """Do nothing: ``claim`` says what pages are taken to be."""

    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        """Fail what is on its way. The borrower keeps nothing that could come back."""
        with self._lock:
            self._generation += 1
        return ended(not self._closed)

    # ---- Books ----

    def stats(self) -> TierStats:
        """Count no pages: the lender counts what it reads for other ranks too."""
        health = self.health
        reason = "" if health is Health.RUNNING else "the rank with the pages is gone"
        with self._lock:
            return TierStats(health, reason, num_inflight_jobs=self._jobs.num_inflight)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._lender is not None:
            socket, client = self._lender
            client.close()
            socket.close()

    def check_integrity(self) -> None:
        assert not self._jobs.num_inflight, f"{self._jobs.num_inflight} loads under way"


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

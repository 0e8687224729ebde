"""``BorrowedEngine``: a tier engine that keeps nothing and loads from the process that does."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

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

    from sglang_tiered.storage.base import Erasure

__all__ = ["BorrowedEngine", "Lender"]

RETRY_S = 1.0
"""A lender that could not be reached is tried again after this long."""


class Lender(Protocol):
    """The process that has the pages."""

    def fetch(
        self,
        claim: bytes,
        run: Run,
        deadline_s: float | None,
        done: Callable[[list[Reason] | None], None],
    ) -> None:
        """Fill the pages of a run with those of the lender, if it takes them for the same
        (``claim``). ``done`` is called once, on a thread that must not wait, after the last touch
        of the pages; None: there is no lender."""

    def close(self) -> None:
        """End every fetch."""


class BorrowedEngine(TierEngine):
    """Loads pages from the lender, and keeps none. Lookups answer that every key is held, and
    stores that it is held already: only the lender knows, and the caller takes the minimum of both.
    Nothing is found while ``claim`` or ``lender`` is None: what the pages are taken to be, and the
    process that has them. A page that the lender lost meanwhile is a miss."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.claim: bytes | None = None
        self.lender: Lender | None = None
        self.notes = _NoNotes()
        self._clock = clock
        self._lock = threading.Lock()  # of all below
        self._closed = False
        self._generation = 0  # of erasures
        self._failed_at: float | None = None
        self._jobs = JobBook()

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

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.serves] * len(keys)

    # ---- Jobs ----

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        with self._lock:
            job = self._jobs.open(JobKind.LOAD, run)
            claim, lender, generation = self.claim, self.lender, self._generation
            if self._closed:
                self._jobs.finish(job)
                return job
        done = partial(self._ended, job, generation)
        if claim is None or lender is None:
            done([Reason.MISS] * run.num_pages)
        else:
            lender.fetch(claim, run, deadline_s, done)
        return job

    def _ended(self, job: Job, generation: int, reasons: list[Reason] | None) -> None:
        with self._lock:
            self._failed_at = self._clock() if reasons is None else None
            job.reasons = reasons or [Reason.MISS] * job.run.num_pages
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
        with self._lock:
            return TierStats(
                health=health,
                health_reason="" if health is Health.RUNNING else "the rank with the pages is gone",
                num_inflight_jobs=self._jobs.num_inflight,
            )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self.lender is not None:
            self.lender.close()

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

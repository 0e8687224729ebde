"""A remote tier for tests: pages in memory, held back or refused when told."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING

from kit.memory import MemoryEngine
from sglang_tiered.storage.base import Health, Job, JobKind, Reason, Run, Tier
from sglang_tiered.storage.promises import ended

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Erasure, TierStats


class SharedTier(MemoryEngine):
    """A remote tier over a dictionary. ``hold`` keeps jobs from running
    until ``release``; ``refuse`` ends stores with a reason; ``sick`` makes it serve nothing."""

    def __init__(self, tier: Tier = Tier.OBJECT) -> None:
        super().__init__(1 << 30)
        self.tier = tier
        self.holding: set[JobKind] = set()
        self.refuse: Reason | None = None
        self.sick = False
        self.known = True
        self.takes_stores = True
        self.stored_runs: list[Run] = []
        self.deadlines: list[float | None] = []
        self.hidden: set[bytes] = set()  # keys
        self.num_looks = 0  # at its health
        self._held: list[tuple[Job, float | None]] = []
        self._guard = threading.Lock()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            known = self._pages.keys() - self.hidden
            return [not self.sick and key in known for key in keys]

    def confirm(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        return self.contains(keys)

    def submit_store(self, run: Run) -> Job:
        return self._submit(self._open(JobKind.STORE, run), None)

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        self.deadlines.append(deadline_s)
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        return self._submit(self._open(JobKind.LOAD, run), deadline)

    def _submit(self, job: Job, deadline: float | None) -> Job:
        with self._guard:
            if job.kind in self.holding:
                self._held.append((job, deadline))
                return job
        return self._do(job, deadline)

    def _do(self, job: Job, deadline: float | None) -> Job:
        reason = self.refuse if job.kind is JobKind.STORE else None
        if job.kind is JobKind.LOAD and not self.hidden.isdisjoint(job.run.keys):
            reason = Reason.MISS
        if self.sick:
            reason = Reason.REJECTED if job.kind is JobKind.STORE else Reason.MISS
        if deadline is not None and time.monotonic() > deadline:
            reason = Reason.CANCELLED
        if reason is not None:
            job.reasons = [reason] * job.run.num_pages
            with self._lock:
                self._jobs.finish(job)
            return job
        if job.kind is JobKind.STORE:
            self.stored_runs.append(job.run)
            self.hidden -= set(job.run.keys)
        return self._serve(job)

    def release(self) -> None:
        with self._guard:
            held, self._held = self._held, []
            self.holding.clear()
        for job, deadline in held:
            self._do(job, deadline)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def health(self) -> Health:
        self.num_looks += 1
        return self.stats().health

    def stats(self) -> TierStats:
        stats = super().stats()
        return dataclasses.replace(stats, health=Health.MISS_ONLY) if self.sick else stats

    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        if what.spread:
            return super().erase(what)
        with self._lock:
            if what.keys is not None:
                self.hidden |= self._pages.keys() & set(what.keys)
            elif self.tier is not Tier.PEER:  # which is told by whoever erased it
                pages = self._pages.items()
                self.hidden |= {key for key, page in pages if what.tenant in (None, page.tenant)}
        return ended(True)

    def report_erased(self, told: Callable[[Sequence[Erasure]], None]) -> None:
        """Nobody else erases anything."""

    @property
    def has_listed(self) -> bool:
        return self.known

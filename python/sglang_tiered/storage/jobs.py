"""``JobBook``: the jobs of a tier that are under way, and what became of the others."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from sglang_tiered.metrics import Durations
from sglang_tiered.storage.base import Job, JobKind, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sglang_tiered.storage.base import Erasure, Run

__all__ = ["JobBook", "selects"]


def selects(what: Erasure | None) -> Callable[[Iterable[bytes], bytes], bool]:
    """Return what says of keys and their tenant whether an erasure (None: of everything) names one
    of them."""
    if what is not None and what.keys is not None:
        gone = frozenset(what.keys)
        return lambda keys, _: not gone.isdisjoint(keys)
    tenant = None if what is None else what.tenant
    return lambda _, of: tenant in (None, of)


class JobBook:
    """Jobs under way, and counts of past outcomes. The caller holds its owner's lock."""

    def __init__(self) -> None:
        self._inflight: dict[Job, float] = {}  # in order of submission, with its time
        self.store_durations = Durations()  # of jobs that made a page durable
        self.outcomes: Counter[tuple[JobKind, Reason]] = Counter()  # of pages

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def inflight(self) -> list[Job]:
        return list(self._inflight)

    def about(self, what: Erasure) -> list[Job]:
        """Return those under way that may have pages which an erasure names."""
        names, is_of_any = selects(what), what.keys is None  # a load names no tenant
        return [
            job
            for job in self._inflight
            if (is_of_any and job.kind is JobKind.LOAD) or names(job.run.keys, job.run.tenant)
        ]

    def open(self, kind: JobKind, run: Run) -> Job:
        job = Job(kind, run)
        self.add(job)
        return job

    def add(self, job: Job) -> None:
        """Count a job that another tier made for its caller too."""
        self._inflight[job] = time.monotonic()

    def note_end(self, job: Job) -> None:
        """Count the outcomes of a job that is about to be finished."""
        self.outcomes.update((job.kind, reason) for reason in job.reasons)
        submitted_at = self._inflight.pop(job)
        if job.kind is JobKind.STORE and Reason.OK in job.reasons:
            self.store_durations.record(time.monotonic() - submitted_at)

    def finish(self, job: Job) -> None:
        """Count the outcomes, then let the caller have the buffers back."""
        self.note_end(job)
        job.finish()

    def finish_with(self, job: Job, positions: Iterable[int], reason: Reason) -> None:
        for position in positions:
            job.reasons[position] = reason
        self.finish(job)

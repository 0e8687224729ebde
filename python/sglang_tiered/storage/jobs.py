"""The book of running and finished jobs of an engine."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Job, JobKind, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tiered.storage.base import Run

__all__ = ["JobBook"]

_MAX_UNREPORTED = 4096


class JobBook:
    """Guarded by the store's lock, which the caller holds."""

    def __init__(self) -> None:
        self._inflight: dict[Job, None] = {}  # in order of submission
        self._unreported: deque[Job] = deque(maxlen=_MAX_UNREPORTED)
        self.outcomes: Counter[tuple[JobKind, Reason]] = Counter()

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def inflight(self) -> list[Job]:
        return list(self._inflight)

    def open(self, kind: JobKind, run: Run) -> Job:
        job = Job(kind, run)
        self._inflight[job] = None
        return job

    def finish(self, job: Job) -> None:
        """Count the outcomes, then let the caller have the buffers back."""
        self.outcomes.update((job.kind, reason) for reason in job.reasons)
        del self._inflight[job]
        self._unreported.append(job)
        job.finish()

    def finish_with(self, job: Job, positions: Iterable[int], reason: Reason) -> None:
        for position in positions:
            job.reasons[position] = reason
        self.finish(job)

    def take_finished(self) -> list[Job]:
        finished = list(self._unreported)
        self._unreported.clear()
        return finished

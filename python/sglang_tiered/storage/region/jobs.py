"""Orders to the store's threads, and the book of running and finished jobs."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Job, JobKind, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tiered.storage.base import Page, Run
    from sglang_tiered.storage.region.reader import Wanted

__all__ = ["ClearOrder", "JobBook", "LoadSpan", "LoadTicket", "StoreTicket"]

_MAX_UNREPORTED = 4096


@dataclass(eq=False, slots=True)
class StoreTicket:
    """A store on its way to the writer: the pages that are neither held nor already coming."""

    job: Job
    namespace: bytes
    generation: int
    positions: list[int]  # of the pages within the run
    num_bytes: int

    def pages(self) -> list[tuple[bytes, Page]]:
        run = self.job.run
        return [(run.keys[i], run.pages[i]) for i in self.positions]


@dataclass(eq=False, slots=True)
class LoadTicket:
    """A load cut into spans; done when the last of them is."""

    job: Job
    namespace: bytes
    num_spans_left: int


@dataclass(eq=False, slots=True)
class LoadSpan:
    ticket: LoadTicket
    wanted: list[Wanted]


@dataclass(eq=False, slots=True)
class ClearOrder:
    """Remove every region; queued behind the stores it must not let survive."""

    done: threading.Event = field(default_factory=threading.Event)


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

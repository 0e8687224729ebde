"""``Loader``: one load over two tiers.

Each page is read from the upper tier if it is there, else from the lower one, at the same time. A
page that the upper tier turns out not to have whole (damaged, unreadable, reclaimed meanwhile) is
tried once more on the lower one, while the deadline allows. The caller's job ends when the last
part has ended, so its buffers are touched by nobody afterwards.

Parts end on the engines' threads, at times under their locks. There only outcomes are noted; what
calls an engine again, or copies, is done by one thread of this module.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_tiered.storage.base import Job, JobKind, Reason, Run
from sglang_tiered.storage.layered.tiers import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.layered.promotion import Promoter
    from sglang_tiered.storage.layered.tiers import LowerTier, ReadObserver
    from sglang_tiered.storage.region.store import RegionEngine

__all__ = ["Loader"]

JOIN_S = 10.0
logger = logging.getLogger(__name__)

_MAY_BE_BELOW = (Reason.MISS, Reason.CORRUPT, Reason.IO_ERROR)


class _LoadJob(Job):
    """Passes ``cancel`` on to its parts."""

    parts: list[Job]

    def cancel(self) -> None:
        super().cancel()
        for part in list(self.parts):
            part.cancel()


@dataclass(slots=True, eq=False)
class _Load:
    job: _LoadJob
    tenant: bytes | None  # whose pages they are, where the caller knows
    deadline: float | None  # of the loader's clock
    generation: int
    num_left: int = 1  # parts under way, and the submission itself


@dataclass(slots=True, eq=False)
class _Part:
    load: _Load
    tier: Tier
    positions: Sequence[int]
    reading: Any
    is_second: bool  # the upper tier failed these pages
    job: Job | None = None


class Loader:
    """``ended`` is called with each finished job just before its caller may know, on any thread,
    and must only note. ``generation`` counts purges: what was read before one is not promoted."""

    def __init__(
        self,
        upper: RegionEngine,
        lower: LowerTier,
        promoter: Promoter,
        *,
        ended: Callable[[Job], None],
        generation: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._upper = upper
        self._lower = lower
        self._promoter = promoter
        self._ended = ended
        self._generation = generation
        self._clock = clock
        self._lock = threading.Lock()
        self.observer: ReadObserver | None = None
        self.num_recovered = 0
        self._events: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tier-layered", daemon=True)
        self._thread.start()

    def open(self, run: Run) -> Job:
        """A job for the run, for ``begin``."""
        job = _LoadJob(JobKind.LOAD, run)
        job.parts = []
        return job

    def begin(self, job: Job, *, deadline_s: float | None, tenant: bytes | None) -> None:
        """Submit the parts of a job. Memory only."""
        assert isinstance(job, _LoadJob)
        deadline = None if deadline_s is None else self._clock() + deadline_s
        load = _Load(job, tenant, deadline, self._generation())
        run = job.run
        job.reasons = [Reason.MISS] * run.num_pages
        above = self._upper.view.contains(run.keys)
        upper = [i for i, held in enumerate(above) if held]
        rest = [i for i, held in enumerate(above) if not held]
        below = self._lower.contains([run.keys[i] for i in rest]) if rest else []
        lower = [i for i, held in zip(rest, below, strict=True) if held]
        if upper:
            self._submit(load, Tier.NVME, upper)
        if lower:
            self._submit(load, Tier.OBJECT, lower)
        self._settle(load)

    def _submit(
        self, load: _Load, tier: Tier, positions: Sequence[int], *, is_second: bool = False
    ) -> None:
        run = load.job.run
        if len(positions) < run.num_pages:
            keys = tuple(run.keys[i] for i in positions)
            run = Run(keys, tuple(run.pages[i] for i in positions), run.tenant)
        with self._lock:
            load.num_left += 1
        observer = self.observer
        reading = None if observer is None else observer.begin_read(run.num_bytes, tier)
        part = _Part(load, tier, positions, reading, is_second)
        if tier is Tier.NVME:
            job = self._upper.submit_load(run)
        else:
            job = self._lower.submit_load(run, deadline_s=self._left_s(load))
        part.job = job
        load.job.parts.append(job)
        job.call_at_end(lambda _: self._part_ended(part))

    def _left_s(self, load: _Load) -> float | None:
        return None if load.deadline is None else max(0.0, load.deadline - self._clock())

    def _part_ended(self, part: _Part) -> None:
        """Under an engine's lock, perhaps."""
        assert part.job is not None
        reasons = part.job.reasons
        whole = all(reason is Reason.OK for reason in reasons)
        if self.observer is not None and part.reading is not None:
            self.observer.end_read(part.reading, is_complete=whole)
        for position, reason in zip(part.positions, reasons, strict=True):
            part.load.job.reasons[position] = reason
        if part.tier is Tier.NVME and whole:
            self._settle(part.load)
        else:
            self._events.put(part)

    def _settle(self, load: _Load) -> None:
        with self._lock:
            load.num_left -= 1
            if load.num_left:
                return
        self._ended(load.job)
        load.job.finish()

    # ---- The thread ----

    def _run(self) -> None:
        closing = False
        while not (closing and self._events.empty()):
            part = self._events.get()
            if part is None:
                closing = True
                continue
            try:
                self._follow_up(part)
            except Exception:
                logger.exception("a load over two tiers failed by our own fault")
            self._settle(part.load)

    def _follow_up(self, part: _Part) -> None:
        load = part.load
        reasons = load.job.reasons
        if part.tier is Tier.OBJECT:
            self._promote(part)
            return
        expired = load.deadline is not None and self._clock() >= load.deadline
        missing = [i for i in part.positions if reasons[i] in _MAY_BE_BELOW]
        if not missing or expired or load.job.cancelled:
            return
        held = self._lower.contains([load.job.run.keys[i] for i in missing])
        again = [i for i, is_held in zip(missing, held, strict=True) if is_held]
        if again:
            self._submit(load, Tier.OBJECT, again, is_second=True)

    def _promote(self, part: _Part) -> None:
        load, run = part.load, part.load.job.run
        good = [i for i in part.positions if load.job.reasons[i] is Reason.OK]
        if part.is_second:
            self.num_recovered += len(good)
        if good and load.tenant is not None:
            self._promoter.promote(
                [run.keys[i] for i in good],
                [run.pages[i] for i in good],
                load.tenant,
                lambda: self._generation() == load.generation,
            )

    def close(self) -> None:
        """Once no part can end any more."""
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

"""``Loader``: one load over several tiers.

Each page is read from the first tier that holds it: NVMe, then the remote ones in the order that
the caller prefers; all at the same time. A page that a tier turns out not to have whole (damaged,
unreadable, gone meanwhile) is tried at the next one that holds it, while the deadline allows. The
caller's job ends when the last part has ended, so no thread touches its buffers afterwards.

Parts end on the engines' threads, at times under their locks. There only outcomes are noted; what
calls an engine again, or copies, is done by one thread of this module.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Job, JobKind, Reason, Run, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sglang_tiered.storage.base import TierEngine
    from sglang_tiered.storage.stack.promotion import Promoter
    from sglang_tiered.storage.stack.tiers import ReadObserver

__all__ = ["Loader"]

JOIN_S = 10.0
logger = logging.getLogger(__name__)

_INTERNAL_ERROR = "internal error while loading from tiers; pages not yet read are misses"
_MAY_BE_ELSEWHERE = (Reason.MISS, Reason.CORRUPT, Reason.IO_ERROR)


@dataclass(slots=True, eq=False)
class _StackLoad:
    job: Job
    tenant: bytes | None  # whose pages they are, where the caller knows
    deadline: float | None  # of the loader's clock
    generation: int
    order: Sequence[Tier]  # of the remote tiers
    num_left: int = 1  # parts under way, and the submission itself


@dataclass(slots=True, eq=False)
class _TierPart:
    load: _StackLoad
    tier: Tier
    positions: Sequence[int]
    failed: frozenset[Tier]  # these tiers could not serve these pages
    job: Job | None = None


class Loader:
    """``order`` says in which order to ask the remote tiers.
    ``ended`` is called with each finished job just before its caller may know, on any thread, and
    must only note. ``generation`` counts erasures: what was read before one is not promoted."""

    def __init__(
        self,
        tiers: Mapping[Tier, TierEngine],
        promoter: Promoter,
        *,
        order: Callable[[], Sequence[Tier]],
        ended: Callable[[Job], None],
        generation: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._order = order
        self._promoter = promoter
        self._ended = ended
        self._generation = generation
        self._clock = clock
        self._lock = threading.Lock()
        self.observer: ReadObserver | None = None
        self.num_recovered: Counter[Tier] = Counter()  # pages that another tier had failed
        self._events: queue.SimpleQueue[_TierPart | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tier-stack", daemon=True)
        if len(tiers) > 1:
            self._thread.start()

    def read_nvme(self, run: Run) -> Job:
        """Load from NVMe alone."""
        return self._ask(Tier.NVME, run)

    def begin(self, job: Job, *, deadline_s: float | None, tenant: bytes | None) -> None:
        """Submit the parts of a job. Memory only. Raises nothing: parts may be under way."""
        deadline = None if deadline_s is None else self._clock() + deadline_s
        load = _StackLoad(job, tenant, deadline, self._generation(), self._order())
        job.reasons = [Reason.MISS] * job.run.num_pages
        try:
            self._submit_from((Tier.NVME, *load.order), load, range(job.run.num_pages), frozenset())
        except Exception:
            logger.exception(_INTERNAL_ERROR)
        self._settle(load)

    def _submit_from(
        self,
        tiers: Sequence[Tier],
        load: _StackLoad,
        positions: Sequence[int],
        failed: frozenset[Tier],
    ) -> None:
        """Ask the first tier that holds it for each page; a page without one stays as it is."""
        parts: list[tuple[Tier, list[int]]] = []
        keys = load.job.run.keys
        for tier in tiers:
            holder = self._tiers.get(tier)
            if not positions or holder is None:
                continue
            held = holder.contains([keys[i] for i in positions])
            chosen = [i for i, is_held in zip(positions, held, strict=True) if is_held]
            positions = [i for i, is_held in zip(positions, held, strict=True) if not is_held]
            if chosen:
                parts.append((tier, chosen))
        for tier, chosen in parts:
            self._submit(load, tier, chosen, failed)

    def _submit(
        self, load: _StackLoad, tier: Tier, positions: Sequence[int], failed: frozenset[Tier]
    ) -> None:
        run = load.job.run
        if len(positions) < run.num_pages:
            keys = tuple(run.keys[i] for i in positions)
            run = Run(keys, tuple(run.pages[i] for i in positions), run.tenant, run.meter)
        part = _TierPart(load, tier, positions, failed)
        with self._lock:  # the last thing before: what raises leaves no part that never ends
            load.num_left += 1
        part.job = self._ask(tier, run, deadline_s=self._left_s(load))
        part.job.call_at_end(lambda _: self._part_ended(part))

    def _ask(self, tier: Tier, run: Run, *, deadline_s: float | None = None) -> Job:
        """Submit to a tier, and have the read timed. What raises has failed these pages: other
        parts of the load may be under way, whose end the caller waits for."""
        ends: list[Callable[[Job], None]] = []
        try:
            if (observer := self.observer) is not None:
                reading = observer.begin_read(run.num_bytes, tier)
                ends.append(lambda job: observer.end_read(reading, is_complete=all(job.ok)))
            if run.meter is not None:
                ends.append(run.meter.begins(tier, run.num_bytes))
            job = self._tiers[tier].submit_load(run, deadline_s=deadline_s)
        except Exception:
            logger.exception(_INTERNAL_ERROR)
            job = Job(JobKind.LOAD, run)
            job.reasons = [Reason.IO_ERROR] * run.num_pages
            job.finish()
        for end in ends:
            job.call_at_end(end)
        return job

    def _left_s(self, load: _StackLoad) -> float | None:
        return None if load.deadline is None else max(0.0, load.deadline - self._clock())

    def _part_ended(self, part: _TierPart) -> None:
        """Note that a part ended. May run under an engine's lock; must not block."""
        assert part.job is not None
        reasons = part.job.reasons
        for position, reason in zip(part.positions, reasons, strict=True):
            part.load.job.reasons[position] = reason
        if part.tier is Tier.NVME and all(part.job.ok):
            self._settle(part.load)
        else:
            self._events.put(part)

    def _settle(self, load: _StackLoad) -> None:
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
                logger.exception(_INTERNAL_ERROR)
            self._settle(part.load)

    def _follow_up(self, part: _TierPart) -> None:
        load = part.load
        if part.tier is not Tier.NVME:
            self._promote(part)
        expired = load.deadline is not None and self._clock() >= load.deadline
        missing = [i for i in part.positions if load.job.reasons[i] in _MAY_BE_ELSEWHERE]
        if not missing or expired:
            return
        failed = part.failed | {part.tier}
        others = [tier for tier in load.order if tier not in failed]
        self._submit_from(others, load, missing, failed)

    def _promote(self, part: _TierPart) -> None:
        load, run = part.load, part.load.job.run
        good = [i for i in part.positions if load.job.reasons[i] is Reason.OK]
        if part.failed:
            self.num_recovered[part.tier] += len(good)
        if good and load.tenant is not None:
            self._promoter.promote(
                [run.keys[i] for i in good],
                [run.pages[i] for i in good],
                load.tenant,
                part.tier,
                lambda: self._generation() == load.generation,
            )

    def close(self) -> None:
        """End the thread. Call it once no part can end."""
        if not self._thread.is_alive():
            return
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

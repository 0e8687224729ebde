"""``LayeredEngine``: one tier engine over two, NVMe (upper) and an object store (lower).

Callers store into the upper tier only. From there pages go down in the background (``demotion``),
and pages found below come up again when a load wants them (``loading``, ``promotion``). The upper
tier's failures leave the lower one serving, and the reverse.

Locks: ``_gate`` is held while something is submitted to a tier on our own account, and while a
purge begins in both, so that nothing read before a purge is stored behind it. ``_lock`` guards our
books, is a leaf, and may be taken under an engine's own lock.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import (
    NO_TENANT,
    EngineStats,
    Health,
    Job,
    JobKind,
    LookupResult,
    Reason,
    Stop,
    TierEngine,
)
from sglang_tiered.storage.layered.demotion import Demoter
from sglang_tiered.storage.layered.forgetting import LayeredForgetting
from sglang_tiered.storage.layered.loading import Loader
from sglang_tiered.storage.layered.promotion import Promoter
from sglang_tiered.storage.layered.tiers import LayeredSettings, LayeredStats, Span, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.base import Run, TenantUsage
    from sglang_tiered.storage.layered.tiers import LowerTier, ReadObserver
    from sglang_tiered.storage.region.store import RegionEngine

__all__ = ["LayeredEngine"]

_MAX_UNREPORTED = 4096
_CLEAR_TIMEOUT_S = 60.0
_LOOK_S = 0.02
_FLUSH_STEP_S = 1.0


class LayeredEngine(TierEngine):
    """Owns both engines, and closes them. ``may_promote`` is asked before pages are copied up; it
    must not block (default: always)."""

    def __init__(
        self,
        upper: RegionEngine,
        lower: LowerTier,
        settings: LayeredSettings | None = None,
        *,
        may_promote: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or LayeredSettings()
        self.upper = upper
        self.lower = lower
        self._clock = clock
        self._gate = threading.Lock()
        self._lock = threading.Lock()
        self._generation = 0
        self._closed = False
        self._inflight: dict[Job, None] = {}
        self._num_loads = 0  # of callers, under way
        self._unreported: deque[Job] = deque(maxlen=_MAX_UNREPORTED)
        self._outcomes: Counter[tuple[JobKind, Reason]] = Counter()
        self._bytes = dict.fromkeys(JobKind, 0)
        self._promoter = Promoter(upper, self._gate, settings.promotion_bytes, may_promote)
        self._loader = Loader(
            upper,
            lower,
            self._promoter,
            ended=self._ended,
            generation=lambda: self._generation,
            clock=clock,
        )
        self._demoter = Demoter(
            upper,
            lower,
            settings,
            gate=self._gate,
            generation=lambda: self._generation,
            is_idle=lambda: self._num_loads == 0,
            clock=clock,
        )

    def observe(self, observer: ReadObserver | None) -> None:
        """Tell somebody of every read of a tier from now on."""
        self._loader.observer = observer

    # ---- Lookups ----

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        num_hits = sum(span.num_pages for span in self.lookup_spans(keys))
        if num_hits == len(keys) and not self._closed:
            return LookupResult(num_hits, Stop.END)
        stops = [tier.lookup(keys[num_hits : num_hits + 1]).stop for tier in self._tiers()]
        if self._closed or set(stops) == {Stop.UNHEALTHY}:
            return LookupResult(num_hits, Stop.UNHEALTHY)
        return LookupResult(num_hits, Stop.PENDING if Stop.PENDING in stops else Stop.MISS)

    def lookup_spans(self, keys: Sequence[bytes]) -> list[Span]:
        """The leading pages that a load could serve now, by the tier that they would come from.
        Memory only."""
        if self._closed:
            return []
        spans: list[Span] = []
        at = self.upper.lookup(keys).num_hits
        if at:
            spans.append(Span(Tier.NVME, at))
        rest = keys[at:]
        if not rest or not self.lower.lookup(rest[:1]).num_hits:
            return spans
        serving = [tier.stats().health is Health.RUNNING for tier in self._tiers()]
        above = self.upper.view.contains(rest) if serving[0] else [False] * len(rest)
        below = self.lower.contains(rest) if serving[1] else [False] * len(rest)
        sources = [
            Tier.NVME if up else Tier.OBJECT if down else None
            for up, down in zip(above, below, strict=True)
        ]
        for source, pages in itertools.groupby(sources):
            if source is None:
                break
            spans.append(Span(source, len(list(pages))))
        return spans

    def contains_below(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the lower tier holds each key. Memory only."""
        return self.lower.contains(keys)

    def some_keys(self, limit: int) -> list[bytes]:
        return self.upper.some_keys(limit) or self.lower.some_keys(limit)

    def _tiers(self) -> tuple[RegionEngine, LowerTier]:
        return self.upper, self.lower

    # ---- Jobs ----

    def submit_store(self, run: Run) -> Job:
        job = self.upper.submit_store(run)
        with self._lock:
            self._inflight[job] = None
        job.call_at_end(self._ended)
        return job

    def submit_load(
        self, run: Run, *, deadline_s: float | None = None, tenant: bytes | None = None
    ) -> Job:
        """Reads of the lower tier fail after ``deadline_s``. Pages that came from there are stored
        in the upper one too if ``tenant`` says whose they are."""
        job = self._loader.open(run)
        with self._lock:
            self._inflight[job] = None
            self._num_loads += 1
            closed = self._closed
        if closed:
            self._ended(job)
            job.finish()
        else:
            self._demoter.queue.touch(run.keys)
            self._loader.begin(job, deadline_s=deadline_s, tenant=tenant)
        return job

    def _ended(self, job: Job) -> None:
        """Under an engine's lock, perhaps: notes only."""
        with self._lock:
            self._inflight.pop(job, None)
            self._unreported.append(job)
            self._outcomes.update((job.kind, reason) for reason in job.reasons)
            for page, reason in zip(job.run.pages, job.reasons, strict=True):
                if reason is Reason.OK:
                    self._bytes[job.kind] += sum(segment.nbytes for segment in page)
            if job.kind is JobKind.LOAD:
                self._num_loads -= 1
        if job.kind is JobKind.STORE:
            pages = zip(job.run.keys, job.reasons, strict=True)
            self._demoter.stored([k for k, r in pages if r is Reason.OK], job.run.tenant)
        elif not self._num_loads:
            self._demoter.wake()

    def poll(self) -> list[Job]:
        self.upper.poll()  # of the parts; nobody waits for their reports
        self.lower.poll()
        with self._lock:
            finished = list(self._unreported)
            self._unreported.clear()
            return finished

    # ---- Making pages durable below ----

    def flush(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Copy these pages of one chain to the lower tier now, ahead of everything: whether each is
        durable there. Blocks; never on the scheduler thread."""
        deadline = self._clock() + timeout_s
        pause_s = _LOOK_S
        while True:
            held = self.lower.contains(keys)
            lacking = [key for key, is_held in zip(keys, held, strict=True) if not is_held]
            left_s = deadline - self._clock()
            there = any(self.upper.view.contains(lacking))
            if not there or left_s <= 0 or self._closed:
                return held
            begun = self._demoter.urge(lacking, NO_TENANT)
            while not begun.wait(_LOOK_S) and self._clock() < deadline:
                # What fills the staging memory may wait for its object to be full.
                self.lower.flush(min(_FLUSH_STEP_S, max(0.0, deadline - self._clock())))
            self.lower.flush(max(0.0, min(deadline - self._clock(), timeout_s)))
            if not all(self.lower.contains(keys)):
                time.sleep(min(pause_s, max(0.0, deadline - self._clock())))
                pause_s = min(2 * pause_s, _FLUSH_STEP_S)

    # ---- Forgetting ----

    def begin_purge(self, tenant: bytes | None) -> LayeredForgetting:
        """The part of ``purge``, or of ``clear`` for None, that any thread may do: memory only."""
        with self._gate:
            self._generation += 1
            upper = self.upper.begin_purge(tenant)
            return LayeredForgetting(upper, self.lower.begin_purge(tenant))

    def purge(self, tenant: bytes, timeout_s: float) -> bool:
        return self.begin_purge(tenant).wait(timeout_s)

    def clear(self) -> bool:
        """The lower tier is waited for a minute: its storage may be out of reach for longer."""
        return self.begin_purge(None).wait(_CLEAR_TIMEOUT_S)

    def set_namespace(self, namespace: bytes, *, keep: bool = True) -> None:
        """As ``RegionEngine.set_namespace``, for a namespace that nobody can name again: nothing
        of it is copied down unless ``flush`` asks for it."""
        with self._gate:
            self._generation += 1
            self._demoter.suspend()
            self.lower.set_namespace(namespace)
        self.upper.set_namespace(namespace, keep=keep)

    # ---- Books ----

    def stats(self) -> EngineStats:
        """The callers' jobs, and the upper tier's space. Each tier's own: ``upper.stats()`` and
        ``lower.stats()``; what moved between them: ``layered_stats()``."""
        upper, lower = self.upper.stats(), self.lower.stats()
        serving = lower if lower.health is Health.RUNNING else upper
        with self._lock:
            return dataclasses.replace(
                upper,
                health=Health.FAILED if self._closed else serving.health,
                health_reason=serving.health_reason,
                num_inflight_jobs=len(self._inflight),
                num_pages_loaded=self._outcomes[JobKind.LOAD, Reason.OK],
                bytes_loaded=self._bytes[JobKind.LOAD],
                num_pages_stored=self._outcomes[JobKind.STORE, Reason.OK],
                bytes_stored=self._bytes[JobKind.STORE],
                reasons=dict(self._outcomes),
            )

    def layered_stats(self) -> LayeredStats:
        promoter, demoter = self._promoter, self._demoter
        return LayeredStats(
            num_promoted=promoter.num_promoted,
            num_promotions_dropped=promoter.num_dropped,
            num_demoted=demoter.num_demoted,
            bytes_demoted=demoter.bytes_demoted,
            num_demotions_dropped=demoter.num_dropped,
            num_demotions_gone=demoter.num_gone,
            demote_backlog=demoter.backlog,
            num_recovered=self._loader.num_recovered,
        )

    def tenants(self, limit: int) -> list[TenantUsage]:
        return self.upper.tenants(limit)

    def drain(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            jobs = list(self._inflight)
        return all(job.wait(max(deadline - time.monotonic(), 0.0)) for job in jobs)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._demoter.close()
        self.upper.close()
        self.lower.close()
        self._loader.close()

    def check_integrity(self) -> None:
        self.upper.check_integrity()
        self.lower.check_integrity()
        with self._lock:
            assert self._num_loads >= 0, f"{self._num_loads} loads under way"
            loads = sum(job.kind is JobKind.LOAD for job in self._inflight)
            assert loads == self._num_loads, f"{loads} loads, counted {self._num_loads}"
        staged, flying = self._demoter.take_stock()
        assert staged >= 0 and flying >= 0, f"{staged} bytes of {flying} pages on their way"

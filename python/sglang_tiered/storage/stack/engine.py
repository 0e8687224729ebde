"""``LayeredEngine``: one tier engine over NVMe (upper), other servers (peers), an object store
(lower).

Callers store into the upper tier only. From there pages go down in the background (``demotion``),
and pages found in a far tier come up when a load wants them (``loading``, ``promotion``). A tier
that fails leaves the others serving.

Locks: ``_gate`` is held while something is submitted to a tier on our own account, and while a
purge begins in all, so that nothing read before a purge is stored behind it. ``_lock`` guards our
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
from sglang_tiered.storage.stack.demotion import Demoter
from sglang_tiered.storage.stack.forgetting import LayeredForgetting
from sglang_tiered.storage.stack.loading import Loader
from sglang_tiered.storage.stack.promotion import Promoter
from sglang_tiered.storage.stack.tiers import (
    FAR_TIERS,
    FarStats,
    LayeredSettings,
    LayeredStats,
    Span,
    Tier,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.base import Run, TenantUsage
    from sglang_tiered.storage.region.store import RegionEngine
    from sglang_tiered.storage.stack.tiers import (
        LowerTier,
        PeerSource,
        ReadObserver,
        Source,
        Unfinished,
    )

__all__ = ["LayeredEngine"]

_MAX_UNREPORTED = 4096
_LOOK_S = 0.02
_FLUSH_STEP_S = 1.0


class LayeredEngine(TierEngine):
    """Owns all its tiers, and closes them. ``order`` says which far tier is asked first and
    ``may_promote`` whether pages may be copied up (default: always); neither must block."""

    def __init__(
        self,
        upper: RegionEngine,
        lower: LowerTier | None = None,
        settings: LayeredSettings | None = None,
        *,
        peers: PeerSource | None = None,
        order: Callable[[], Sequence[Tier]] = lambda: FAR_TIERS,
        may_promote: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or LayeredSettings()
        self.upper = upper
        self.lower = lower
        self.peers = peers
        self.far: dict[Tier, Source] = {}
        if peers is not None:
            self.far[Tier.PEER] = peers
        if lower is not None:
            self.far[Tier.OBJECT] = lower
        self._tiers: list[RegionEngine | Source] = [upper, *self.far.values()]
        self._order = order
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
            self.far,
            self._promoter,
            order=order,
            ended=self._ended,
            generation=lambda: self._generation,
            clock=clock,
        )
        self._demoter: Demoter | None = None  # without a lower tier nothing goes down
        if lower is not None:
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
        stops = [tier.lookup(keys[num_hits : num_hits + 1]).stop for tier in self._tiers]
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
        if rest and any(far.lookup(rest[:1]).num_hits for far in self.far.values()):
            spans += self._spans_anywhere(rest)
        return spans

    def _spans_anywhere(self, keys: Sequence[bytes]) -> list[Span]:
        """As ``lookup_spans``, for keys of which NVMe may hold some only."""
        tiers: list[Tier | None] = [None] * len(keys)
        lacking = list(range(len(keys)))
        for tier in (Tier.NVME, *self._order()):
            held = self._contains(tier, [keys[i] for i in lacking])
            for i in itertools.compress(lacking, held):
                tiers[i] = tier
            lacking = [i for i, is_held in zip(lacking, held, strict=True) if not is_held]
            if not lacking:
                break
        spans = []
        for found, pages in itertools.groupby(tiers):
            if found is None:
                break
            spans.append(Span(found, len(list(pages))))
        return spans

    def _contains(self, tier: Tier, keys: Sequence[bytes]) -> list[bool]:
        """Whether a tier could serve each key now."""
        if tier is Tier.NVME:
            serves = self.upper.stats().health is Health.RUNNING
            return self.upper.view.contains(keys) if serves else [False] * len(keys)
        source = self.far.get(tier)
        if source is None or source.health is not Health.RUNNING:
            return [False] * len(keys)
        return source.contains(keys)

    def contains_far(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether any tier beyond NVMe could serve each key now. Memory only."""
        held = [False] * len(keys)
        for tier in self.far:
            there = self._contains(tier, keys)
            held = [before or now for before, now in zip(held, there, strict=True)]
        return held

    def contains_below(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the lower tier holds each key. Memory only."""
        return [False] * len(keys) if self.lower is None else self.lower.contains(keys)

    def some_keys(self, limit: int) -> list[bytes]:
        found = (tier.some_keys(limit) for tier in self._tiers)
        return next(filter(None, found), [])

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
        """Reads of far tiers fail after ``deadline_s``. Pages that came from there are stored in
        the upper one too if ``tenant`` says whose they are."""
        job = self._loader.open(run)
        with self._lock:
            self._inflight[job] = None
            self._num_loads += 1
            closed = self._closed
        if closed:
            self._ended(job)
            job.finish()
        else:
            if self._demoter is not None:
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
        if self._demoter is None:
            return
        if job.kind is JobKind.STORE:
            pages = zip(job.run.keys, job.reasons, strict=True)
            self._demoter.stored([k for k, r in pages if r is Reason.OK], job.run.tenant)
        elif not self._num_loads:
            self._demoter.wake()

    def poll(self) -> list[Job]:
        for tier in self._tiers:
            tier.poll()  # of the parts; nobody waits for their reports
        with self._lock:
            finished = list(self._unreported)
            self._unreported.clear()
            return finished

    # ---- Making pages durable below ----

    def flush(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Copy these pages of one chain to the lower tier now, ahead of everything: whether each is
        durable there. Blocks; never on the scheduler thread."""
        if self.lower is None or self._demoter is None:
            return [False] * len(keys)
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

    def begin_purge(
        self, tenant: bytes | None, *, was_told: bool = False, tells_peers: bool = True
    ) -> LayeredForgetting:
        """The part of ``purge``, or of ``clear`` for None, that any thread may do: memory only.
        What a peer purged and told us of is not told again, and not purged again from the lower
        tier, which we share with it: perhaps that was long ago, with much stored there since."""
        with self._gate:
            begun: list[Unfinished] = [self.upper.begin_purge(tenant)]
            if self.lower is not None and was_told:
                self.lower.hide(tenant)
            elif self.lower is not None:
                begun.append(self.lower.begin_purge(tenant))
            if self.peers is not None and tells_peers and not was_told:
                begun.append(self.peers.begin_purge(tenant, begun[0]))
            # Last: who reads pages under the new generation must find nothing purged any more.
            self._generation += 1
            return LayeredForgetting(*begun)

    def purge(self, tenant: bytes, timeout_s: float) -> bool:
        return self.begin_purge(tenant).wait(timeout_s)

    def clear(self, timeout_s: float) -> bool:
        return self.begin_purge(None).wait(timeout_s)

    def set_namespace(
        self, namespace: bytes, *, keep: bool = True, is_nameless: bool = True
    ) -> None:
        """As ``RegionEngine.set_namespace``. Of a namespace that nobody can name again
        (``is_nameless``) nothing is copied down unless ``flush`` asks for it."""
        with self._gate:
            if self._demoter is not None and is_nameless:
                self._demoter.suspend()
            for source in self.far.values():
                source.set_namespace(namespace)
            if self._demoter is not None:
                self._demoter.look_again()
            self.upper.set_namespace(namespace, keep=keep)
            self._generation += 1  # last, as for a purge

    # ---- Books ----

    def stats(self) -> EngineStats:
        """The callers' jobs, and the upper tier's space. Each tier's own: ``upper.stats()`` and so
        on; what moved between them: ``far_stats()`` and ``layered_stats()``."""
        upper = self.upper.stats()
        serves = any(source.health is Health.RUNNING for source in self.far.values())
        health = Health.RUNNING if serves else upper.health
        with self._lock:
            return dataclasses.replace(
                upper,
                health=Health.FAILED if self._closed else health,
                health_reason="" if serves else upper.health_reason,
                num_inflight_jobs=len(self._inflight),
                num_pages_loaded=self._outcomes[JobKind.LOAD, Reason.OK],
                bytes_loaded=self._bytes[JobKind.LOAD],
                num_pages_stored=self._outcomes[JobKind.STORE, Reason.OK],
                bytes_stored=self._bytes[JobKind.STORE],
                reasons=dict(self._outcomes),
            )

    def far_stats(self, tier: Tier) -> FarStats:
        return FarStats(
            num_promoted=self._promoter.num_promoted[tier],
            num_promotions_dropped=self._promoter.num_dropped[tier],
            num_recovered=self._loader.num_recovered[tier],
        )

    def layered_stats(self) -> LayeredStats:
        """Of the object store: what came from there, and what went there."""
        demoter = self._demoter
        assert demoter is not None, "there is no object store"
        return LayeredStats(
            **dataclasses.asdict(self.far_stats(Tier.OBJECT)),
            num_demoted=demoter.num_demoted,
            bytes_demoted=demoter.bytes_demoted,
            num_demotions_dropped=demoter.num_dropped,
            num_demotions_gone=demoter.num_gone,
            demote_backlog=demoter.backlog,
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
        if self._demoter is not None:
            self._demoter.close()
        if self.peers is not None:
            self.peers.close()  # which serves others from the upper tier
        self.upper.close()
        if self.lower is not None:
            self.lower.close()
        self._loader.close()

    def check_integrity(self) -> None:
        for tier in self._tiers:
            tier.check_integrity()
        with self._lock:
            assert self._num_loads >= 0, f"{self._num_loads} loads under way"
            loads = sum(job.kind is JobKind.LOAD for job in self._inflight)
            assert loads == self._num_loads, f"{loads} loads, counted {self._num_loads}"
        staged, flying = (0, 0) if self._demoter is None else self._demoter.take_stock()
        assert staged >= 0 and flying >= 0, f"{staged} bytes of {flying} pages on their way"

"""``TierStack``: one tier made of this server's NVMe and any number of remote ones.

Callers store into NVMe only. From there pages go down to a bucket in the background (``demotion``),
and pages found in a remote tier come up when a load wants them (``loading``). A tier
that fails leaves the others serving. Without remote tiers everything is NVMe's own answer, and
nothing runs here.

Locks: ``_gate`` is held while the stack submits something of its own to a tier, and while it erases
in all, so that nothing read before is stored behind that. ``_lock`` guards the stack's
books, is a leaf, and may be taken under an engine's own lock.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from sglang_tiered.storage.base import (
    Erasure,
    Health,
    Job,
    JobKind,
    LookupResult,
    Reason,
    Span,
    Stop,
    Tier,
    TierEngine,
    TierStats,
)
from sglang_tiered.storage.promises import all_true, ended, is_true
from sglang_tiered.storage.region.engine import RegionEngine
from sglang_tiered.storage.stack.demotion import Demoter, StackSettings
from sglang_tiered.storage.stack.loading import Loader, Promoter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Run
    from sglang_tiered.storage.bucket import BucketEngine
    from sglang_tiered.storage.stack.loading import Begins


logger = logging.getLogger(__name__)

_LOOK_S = 0.02
_LAST_LOOK_S = 1.0
_TOLD_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Pages that came from one remote tier since the engine was opened."""

    num_promoted: int  # copied to NVMe after a load found them there
    num_promotions_dropped: int  # NVMe was busy or refused, or memory for copies was short
    num_recovered: int  # that a tier asked before could not serve


@dataclass(frozen=True, slots=True)
class StackStats(RemoteStats):
    """Pages that moved between NVMe and the bucket, and what waits now."""

    num_demoted: int  # copied to the bucket, durable
    bytes_demoted: int
    num_demotions_dropped: int  # refused for a final reason, failed too often, or queue full
    num_demotions_gone: int  # NVMe evicted them before their turn
    demote_backlog: int  # pages that wait to be copied or are on their way


class TierStack(TierEngine):
    """Owns all its tiers, and closes them: the remote ones first, as they may serve others from
    NVMe. ``order`` says which remote tier is asked first (default: as they are listed) and
    ``may_promote`` whether pages may be copied up (default: always); neither must block. What other
    servers erased in the bucket is erased by ``on_told``, on a thread of the bucket: it erases that
    in memory too, and calls ``erase``, which is the default."""

    def __init__(
        self,
        nvme: TierEngine,
        remote: Sequence[TierEngine] = (),
        settings: StackSettings | None = None,
        *,
        order: Callable[[], Sequence[Tier]] | None = None,
        may_promote: Callable[[], bool] = lambda: True,
        on_told: Callable[[Erasure], Future[bool]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or StackSettings()
        self.nvme = nvme
        self.remote = {tier.tier: tier for tier in remote}
        self.bucket = cast("BucketEngine | None", self.remote.get(Tier.OBJECT))
        self._clock = clock
        self._gate = threading.Lock()
        self._lock = threading.Lock()
        self._generation = 0
        self._closed = False
        self._num_loads = 0  # of callers, under way
        self._promoter = Promoter(nvme, self._gate, settings.promotion_bytes, may_promote)
        self._loader = Loader(
            {Tier.NVME: nvme, **self.remote},
            self._promoter,
            order=order or (lambda: tuple(self.remote)),
            ended=self._ended,
            generation=lambda: self._generation,
            clock=clock,
        )
        self._on_told = on_told or self.erase
        self._demoter: Demoter | None = None  # without a bucket nothing goes down
        if self.bucket is not None:
            assert isinstance(nvme, RegionEngine), "what is borrowed is its owner's to copy"
            self.bucket.report_erased(self._told)
            self._demoter = Demoter(
                nvme,
                self.bucket,
                settings,
                gate=self._gate,
                generation=lambda: self._generation,
                is_idle=lambda: self._num_loads == 0,
                clock=clock,
            )

    @property
    def _all(self) -> list[TierEngine]:
        return [self.nvme, *self.remote.values()]

    @property
    def generation(self) -> int:
        """Changes with every erasure, once all tiers hide what it names."""
        return self._generation

    def observe(self, observer: Begins) -> None:
        """Tell an observer of every read of a tier from now on, as a ``Meter`` is told."""
        self._loader.observer = observer

    # ---- Lookups ----

    @property
    def health(self) -> Health:
        if self._closed:
            return Health.FAILED
        serves = any(tier.health is Health.RUNNING for tier in self.remote.values())
        return Health.RUNNING if serves else self.nvme.health

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        if not self.remote:
            return self.nvme.lookup(keys)
        num_hits = sum(span.num_pages for span in self.lookup_spans(keys))
        if num_hits < len(keys) and self.health is not Health.RUNNING:
            return LookupResult(num_hits, Stop.UNHEALTHY)
        return LookupResult(num_hits, Stop.END if num_hits == len(keys) else Stop.MISS)

    def lookup_spans(self, keys: Sequence[bytes]) -> list[Span]:
        """Return the leading pages that a load could serve now, by the tier that they would come
        from. Memory only."""
        if self._closed:
            return []
        spans: list[Span] = []
        at = self.nvme.lookup(keys).num_hits
        if at:
            spans.append(Span(Tier.NVME, at))
        rest = keys[at:]
        if rest and any(tier.lookup(rest[:1]).num_hits for tier in self.remote.values()):
            for found, pages in itertools.groupby(self._loader.holders(rest)):
                if found is None:
                    break
                spans.append(Span(found, len(list(pages))))
        return spans

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [tier is not None for tier in self._loader.holders(keys)]

    def contains_remote(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether any tier beyond NVMe could serve each key now. Memory only."""
        return [tier is not None for tier in self._loader.holders(keys, frozenset({Tier.NVME}))]

    def contains_in_bucket(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether the bucket holds each key. Memory only."""
        return [False] * len(keys) if self.bucket is None else self.bucket.contains(keys)

    # ---- Jobs ----

    def submit_store(self, run: Run) -> Job:
        job = self.nvme.submit_store(run)
        if self._demoter is not None:
            job.call_at_end(self._stored)
        return job

    def _stored(self, job: Job) -> None:
        assert self._demoter is not None
        pages = zip(job.run.keys, job.reasons, strict=True)
        self._demoter.stored([k for k, r in pages if r is Reason.OK], job.run.tenant)

    def submit_load(
        self, run: Run, *, deadline_s: float | None = None, tenant: bytes | None = None
    ) -> Job:
        """Load as the contract says. Reads of remote tiers fail after ``deadline_s``. Pages that
        came from there are stored in NVMe too if ``tenant`` says whose they are."""
        if not self.remote:
            return self._loader.read(Tier.NVME, run)
        job = Job(JobKind.LOAD, run)
        with self._lock:
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

    def _ended(self, _: Job) -> None:
        """Note a finished load. May run under an engine's lock; must not block."""
        with self._lock:
            self._num_loads -= 1
            is_idle = not self._num_loads
        if is_idle and self._demoter is not None:
            self._demoter.wake()

    # ---- Making pages durable below ----

    def flush(self, timeout_s: float) -> bool:
        return self.nvme.flush(timeout_s)

    def flush_to_bucket(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Copy these pages of one chain to the bucket now, ahead of everything: whether each is
        durable there. Blocks; never on the scheduler thread."""
        if self.bucket is None or self._demoter is None:
            return [False] * len(keys)
        assert isinstance(self.nvme, RegionEngine), "it has a bucket below it"
        deadline = self._clock() + timeout_s
        pause_s = _LOOK_S
        while True:
            held = self.bucket.contains(keys)
            # Whatever its health: NVMe pauses for seconds, and the pages are still there.
            if not any(self.nvme.view.contains(_lacking(keys, held))):
                held = self.bucket.confirm(keys, deadline - self._clock())
            lacking = _lacking(keys, held)
            is_late = self._clock() >= deadline or self._closed
            if is_late or not any(self.nvme.view.contains(lacking)):
                return held
            self._demoter.copy_now(lacking, deadline)
            self.bucket.flush(max(0.0, deadline - self._clock()))
            if not all(self.bucket.contains(keys)):
                time.sleep(min(pause_s, max(0.0, deadline - self._clock())))
                pause_s = min(2 * pause_s, _LAST_LOOK_S)

    # ---- Erasing ----

    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        """Erase in every tier as the contract says; without an id in NVMe only."""
        with self._gate:
            begun = [_begun(partial(self.nvme.erase, what))]
            for remote in self.remote.values() if what.id else ():
                begun.append(_begun(partial(remote.erase, what, local=begun[0])))
            # Last: a reader under the new generation must find no erased page.
            self._generation += 1
        return all_true(begun)

    def _told(self, whats: Sequence[Erasure]) -> None:
        """Erase what the bucket told, and wait for the disk. What is not durable then is hidden all
        the same, and told again by the next start."""
        assert isinstance(self.nvme, RegionEngine)
        begun = [self.nvme.erase_told(what, self._on_told) for what in whats]
        is_true(all_true(begun), _TOLD_WAIT_S)

    def set_namespace(
        self, namespace: bytes, *, keep: bool = True, is_nameless: bool = True
    ) -> None:
        """Change the namespace as ``RegionEngine.set_namespace`` does. Pages of a namespace that no
        request can name again (``is_nameless``) are copied down only by ``flush_to_bucket``."""
        with self._gate:
            if self._demoter is not None and is_nameless:
                self._demoter.suspend()
            for remote in self.remote.values():
                remote.set_namespace(namespace)
            self.nvme.set_namespace(namespace, keep=keep)
            self._generation += 1  # last, as for an erasure

    # ---- Books ----

    def stats(self) -> TierStats:
        """Return NVMe's, and count loads of the whole as under way. What moved between tiers:
        ``remote_stats()`` and ``stack_stats()``."""
        stats, health = self.nvme.stats(), self.health
        reason = "" if health is Health.RUNNING else stats.health_reason or "closed"
        num_jobs = stats.num_inflight_jobs + self._num_loads
        return replace(stats, health=health, health_reason=reason, num_inflight_jobs=num_jobs)

    def remote_stats(self, tier: Tier) -> RemoteStats:
        return RemoteStats(
            num_promoted=self._promoter.num_promoted[tier],
            num_promotions_dropped=self._promoter.num_dropped[tier],
            num_recovered=self._loader.num_recovered[tier],
        )

    def stack_stats(self) -> StackStats:
        """Return what moved between NVMe and the bucket, either way."""
        demoter = self._demoter
        assert demoter is not None, "there is no object store"
        return StackStats(
            **asdict(self.remote_stats(Tier.OBJECT)),
            num_demoted=demoter.num_demoted,
            bytes_demoted=demoter.bytes_demoted,
            num_demotions_dropped=demoter.num_dropped,
            num_demotions_gone=demoter.num_gone,
            demote_backlog=demoter.backlog,
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._demoter is not None:
            self._demoter.close()
        # Peers serve from NVMe, whose last sync must not wait for a silent bucket.
        with ExitStack() as closing:  # the last one added first, whatever another raises
            closing.callback(self._loader.close)
            if self.bucket is not None:
                closing.callback(self.bucket.close)
            closing.callback(self.nvme.close)
            for tier, remote in self.remote.items():
                if tier is not Tier.OBJECT:
                    closing.callback(remote.close)

    def check_integrity(self) -> None:
        for tier in self._all:
            tier.check_integrity()
        assert not self._num_loads, f"{self._num_loads} loads under way"
        staged, in_flight = (0, 0) if self._demoter is None else self._demoter.in_flight_totals()
        assert staged >= 0 and in_flight >= 0, f"{staged} bytes of {in_flight} pages on their way"


def _lacking(keys: Sequence[bytes], held: Sequence[bool]) -> list[bytes]:
    return [key for key, is_held in zip(keys, held, strict=True) if not is_held]


def _begun(erase: Callable[[], Future[bool]]) -> Future[bool]:
    """Erase in one tier. One that raises has not done it, and must not keep the others from it."""
    try:
        return erase()
    except Exception:
        logger.exception("internal error while a tier was told to erase pages; ask again")
        return ended(False)

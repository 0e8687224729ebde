"""``Loader``: one load over several tiers, and ``Promoter``: what it found in a remote one is
stored in NVMe as well.

Each page is read from the first tier that holds it: NVMe, then the remote ones in the order that
the caller prefers; all at the same time. One that a tier turns out not to have whole is tried at
the next one that holds it.

Parts end on the engines' threads, at times under their locks. There only outcomes are noted; what
calls an engine again, or copies, is done by one thread of this module.
"""

from __future__ import annotations

import logging
import queue
import threading
from bisect import bisect
from collections import Counter
from functools import partial
from itertools import accumulate, compress
from typing import TYPE_CHECKING

from sglang_tiered.codecs.encoded import copied
from sglang_tiered.storage.base import Job, JobKind, Reason, Run, Tier
from sglang_tiered.storage.jobs import LoadPart, SplitLoad, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sglang_tiered.storage.base import Page, TierEngine

    Begins = Callable[[Tier, int], Callable[[Job], None]]
    """As ``Meter.begins``."""


logger = logging.getLogger(__name__)


JOIN_S = 10.0


class Promoter:
    """Copies while the load's buffers are still the engine's, then stores the copy in the
    background. The leading pages that fit are kept; the others stay where they were found. ``gate``
    is held while a store is submitted, and during an erasure, so that a store lands before it or
    not at all. ``may_store`` is asked first, and must not block."""

    def __init__(
        self, nvme: TierEngine, gate: threading.Lock, max_bytes: int, may_store: Callable[[], bool]
    ) -> None:
        self._nvme = nvme
        self._gate = gate
        self._max_bytes = max_bytes
        self._may_store = may_store
        self._lock = threading.Lock()
        self._num_bytes = 0
        self.num_promoted: Counter[Tier] = Counter()
        self.num_dropped: Counter[Tier] = Counter()

    def promote(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Page],
        tenant: bytes,
        tier: Tier,
        is_current: Callable[[], bool],
    ) -> None:
        """Copy pages of a tier and store them, unless ``is_current`` says that an erasure
        came between."""
        ends = [0, *accumulate(sum(segment.nbytes for segment in page) for page in pages)]
        with self._lock:
            num_kept = bisect(ends, self._max_bytes - self._num_bytes) - 1
            self._num_bytes += ends[num_kept]
            self.num_dropped[tier] += len(keys) - num_kept
        if not num_kept:
            return
        if not self._may_store():
            self._settle(tier, ends[num_kept], 0, num_kept)
            return
        job = None
        try:
            copies = tuple((copied(page).data,) for page in pages[:num_kept])
            run = Run(tuple(keys[:num_kept]), copies, tenant)
            with self._gate:
                job = self._nvme.submit_store(run) if is_current() else None
        except Exception:
            logger.exception("internal error while keeping pages of a load on NVMe; they are not")
        if job is None:
            self._settle(tier, ends[num_kept], 0, num_kept)
        else:
            job.call_at_end(partial(self._stored, tier))

    def _stored(self, tier: Tier, job: Job) -> None:
        num_stored = job.reasons.count(Reason.OK)
        num_held = job.reasons.count(Reason.DUPLICATE)
        dropped = job.run.num_pages - num_stored - num_held
        self._settle(tier, job.run.num_bytes, num_stored, dropped)

    def _settle(self, tier: Tier, num_bytes: int, num_promoted: int, num_dropped: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes
            self.num_promoted[tier] += num_promoted
            self.num_dropped[tier] += num_dropped


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
        self.observer: Begins | None = None
        self.num_recovered: Counter[Tier] = Counter()  # pages that another tier had failed
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._workers = Workers()
        if len(tiers) > 1:
            self._workers.start("tier-stack", self._run)

    def holders(
        self, keys: Sequence[bytes], failed: frozenset[Tier] = frozenset()
    ) -> list[Tier | None]:
        """Return the first tier that could serve each key now. Behind one that failed NVMe is not
        asked: what came there since may be of other weights. Memory only."""
        found: list[Tier | None] = [None] * len(keys)
        lacking = list(range(len(keys)))
        for tier in self._order() if failed else (Tier.NVME, *self._order()):
            if lacking and tier in self._tiers and tier not in failed:
                held = self._tiers[tier].contains([keys[i] for i in lacking])
                for i in compress(lacking, held):
                    found[i] = tier
                lacking = [i for i in lacking if found[i] is None]
        return found

    def begin(self, job: Job, *, deadline_s: float | None, tenant: bytes | None) -> None:
        """Submit the parts of a job. Memory only. Raises nothing: parts may be under way."""
        deadline = None if deadline_s is None else self._clock() + deadline_s
        read = partial(self._begin_part, tenant, self._generation())
        SplitLoad(job, self._clock, deadline, self.holders, read, self._ended).begin()

    def _begin_part(
        self, tenant: bytes | None, generation: int, part: LoadPart[Tier], left_s: float | None
    ) -> None:
        def ended(job: Job) -> None:
            """Note that a part ended. May run under an engine's lock; must not block."""
            if part.holder is Tier.NVME and all(job.ok):
                part.load.end(part, job.reasons)
            else:
                promote = partial(self._promote, part, job.ok, tenant, generation)
                self._events.put(partial(part.load.end, part, job.reasons, promote))

        self.read(part.holder, part.run, deadline_s=left_s).call_at_end(ended)

    def read(self, tier: Tier, run: Run, *, deadline_s: float | None = None) -> Job:
        """Submit to a tier, and have the read timed. What raises has failed these pages: other
        parts of the load may be under way, whose end the caller waits for."""
        ends: list[Callable[[Job], None]] = []
        try:
            if self.observer is not None:
                ends.append(self.observer(tier, run.num_bytes))
            if run.meter is not None:
                ends.append(run.meter.begins(tier, run.num_bytes))
            job = self._tiers[tier].submit_load(run, deadline_s=deadline_s)
        except Exception:
            logger.exception("internal error while a tier was asked for pages; they are not read")
            job = Job(JobKind.LOAD, run)
            job.reasons = [Reason.IO_ERROR] * run.num_pages
            job.finish()
        for end in ends:
            job.call_at_end(end)
        return job

    # ---- The thread ----

    def _run(self) -> None:
        while not (self._closing and self._events.empty()):
            self._events.get()()

    def _promote(
        self, part: LoadPart[Tier], ok: list[bool], tenant: bytes | None, generation: int
    ) -> None:
        if part.failed:
            self.num_recovered[part.holder] += sum(ok)
        if part.holder is not Tier.NVME and tenant is not None and any(ok):
            self._promoter.promote(
                list(compress(part.run.keys, ok)),
                list(compress(part.run.pages, ok)),
                tenant,
                part.holder,
                lambda: self._generation() == generation,
            )

    def close(self) -> None:
        """End the thread. Call it once no part can end."""
        self._closing = True
        self._events.put(lambda: None)
        self._workers.join(JOIN_S)

"""``TierTransfers``: begins jobs of the tiers for SGLang's storage threads, and waits for them.

Tells the planner of every read, and measures a tier when asked. ``ReadAhead`` keeps several reads
under way at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sglang.srt.managers.cache_controller import PrefetchAck
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, PoolName

from sglang_tiered.integration.storage.host_pages import engine_keys
from sglang_tiered.storage.base import Reason, Run, Stop, Tier
from sglang_tiered.storage.stack.tiers import ReadObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from queue import Queue

    import torch

    from sglang_tiered.storage.base import Job, Meter
    from sglang_tiered.storage.stack import TierStack

__all__ = ["ReadAhead", "ReadPlanner", "TierTransfers", "read_in_steps"]

logger = logging.getLogger(__name__)

MAX_EXPECTED_PAGES = 1 << 16
MAX_PROBE_PAGES, MAX_PROBE_BYTES = 16, 16 << 20
MAX_FAR_PROBE_BYTES, MAX_FAR_PROBE_S = 4 << 20, 10.0
MAX_PROBE_READS, MAX_PROBE_S = 4, 0.25

PART_S = 0.02
FIRST_PART_BYTES, MAX_PART_BYTES = 1 << 20, 64 << 20
NUM_PARTS = 2
"""Full parts under way: one that is waited for, and one that keeps the disk busy meanwhile."""

MAX_LOADS_AHEAD = 64
"""Queued loads that are looked at for something to read."""


class ReadPlanner(ReadObserver, Protocol):
    """Learns from every read, and says how long those of remote tiers may take. Any thread."""

    far_deadline_s: float

    @property
    def bytes_per_s(self) -> float | None:
        """Return the measured speed of NVMe; None before it was measured."""
        ...

    def far_order(self) -> Sequence[Tier]:
        """Return the tiers beyond NVMe, the fastest for a typical load first."""
        ...


class TierTransfers:
    """Carries out the transfers of one storage."""

    def __init__(self, stack: TierStack, page_bytes: int) -> None:
        self._stack = stack
        self._page_bytes = page_bytes
        self._planner: ReadPlanner | None = None
        self._tenants: OrderedDict[str, bytes] = OrderedDict()  # by page hash
        self._lock = threading.Lock()

    def use_planner(self, planner: ReadPlanner) -> None:
        """Tell ``planner`` of every read from now on, and measure NVMe if it holds anything."""
        self._planner = planner
        self._stack.observe(planner)
        self.probe_tier([key.hex() for key in self._stack.nvme.some_keys(MAX_PROBE_PAGES)])

    def expect_load(self, hashes: Sequence[str], tenant: bytes) -> None:
        """Name the tenant of pages that are loaded next, so that what a remote tier serves of them
        is kept on NVMe under its name. Scheduler thread."""
        if not self._stack.remote:
            return
        with self._lock:
            self._tenants.update(dict.fromkeys(hashes, tenant))
            while len(self._tenants) > MAX_EXPECTED_PAGES:
                self._tenants.popitem(last=False)

    def wait_for(self, job: Job) -> list[bool]:
        """Wait for a job; return which pages succeeded."""
        job.wait()
        return job.ok

    def wait_for_store(self, job: Job) -> list[bool]:
        """Wait for a store; return which pages are held. One that was on its way already may have
        failed there since."""
        job.wait()
        return [
            reason is Reason.OK or (reason is Reason.DUPLICATE and self._is_held(key))
            for key, reason in zip(job.run.keys, job.reasons, strict=True)
        ]

    def _is_held(self, key: bytes) -> bool:
        return self._stack.nvme.lookup([key]).stop in (Stop.END, Stop.PENDING)

    @property
    def part_bytes(self) -> float:
        """Return how much to read at once: what NVMe reads in ``PART_S``, and little until it was
        measured, for a request that gives up keeps the parts that have arrived. Remote tiers take
        their time for any read and serve many at once, so with them it is all that is asked
        for."""
        if self._stack.remote:
            return math.inf
        if self._planner is None:
            return MAX_PART_BYTES
        speed = self._planner.bytes_per_s
        return FIRST_PART_BYTES if speed is None else min(MAX_PART_BYTES, PART_S * speed)

    def begin_for_others(self, run: Run) -> Job:
        """Begin to read pages for a rank that shares those of this one. Any thread."""
        if not self._stack.remote:
            return self._stack.nvme.submit_load(run)
        return self.begin_load(run, run.keys[0].hex())

    def begin_load(self, run: Run, first_hash: str) -> Job:
        """Begin to read pages for a request; the planner learns from each tier's reads."""
        planner = self._planner
        deadline_s = None if planner is None else planner.far_deadline_s
        with self._lock:
            tenant = self._tenants.get(first_hash)
        return self._stack.submit_load(run, deadline_s=deadline_s, tenant=tenant)

    def _read(
        self, submit: Callable[[Run], Job], run: Run, tier: Tier, min_informative_s: float = 0.0
    ) -> list[bool]:
        """Read from one tier; the planner learns from it if it takes so long or longer."""
        begun = time.monotonic()
        read = None if self._planner is None else self._planner.begin_read(run.num_bytes, tier)
        served = self.wait_for(submit(run))
        if self._planner is not None and read is not None:
            is_informative = time.monotonic() - begun >= min_informative_s
            self._planner.end_read(read, is_complete=all(served) and is_informative)
        return served

    def probe_tier(self, hashes: Sequence[str], tier: Tier = Tier.NVME) -> None:
        """Measure a tier with KV pages it holds, into other memory, on a thread of its own."""
        max_bytes = MAX_PROBE_BYTES if tier is Tier.NVME else MAX_FAR_PROBE_BYTES
        hashes = hashes[: max(1, min(MAX_PROBE_PAGES, max_bytes // self._page_bytes))]
        if hashes:
            threading.Thread(
                target=self._probe, args=(hashes, tier), name="tier-probe", daemon=True
            ).start()

    def _probe(self, hashes: Sequence[str], tier: Tier) -> None:
        pages = tuple((memoryview(bytearray(self._page_bytes)),) for _ in hashes)
        keys = tuple(engine_keys(PoolName.KV, hashes))
        submit: Callable[[Run], Job] = self._stack.nvme.submit_load
        if tier is not Tier.NVME:
            submit = partial(self._stack.remote[tier].submit_load, deadline_s=MAX_FAR_PROBE_S)

        def read(num_pages: int, min_informative_s: float) -> None:
            run = Run(keys[:num_pages], pages[:num_pages])
            self._read(submit, run, tier, min_informative_s)

        if tier is Tier.NVME:
            read_in_steps(read, len(hashes))
        else:
            read(len(hashes), 0.0)  # once: such reads cost money, or time of another server


class _Part(NamedTuple):
    job: Job
    num_pages: int


class ReadAhead:
    """Several reads under way for SGLang's prefetch I/O thread, which does one load at a time.

    The thread asks for up to 128 pages, waits for them, tells the scheduler, and asks for the next:
    between two calls the disk is idle, and 128 pages of a large model are a gigabyte, within which
    no abort is noticed. Here a call is read in parts of ``PART_S`` as the tier was measured, and
    while the thread waits for one part, the next ones are being read: of this load, and of those
    that SGLang has queued behind it. Results go to SGLang in its own order; where it has no other
    rank to compare them with, it hears of each part, so that a request which waits no longer keeps
    what has arrived, and what is left is known better.

    Memory that is being read into must stay the load's own. SGLang gives the pages of an aborted
    load back when its thread is through with it, so ``carry_out`` waits there for what was begun.

    ``begin`` begins to read KV pages into host slots; ``part_bytes`` says how much to read at once.
    ``reads_queued`` is false for a stage of a pipeline, which does not know when a queued load that
    was aborted is over, and may empty its memory meanwhile. ``tells_parts`` is false there, too.
    On that thread only.
    """

    def __init__(
        self,
        begin: Callable[[Sequence[str], torch.Tensor], Job],
        part_bytes: Callable[[], float],
        *,
        page_bytes: int,
        page_size: int,
        reads_queued: bool,
        tells_parts: bool,
    ) -> None:
        self._begin_read = begin
        self._part_bytes = part_bytes
        self._reads_queued, self._tells_parts = reads_queued, tells_parts
        self._page_bytes = page_bytes
        self._page_size = page_size
        self._under_way: dict[tuple[Any, int], _Part] = {}  # by load and first page
        self._num_pages = 0  # of these
        self._load: Any = None  # that SGLang's thread is at
        self._metered: Any = None  # the load whose part is being begun
        self._meter_of: Callable[[Any], Meter | None] = lambda _: None
        self._queue: Queue[Any] | None = None
        self._acks: Queue[PrefetchAck] | None = None  # where parts are told of
        self._next_page = 0

    def use_meters(self, meter_of: Callable[[Any], Meter | None]) -> None:
        """Have reads told to the meter of their load's handle, if it has one."""
        self._meter_of = meter_of

    @property
    def meter(self) -> Meter | None:
        """What is told of the read that is being begun."""
        load = self._metered or self._load
        return None if load is None else self._meter_of(load.handle)

    def carry_out(
        self, original: Callable[[Any, Any], Any], controller: Any, operation: Any
    ) -> Any:
        """Wrap ``HybridCacheController._page_transfer``, which reads one load."""
        self._load, self._queue, self._next_page = operation, controller.prefetch_buffer, 0
        # Ranks send equal numbers of acks; and pages count once those of all pools are there.
        is_alone = self._tells_parts and not controller.prefetch_completion_sync_groups
        if is_alone and not operation.pool_transfers:
            self._acks = controller.prefetch_sync_queue
        try:
            with controller.mem_pool_host.layout_lease():  # of what is left, too
                try:
                    return original(controller, operation)
                finally:
                    for key in [key for key in self._under_way if key[0] is operation]:
                        self._take(key).job.wait()
        finally:
            self._load = self._queue = self._acks = None

    def read(self, hashes: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Read the next pages of the load; return which arrived. Stops at the first that did not,
        and when the load was aborted."""
        load = self._load
        if load is None:  # not SGLang's own thread
            return self._wait_for(self._begin_read(hashes, host_indices))
        served: list[bool] = []
        while len(served) < len(hashes) and all(served) and not load.is_terminated():
            key = load, self._next_page
            try:
                if key not in self._under_way:
                    self._begin(*key)
                self._begin_more()
            except Exception:
                if not served:
                    raise  # SGLang logs it and goes on without this load
                logger.exception("the rest of a load cannot be read; its request computes it")
                break  # SGLang was told of what is there, and ends itself over a smaller number
            part = self._take(key)
            served += self._wait_for(part.job)
            self._next_page += part.num_pages
            if self._acks is not None and all(served) and len(served) < len(hashes):
                num_tokens = self._next_page * self._page_size
                self._acks.put(PrefetchAck(load.request_id, load, num_tokens))
        return served + [False] * (len(hashes) - len(served))

    def _wait_for(self, job: Job) -> list[bool]:
        job.wait()
        return job.ok

    @property
    def _part_pages(self) -> int:
        num_pages: float = min(STORAGE_BATCH_SIZE, self._part_bytes() // self._page_bytes)
        return max(1, int(num_pages))

    def _begin(self, load: Any, start: int) -> None:
        # No part goes beyond a call, which takes whole parts.
        batch_end = (start // STORAGE_BATCH_SIZE + 1) * STORAGE_BATCH_SIZE
        end = min(start + self._part_pages, batch_end, len(load.hash_value))
        slots = load.host_indices[start * self._page_size : end * self._page_size]
        self._metered = load
        try:
            job = self._begin_read(load.hash_value[start:end], slots)
        finally:
            self._metered = None
        self._under_way[load, start] = _Part(job, end - start)
        self._num_pages += end - start

    def _take(self, key: tuple[Any, int]) -> _Part:
        part = self._under_way.pop(key)
        self._num_pages -= part.num_pages
        return part

    def _begin_more(self) -> None:
        """Begin to read what SGLang's thread asks for next."""
        limit = NUM_PARTS * self._part_pages
        if self._num_pages >= limit:
            return
        for load in self._loads():
            start = self._next_page if load is self._load else 0
            while start < len(load.hash_value) and not load.is_terminated():
                if (load, start) not in self._under_way:
                    try:
                        self._begin(load, start)
                    except Exception:
                        if load is self._load:
                            raise
                        break  # it fails in its own turn, where SGLang expects that
                    if self._num_pages >= limit:
                        return
                start += self._under_way[load, start].num_pages

    def _loads(self) -> Iterator[Any]:
        assert self._queue is not None
        yield self._load
        if not self._reads_queued:
            return
        with self._queue.mutex:
            queued = list(islice(self._queue.queue, MAX_LOADS_AHEAD))
        yield from (load for load in queued if load is not None)  # None: wake up


def read_in_steps(
    read: Callable[[int, float], None],
    num_pages: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Call ``read(pages, min_informative_s)`` for one page, then for all, more than once while that
    is quick. What takes less than its ``min_informative_s`` is not to be learnt from.

    A disk that is limited (a cloud volume, a throttled container) lets a little pass at full speed
    after a rest. So a quick single page proves nothing, and believing it cost the next request up
    to its own prefill in waiting for a load; one that is slow by itself does, and spares the larger
    reads."""
    begun = clock()
    read(1, MAX_PROBE_S)
    for _ in range(MAX_PROBE_READS):
        if clock() - begun > MAX_PROBE_S:
            return
        read(num_pages, 0.0)

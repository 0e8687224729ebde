"""``TierTransfers``: begins jobs of the tiers for SGLang's storage threads.

Tells the planner of every read, and measures a tier when asked.
"""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from sglang.srt.mem_cache.hicache_storage import PoolName

from sglang_tiered.integration.storage.host_pages import engine_keys
from sglang_tiered.storage.base import Reason, Run, Stop, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.base import Job
    from sglang_tiered.storage.stack import TierStack


MAX_PROBE_PAGES, MAX_PROBE_BYTES = 16, 16 << 20
MAX_FAR_PROBE_BYTES, MAX_FAR_PROBE_S = 4 << 20, 10.0
MAX_PROBE_READS, MAX_PROBE_S = 4, 0.25

PART_S = 0.02
FIRST_PART_BYTES, MAX_PART_BYTES = 1 << 20, 64 << 20


class ReadPlanner(Protocol):
    """Learns from every read, and says how long those of remote tiers may take. Any thread, at
    times under a tier's lock, so it only notes."""

    far_deadline_s: float

    def begin_read(self, num_bytes: int, tier: Tier) -> Any: ...

    def end_read(self, reading: Any, *, is_complete: bool) -> None: ...

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

    def use_planner(self, planner: ReadPlanner) -> None:
        """Tell ``planner`` of every read from now on, and measure NVMe if it holds anything."""
        self._planner = planner

        def begins(tier: Tier, num_bytes: int) -> Callable[[Job], None]:
            reading = planner.begin_read(num_bytes, tier)
            return lambda job: planner.end_read(reading, is_complete=all(job.ok))

        self._stack.observe(begins)
        self.probe_tier([key.hex() for key in self._stack.nvme.some_keys(MAX_PROBE_PAGES)])

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

    def begin_load(self, run: Run, tenant: bytes | None = None) -> Job:
        """Begin to read pages; the planner learns from each tier's reads. What a remote tier serves
        is kept on NVMe under the name of their tenant, if that is known. Any thread."""
        planner = self._planner
        deadline_s = None if planner is None else planner.far_deadline_s
        return self._stack.submit_load(run, deadline_s=deadline_s, tenant=tenant)

    def begin_for_others(self, run: Run) -> Job:
        """Begin to read pages for a rank that shares those of this one, which loads them itself too
        and knows whose they are. Any thread."""
        return self.begin_load(run) if self._stack.remote else self._stack.nvme.submit_load(run)

    def probe_tier(self, hashes: Sequence[str], tier: Tier = Tier.NVME) -> None:
        """Have the planner measure a tier with KV pages it holds, into other memory, on a thread of
        its own."""
        max_bytes = MAX_PROBE_BYTES if tier is Tier.NVME else MAX_FAR_PROBE_BYTES
        hashes = hashes[: max(1, min(MAX_PROBE_PAGES, max_bytes // self._page_bytes))]
        if hashes:
            threading.Thread(
                target=self._probe,
                args=(self._planner, hashes, tier),
                name="tier-probe",
                daemon=True,
            ).start()

    def _probe(self, planner: ReadPlanner, hashes: Sequence[str], tier: Tier) -> None:
        pages = tuple((memoryview(bytearray(self._page_bytes)),) for _ in hashes)
        keys = tuple(engine_keys(PoolName.KV, hashes))
        submit: Callable[[Run], Job] = self._stack.nvme.submit_load
        if tier is not Tier.NVME:
            submit = partial(self._stack.remote[tier].submit_load, deadline_s=MAX_FAR_PROBE_S)

        def read(num_pages: int, min_informative_s: float) -> None:
            begun, run = time.monotonic(), Run(keys[:num_pages], pages[:num_pages])
            reading = planner.begin_read(run.num_bytes, tier)
            job = submit(run)
            job.wait()
            is_informative = time.monotonic() - begun >= min_informative_s
            planner.end_read(reading, is_complete=all(job.ok) and is_informative)

        if tier is Tier.NVME:
            read_in_steps(read, len(hashes))
        else:
            read(len(hashes), 0.0)  # once: such reads cost money, or time of another server


def read_in_steps(
    read: Callable[[int, float], None],
    num_pages: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Call ``read(pages, min_informative_s)`` for one page, then for all, more than once while that
    is quick. What takes less than its ``min_informative_s`` is not to be learnt from.

    A disk that is limited (a cloud volume, a throttled container) lets a little pass at full speed
    after a rest. So a quick single page proves nothing, and believing it cost the next request up
    to its own prefill in waiting for a load. One that is slow by itself proves something, and
    spares the larger reads."""
    begun = clock()
    read(1, MAX_PROBE_S)
    for _ in range(MAX_PROBE_READS):
        if clock() - begun > MAX_PROBE_S:
            return
        read(num_pages, 0.0)

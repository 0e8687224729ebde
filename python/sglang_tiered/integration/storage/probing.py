"""Measures a tier by reads of its own, for the planner of loads."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from sglang.srt.mem_cache.hicache_storage import PoolName

from sglang_tiered.integration.storage.host_pages import engine_keys
from sglang_tiered.storage.base import Run, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.base import Job
    from sglang_tiered.storage.stack import TierStack


MAX_PROBE_PAGES, MAX_PROBE_BYTES = 16, 16 << 20
MAX_FAR_PROBE_BYTES, MAX_FAR_PROBE_S = 4 << 20, 10.0
MAX_PROBE_READS, MAX_PROBE_S = 4, 0.25


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


def probe_tier(
    stack: TierStack, planner: ReadPlanner, page_bytes: int, hashes: Sequence[str], tier: Tier
) -> None:
    """Have ``planner`` measure a tier with KV pages it holds, into other memory, on a thread of its
    own."""
    max_bytes = MAX_PROBE_BYTES if tier is Tier.NVME else MAX_FAR_PROBE_BYTES
    hashes = hashes[: max(1, min(MAX_PROBE_PAGES, max_bytes // page_bytes))]
    if hashes:
        arguments = stack, planner, page_bytes, hashes, tier
        threading.Thread(target=_probe, args=arguments, name="tier-probe", daemon=True).start()


def _probe(
    stack: TierStack, planner: ReadPlanner, page_bytes: int, hashes: Sequence[str], tier: Tier
) -> None:
    pages = tuple((memoryview(bytearray(page_bytes)),) for _ in hashes)
    keys = tuple(engine_keys(PoolName.KV, hashes))
    submit: Callable[[Run], Job] = stack.nvme.submit_load
    if tier is not Tier.NVME:
        submit = partial(stack.remote[tier].submit_load, deadline_s=MAX_FAR_PROBE_S)

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

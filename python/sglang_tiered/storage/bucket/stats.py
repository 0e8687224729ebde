"""What a bucket's engine tells of itself."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import TierStats

if TYPE_CHECKING:
    from sglang_tiered.storage.base import Health
    from sglang_tiered.storage.bucket.collect import CollectorReport
    from sglang_tiered.storage.bucket.limits import Breaker
    from sglang_tiered.storage.bucket.requests import Requests
    from sglang_tiered.storage.bucket.state import BucketState

__all__ = ["BucketStats", "bucket_stats", "engine_stats"]


@dataclass(frozen=True, slots=True)
class BucketStats:
    """Counters since the engine was opened, and gauges of now. Reading them takes no I/O."""

    requests: dict[str, int]  # by kind: put, get, list, delete, head
    bytes_in: int  # bodies received
    bytes_out: int  # bodies sent
    num_breaker_opened: int
    num_passes: int  # of discovery
    num_full_listings: int
    last_pass_s: float
    num_pages_vanished: int  # missing when read, or gone from a full listing
    trouble: str  # why writes or deletes fail now; empty where they work
    refused: dict[str, int]  # 1 for each of put and delete that failed last, 0 for others
    listed_bytes: int | None  # by this server's last collection; None before one
    last_error: str  # of any request, as a clause that names no secret and no endpoint


def engine_stats(state: BucketState, health: Health, reason: str) -> TierStats:
    """Build the answer of ``TierEngine.stats``; ``capacity_bytes`` is huge without a cap."""
    capacity = state.settings.capacity_bytes
    with state.lock:
        index = state.index
        return TierStats(
            health=health,
            health_reason=reason,
            num_pages=index.num_pages,
            stored_bytes=index.stored_bytes,
            physical_bytes=index.stored_bytes,
            capacity_bytes=sys.maxsize if capacity is None else capacity,
            num_pages_stored=state.num_pages_stored,
            num_pages_loaded=state.num_pages_loaded,
            num_pages_evicted=index.num_pages_evicted,
            bytes_stored=state.bytes_stored,
            bytes_written=state.bytes_written,
            bytes_loaded=state.bytes_loaded,
            num_inflight_jobs=state.jobs.num_inflight,
            queued_store_bytes=state.staged_bytes,
            num_tenants=index.num_tenants,
            num_pages_erased=state.num_pages_erased,
            reasons=dict(state.jobs.outcomes),
            store_durations=state.jobs.store_durations.take(),
        )


def bucket_stats(
    state: BucketState, requests: Requests, breaker: Breaker, collected: CollectorReport | None
) -> BucketStats:
    """Build the answer of ``BucketEngine.object_stats``."""
    troubles = requests.troubles
    with state.lock:
        return BucketStats(
            requests=requests.requests,
            bytes_in=requests.bytes_in,
            bytes_out=requests.bytes_out,
            num_breaker_opened=breaker.num_opened,
            num_passes=state.num_passes,
            num_full_listings=state.num_full_listings,
            last_pass_s=state.last_pass_s,
            num_pages_vanished=state.num_pages_vanished,
            trouble="; ".join(troubles.values()),
            refused={kind: int(kind in troubles) for kind in ("put", "delete")},
            listed_bytes=None if collected is None else collected.page_bytes,
            last_error=requests.last_error,
        )

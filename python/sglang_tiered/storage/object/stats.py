"""What an object tier tells of itself beside ``EngineStats``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import EngineStats
from sglang_tiered.storage.object.pending import DiscoveryCounts

if TYPE_CHECKING:
    from sglang_tiered.storage.base import Health
    from sglang_tiered.storage.object.breaker import Breaker
    from sglang_tiered.storage.object.client import ObjectClient
    from sglang_tiered.storage.object.state import ObjectState

__all__ = ["ObjectStats", "engine_stats", "object_stats"]

_GB = 1e9


@dataclass(frozen=True, slots=True)
class ObjectStats:
    """Counters since the engine was opened, and gauges of now. Reading them takes no I/O."""

    requests: dict[str, int]  # by kind: put, get, list, delete, head; retries included
    num_retries: int  # those made by us; parts of an upload are retried by the library
    bytes_in: int  # bodies received
    bytes_out: int  # bodies sent
    breaker: str  # running or miss_only
    breaker_reason: str
    num_breaker_opened: int
    num_objects: int  # known
    num_objects_stored: int  # by this engine
    object_bytes: int  # of those known
    staged_bytes: int
    discovery: DiscoveryCounts = field(default_factory=DiscoveryCounts)
    last_error: str = ""  # of any request, as a clause that names no secret and no endpoint

    @property
    def requests_per_gb_out(self) -> float:
        """Return the writing requests for each 10^9 bytes sent."""
        writing = self.requests.get("put", 0) + self.requests.get("delete", 0)
        return writing * _GB / self.bytes_out if self.bytes_out else 0.0

    @property
    def requests_per_gb_in(self) -> float:
        """Return the reading requests (get, head, list) for each 10^9 bytes received."""
        reading = sum(self.requests.get(kind, 0) for kind in ("get", "head", "list"))
        return reading * _GB / self.bytes_in if self.bytes_in else 0.0


def engine_stats(state: ObjectState, health: Health, reason: str) -> EngineStats:
    """Build the answer of ``WriteTier.stats``; ``capacity_bytes`` is huge without a cap."""
    capacity = state.settings.capacity_bytes
    with state.lock:
        return EngineStats(
            health=health,
            health_reason=reason,
            num_pages=len(state.index),
            stored_bytes=state.index.stored_bytes,
            physical_bytes=state.index.object_bytes,
            capacity_bytes=sys.maxsize if capacity is None else capacity,
            num_pages_stored=state.num_pages_stored,
            num_pages_loaded=state.num_pages_loaded,
            num_pages_evicted=state.index.num_pages_evicted,
            bytes_stored=state.bytes_stored,
            bytes_written=state.bytes_written,
            bytes_loaded=state.bytes_loaded,
            num_pages_reinserted=0,
            bytes_reinserted=0,
            num_inflight_jobs=state.jobs.num_inflight,
            queued_store_bytes=state.staged_bytes,
            num_tenants=state.index.num_tenants,
            num_pages_erased=state.num_pages_erased,
            num_regions_stuck=0,
            reasons=dict(state.jobs.outcomes),
            store_durations=state.jobs.store_durations.take(),
        )


def object_stats(state: ObjectState, client: ObjectClient, breaker: Breaker) -> ObjectStats:
    """Build the answer of ``ObjectEngine.object_stats``."""
    health, reason = breaker.diagnosis()
    with state.lock:
        return ObjectStats(
            requests=client.requests,
            num_retries=client.num_retries,
            bytes_in=client.bytes_in,
            bytes_out=client.bytes_out,
            breaker=health.value,
            breaker_reason=reason,
            num_breaker_opened=breaker.num_opened,
            num_objects=state.index.num_objects,
            num_objects_stored=state.num_objects_stored,
            object_bytes=state.index.object_bytes,
            staged_bytes=state.staged_bytes,
            discovery=replace(state.discovery),
            last_error=client.last_error,
        )

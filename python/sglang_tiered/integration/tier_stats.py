"""``TierStats``: everything the metric table reads, as one snapshot of one scheduler process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sglang_tiered.storage.base import EngineStats, Health
from sglang_tiered.storage.layered.tiers import LayeredStats, Tier

if TYPE_CHECKING:
    from sglang_tiered.integration.host_ledger import HostLedger
    from sglang_tiered.integration.load_planner import LoadDecision, LoadPlanner
    from sglang_tiered.integration.store_gate import StoreGate
    from sglang_tiered.policy.admission import Outcome
    from sglang_tiered.policy.page_fates import Fate
    from sglang_tiered.storage.base import JobKind, Reason
    from sglang_tiered.storage.layered.engine import LayeredEngine

__all__ = ["ObjectTierStats", "TierStats", "tier_stats"]


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectTierStats(LayeredStats):
    """What this process did with the object tier, and what its index says is there."""

    health: Health
    health_reason: str
    num_pages: int
    physical_bytes: int
    num_pages_stored: int
    num_pages_loaded: int
    num_pages_evicted: int
    bytes_written: int
    bytes_loaded: int
    reasons: dict[tuple[JobKind, Reason], int]
    num_loads: int
    load_s: float
    load_bytes_per_s: float | None
    requests: dict[str, int]  # by kind
    num_retries: int


@dataclasses.dataclass(frozen=True, slots=True)
class TierStats(EngineStats):
    """What the engine counts, what admission made of the pages that were offered, what the
    planner decided and learnt, and what became of host pages."""

    admission: dict[Outcome, int]
    write_budget_bytes: float | None
    load_decisions: dict[LoadDecision, int]  # tokens
    prefill_tokens_per_s: float | None  # of a cold prompt of 2,048 tokens; None before a batch
    load_bytes_per_s: float | None  # of a load of 16 MiB; None before one
    num_loads: int
    load_s: float
    host_pages_left: dict[Fate, int]
    num_dirty_host_pages: int
    spill_waiting_tokens: int
    spill_flight_tokens: int
    num_backups_skipped: int
    num_backups_recovered: int
    object: ObjectTierStats | None  # None without an object tier


def tier_stats(
    engine: EngineStats,
    gate: StoreGate,
    ledger: HostLedger,
    planner: LoadPlanner[Any] | None,
    layered: LayeredEngine | None = None,
) -> TierStats:
    """A snapshot. Memory only, any thread."""
    prefill = None if planner is None else planner.costs.prefill
    meter = None if planner is None else planner.meters[Tier.NVME]
    return TierStats(
        **_fields(engine, EngineStats),
        **ledger.stats(),
        admission=gate.outcomes,
        write_budget_bytes=gate.budget_bytes,
        load_decisions={} if planner is None else dict(planner.tokens),
        num_loads=0 if meter is None else meter.num_loads,
        load_s=0.0 if meter is None else meter.load_s,
        prefill_tokens_per_s=prefill.tokens_per_s if prefill and prefill.num_observed else None,
        load_bytes_per_s=None if meter is None else meter.bytes_per_s,
        object=None if layered is None else _object_stats(layered, planner),
    )


def _object_stats(layered: LayeredEngine, planner: LoadPlanner[Any] | None) -> ObjectTierStats:
    lower = layered.lower.stats()
    counts = layered.lower.object_stats()
    meter = None if planner is None else planner.meters[Tier.OBJECT]
    return ObjectTierStats(
        **_fields(layered.layered_stats(), LayeredStats),
        health=lower.health,
        health_reason=lower.health_reason,
        num_pages=lower.num_pages,
        physical_bytes=lower.physical_bytes,
        num_pages_stored=lower.num_pages_stored,
        num_pages_loaded=lower.num_pages_loaded,
        num_pages_evicted=lower.num_pages_evicted,
        bytes_written=lower.bytes_written,
        bytes_loaded=lower.bytes_loaded,
        reasons=lower.reasons,
        num_loads=0 if meter is None else meter.num_loads,
        load_s=0.0 if meter is None else meter.load_s,
        load_bytes_per_s=None if meter is None else meter.bytes_per_s,
        requests=dict(counts.requests),
        num_retries=counts.num_retries,
    )


def _fields(record: Any, of: type[Any]) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(of)}

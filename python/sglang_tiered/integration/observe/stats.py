"""``TierStats``: everything the metric table reads, as one snapshot of one scheduler process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sglang_tiered.storage.base import EngineStats, Health
from sglang_tiered.storage.stack.tiers import FarStats, LayeredStats, Tier

if TYPE_CHECKING:
    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.policy.admission import Outcome
    from sglang_tiered.policy.cost_model import LoadDecision
    from sglang_tiered.policy.page_accounting import EvictionOutcome
    from sglang_tiered.storage.base import JobKind, Reason
    from sglang_tiered.storage.stack.engine import LayeredEngine
    from sglang_tiered.storage.stack.tiers import LowerTier, PeerSource

__all__ = [
    "ObjectTierStats",
    "PeerTierStats",
    "PlannerStats",
    "SpillStats",
    "TierReads",
    "TierStats",
    "tier_stats",
]


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
class PeerTierStats(FarStats):
    """What this process fetched from other servers and served to them, and what it knows of
    them."""

    health: Health
    health_reason: str
    is_connected: bool  # to the index
    num_peers: int
    num_pages_mirrored: int
    num_fetched: int
    bytes_fetched: int
    failures: dict[str, int]  # pages that were asked for and did not come, by reason
    num_loads: int
    load_s: float
    load_bytes_per_s: float | None
    num_served: int
    bytes_served: int
    num_refused: int
    num_breaches: int
    num_index_errors: int
    purges: dict[str, int]  # told to others, and applied here because others told us


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
    host_pages_left: dict[EvictionOutcome, int]
    num_dirty_host_pages: int
    spill_waiting_tokens: int
    spill_flight_tokens: int
    num_backups_skipped: int
    num_backups_recovered: int
    object: ObjectTierStats | None  # None without an object tier
    peer: PeerTierStats | None  # None without an index of other servers


@dataclasses.dataclass(frozen=True, slots=True)
class TierReads:
    """Loads of one tier that were waited for, and what they taught."""

    num_loads: int = 0
    load_s: float = 0.0
    load_bytes_per_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PlannerStats:
    """What the planner decided and learnt."""

    load_decisions: dict[LoadDecision, int]  # tokens; none where another rank decides
    prefill_tokens_per_s: float | None
    reads: dict[Tier, TierReads]


_NO_PLANNER = PlannerStats({}, None, {})


@dataclasses.dataclass(frozen=True, slots=True)
class SpillStats:
    """What waits to be stored, and host copies that were skipped for lack of host memory."""

    spill_waiting_tokens: int = 0
    spill_flight_tokens: int = 0
    num_backups_skipped: int = 0
    num_backups_recovered: int = 0


def tier_stats(
    storage: TieredStorage, planner: PlannerStats | None = None, spill: SpillStats | None = None
) -> TierStats:
    """A snapshot. Memory only, any thread."""
    planner, layered = planner or _NO_PLANNER, storage.layered_engine
    lower = None if layered is None else layered.lower
    peers = None if layered is None else layered.peers
    return TierStats(
        **_fields(storage.region_engine.stats(), EngineStats),
        **dataclasses.asdict(spill or SpillStats()),
        host_pages_left=storage.accounting.left,
        num_dirty_host_pages=storage.accounting.num_dirty,
        admission=storage.gate.outcomes,
        write_budget_bytes=storage.gate.budget_bytes,
        load_decisions=planner.load_decisions,
        **_measured(planner, Tier.NVME),
        prefill_tokens_per_s=planner.prefill_tokens_per_s,
        object=None if not layered or not lower else _object_stats(layered, lower, planner),
        peer=None if not layered or not peers else _peer_stats(layered, peers, planner),
    )


def _object_stats(
    layered: LayeredEngine, tier: LowerTier, planner: PlannerStats
) -> ObjectTierStats:
    lower, counts = tier.stats(), tier.object_stats()
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
        **_measured(planner, Tier.OBJECT),
        requests=dict(counts.requests),
        num_retries=counts.num_retries,
    )


def _peer_stats(layered: LayeredEngine, tier: PeerSource, planner: PlannerStats) -> PeerTierStats:
    stats = tier.stats()
    return PeerTierStats(
        **_fields(layered.far_stats(Tier.PEER), FarStats),
        health=stats.health,
        health_reason=stats.health_reason,
        is_connected=stats.is_connected,
        num_peers=stats.num_peers,
        num_pages_mirrored=stats.num_pages_mirrored,
        num_fetched=stats.num_fetched,
        bytes_fetched=stats.bytes_fetched,
        failures={
            "missed": stats.num_missed,
            "damaged": stats.num_damaged,
            "late": stats.num_late,
            "busy": stats.num_busy,
            "lost": stats.num_lost,
        },
        **_measured(planner, Tier.PEER),
        num_served=stats.num_served,
        bytes_served=stats.bytes_served,
        num_refused=stats.num_refused,
        num_breaches=stats.num_breaches,
        num_index_errors=stats.num_index_errors,
        purges={"told": stats.num_purges_told, "applied": stats.num_purges_applied},
    )


def _measured(planner: PlannerStats, tier: Tier) -> dict[str, Any]:
    return dataclasses.asdict(planner.reads.get(tier, TierReads()))


def _fields(record: Any, of: type[Any]) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(of)}

"""``TierStats``: everything the metric table reads, as one snapshot of one scheduler process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sglang_tiered.storage.base import EngineStats, Health, Tier
from sglang_tiered.storage.stack.tiers import RemoteStats, StackStats

if TYPE_CHECKING:
    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.policy.admission import Outcome
    from sglang_tiered.policy.cost_model import LoadDecision
    from sglang_tiered.policy.page_accounting import Fate
    from sglang_tiered.storage.base import BucketTier, JobKind, Reason, RemoteTier
    from sglang_tiered.storage.stack import TierStack

__all__ = [
    "ObjectTierStats",
    "PeerTierStats",
    "PlannerStats",
    "TierReads",
    "TierStats",
    "tier_stats",
]


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectTierStats(StackStats):
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
class PeerTierStats(RemoteStats):
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
    host_pages_left: dict[Fate, int]
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


def tier_stats(storage: TieredStorage, planner: PlannerStats | None = None) -> TierStats:
    """A snapshot. Memory only, any thread."""
    planner, stack = planner or _NO_PLANNER, storage.stack
    bucket, peers = stack.bucket, stack.remote.get(Tier.PEER)
    return TierStats(
        **_fields(stack.nvme.stats(), EngineStats),
        **storage.ledger.stats(),
        admission=storage.gate.outcomes,
        write_budget_bytes=storage.gate.budget_bytes,
        load_decisions=planner.load_decisions,
        **_measured(planner, Tier.NVME),
        prefill_tokens_per_s=planner.prefill_tokens_per_s,
        object=None if bucket is None else _object_stats(stack, bucket, planner),
        peer=None if peers is None else _peer_stats(stack, peers, planner),
    )


def _object_stats(stack: TierStack, tier: BucketTier, planner: PlannerStats) -> ObjectTierStats:
    bucket, counts = tier.stats(), tier.object_stats()
    return ObjectTierStats(
        **_fields(stack.stack_stats(), StackStats),
        health=bucket.health,
        health_reason=bucket.health_reason,
        num_pages=bucket.num_pages,
        physical_bytes=bucket.physical_bytes,
        num_pages_stored=bucket.num_pages_stored,
        num_pages_loaded=bucket.num_pages_loaded,
        num_pages_evicted=bucket.num_pages_evicted,
        bytes_written=bucket.bytes_written,
        bytes_loaded=bucket.bytes_loaded,
        reasons=bucket.reasons,
        **_measured(planner, Tier.OBJECT),
        requests=dict(counts.requests),
        num_retries=counts.num_retries,
    )


def _peer_stats(stack: TierStack, tier: RemoteTier, planner: PlannerStats) -> PeerTierStats:
    stats: Any = tier.stats()
    return PeerTierStats(
        **_fields(stack.remote_stats(Tier.PEER), RemoteStats),
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

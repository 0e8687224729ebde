"""What the metric tables read, each as one snapshot of one scheduler process: ``ProcessStats``, and
``TransferStats`` of its endpoint in a handoff; and what its tiers hold (``holdings``)."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, cast

from sglang_tiered import __version__
from sglang_tiered.codecs import NO_CODEC
from sglang_tiered.metrics import DurationCounts
from sglang_tiered.storage.base import Tier
from sglang_tiered.storage.region.engine import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.integration.storage.machine_budget import BudgetStats
    from sglang_tiered.policy.admission import Outcome
    from sglang_tiered.policy.cost_model import LoadDecision
    from sglang_tiered.policy.hints import HintEnd
    from sglang_tiered.policy.page_accounting import PageAccounting
    from sglang_tiered.sharing.peer_tier import PeerStats
    from sglang_tiered.storage.base import TierStats
    from sglang_tiered.storage.bucket.engine import BucketStats
    from sglang_tiered.storage.encoding import EncodingStats
    from sglang_tiered.storage.stack.tiers import RemoteStats, StackStats
    from sglang_tiered.transfer.decode.endpoint import DecodeEndpoint
    from sglang_tiered.transfer.prefill.endpoint import PrefillEndpoint

__all__ = [
    "HintStats",
    "Holding",
    "MemoryStats",
    "ObjectTierStats",
    "PeerTierStats",
    "PlannerStats",
    "ProcessStats",
    "SpillStats",
    "TierReads",
    "TransferStats",
    "WaitStats",
    "holdings",
    "manager_of",
    "process_stats",
    "transfer_stats",
]


@dataclass(frozen=True, slots=True)
class TierReads:
    """Counts the reads of one tier for requests, and says what was learnt from them."""

    durations: DurationCounts = DurationCounts()  # of each that was complete
    busy_s: float = 0.0  # in which at least one was under way
    load_bytes_per_s: float | None = None  # of a load of 16 MiB; None before one


@dataclass(frozen=True, slots=True)
class PlannerStats:
    """Says what the planner decided and learnt."""

    load_decisions: dict[LoadDecision, int]  # tokens; empty where another rank decides
    prefill_tokens_per_s: float | None  # of a cold prompt of 2,048 tokens; None before a batch
    reads: dict[Tier, TierReads]
    prefill_prices: dict[str, float] = field(default_factory=dict)  # seconds, by what they are of
    load_prices: dict[tuple[Tier, str], float] = field(default_factory=dict)
    queue_wait_s: float = 0.0
    waiting_tokens: int = 0  # to be computed
    num_both_ends: int = 0


@dataclass(frozen=True, slots=True)
class ObjectTierStats:
    """Says what this process did with the object tier, and what its index says is there."""

    engine: TierStats
    bucket: BucketStats
    moved: StackStats
    reads: TierReads


@dataclass(frozen=True, slots=True)
class PeerTierStats:
    """Says what this process fetched from other servers and served to them, and what it knows of
    them."""

    tier: PeerStats
    moved: RemoteStats
    reads: TierReads

    @property
    def failures(self) -> dict[tuple[str, str], int]:
        """Return the pages that were requested and not received, by operation and reason."""
        tier = self.tier
        return {
            ("load", "missed"): tier.num_missed,
            ("load", "damaged"): tier.num_damaged,
            ("load", "late"): tier.num_late,
            ("load", "busy"): tier.num_busy,
            ("load", "lost"): tier.num_lost,
        }

    @property
    def purges(self) -> dict[str, int]:
        """Return the purges announced to others, and those applied here on their request."""
        return {"told": self.tier.num_purges_told, "applied": self.tier.num_purges_applied}


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """Holds the statistics of every tier and part of one scheduler process."""

    nvme: TierStats
    host: PageAccounting  # itself: its counters go on
    spill: SpillStats
    planner: PlannerStats
    reads: TierReads  # of NVMe
    admission: dict[Outcome, int]
    write_budget_bytes: float | None
    object: ObjectTierStats | None  # None without an object tier
    peer: PeerTierStats | None  # None without an index of other servers
    hints: HintStats | None = None  # None on a stage of a pipeline
    waits: WaitStats | None = None  # likewise
    codec: EncodingStats | None = None  # None without one
    holdings: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # see ``holdings``
    budget: BudgetStats | None = None  # None without --tier-machine-budget
    request_log_dropped: int | None = None  # lines; None where none is written

    @property
    def build(self) -> dict[tuple[str, str], int]:
        """Return the versions of this package and of SGLang, with a 1."""
        return _build()

    def health_reasons(self) -> dict[str, str]:
        """Return why tiers are not running, or a bucket refuses changes: one clause each, by the
        tier's name."""
        found = {"nvme": self.nvme.health_reason}
        if self.object is not None:
            below = self.object
            found["object"] = below.engine.health_reason or below.bucket.trouble
        if self.peer is not None:
            found["peer"] = self.peer.tier.health_reason
        return {name: reason for name, reason in found.items() if reason}


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Holds the statistics of a scheduler process that has the host tier alone."""

    holdings: Mapping[str, Mapping[str, int]]  # see ``holdings``

    @classmethod
    def of(cls, held: Mapping[str, Holding]) -> MemoryStats:
        return cls({tier: _bounded(holding) for tier, holding in held.items()})

    @property
    def build(self) -> dict[tuple[str, str], int]:
        """Return the versions of this package and of SGLang, with a 1."""
        return _build()


@dataclass(frozen=True, slots=True)
class SpillStats:
    """Counts what waits to be stored, and host copies skipped for lack of host memory."""

    waiting_tokens: int = 0
    flight_tokens: int = 0
    num_backups_skipped: int = 0
    num_backups_recovered: int = 0


@dataclass(frozen=True, slots=True)
class HintStats:
    """Counts the hints of conversations that are about to be used."""

    num_begun: int
    ended: dict[HintEnd, int]
    num_tokens_loaded: int


@dataclass(frozen=True, slots=True)
class WaitStats:
    """Says how long requests waited."""

    requests: DurationCounts  # from arrival to admission
    loads: DurationCounts  # of those with a load: how long nothing else kept them


_NO_PLANNER = PlannerStats({}, None, {})


def process_stats(
    storage: TieredStorage,
    planner: PlannerStats | None = None,
    spill: SpillStats | None = None,
    hints: HintStats | None = None,
    waits: WaitStats | None = None,
    held: Mapping[str, Holding] | None = None,
    *,
    request_log_dropped: int | None = None,
) -> ProcessStats:
    """Take a snapshot. Memory only, any thread."""
    planner, stack = planner or _NO_PLANNER, storage.stack
    reads = {tier: planner.reads.get(tier, TierReads()) for tier in Tier}
    below = beside = None
    if stack.bucket is not None:
        bucket, moved = stack.bucket, stack.stack_stats()
        below = ObjectTierStats(bucket.stats(), bucket.object_stats(), moved, reads[Tier.OBJECT])
    if Tier.PEER in stack.remote:
        moved_here = stack.remote_stats(Tier.PEER)
        peers = cast("PeerStats", stack.remote[Tier.PEER].stats())
        beside = PeerTierStats(peers, moved_here, reads[Tier.PEER])
    region = storage.region_engine
    encoding = region.encoding if isinstance(region, RegionEngine) else None
    return ProcessStats(
        nvme=stack.nvme.stats(),
        host=storage.accounting,
        spill=spill or SpillStats(),
        planner=planner,
        reads=reads[Tier.NVME],
        admission=storage.gate.outcomes,
        write_budget_bytes=storage.gate.budget_bytes,
        object=below,
        peer=beside,
        hints=hints,
        waits=waits,
        codec=None if encoding is None or encoding.name == NO_CODEC else encoding.stats(),
        holdings={tier: _bounded(holding) for tier, holding in (held or {}).items()},
        budget=storage.budget,
        request_log_dropped=request_log_dropped,
    )


def _bounded(holding: Mapping[str, Any]) -> dict[str, int]:
    """Leave out the capacity of a tier that has no cap."""
    is_bounded = holding["capacity_bytes"] < sys.maxsize
    return {name: n for name, n in holding.items() if is_bounded or not name.startswith("capacity")}


@functools.cache
def _build() -> dict[tuple[str, str], int]:
    return {(__version__, importlib.metadata.version("sglang")): 1}


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counts what the endpoint of either role did since the start."""

    num_peers: int
    num_rooms: int
    num_rooms_done: int
    num_rooms_failed: int
    num_sessions_lost: int
    wire_bytes: int
    same_host_bytes: int
    num_damaged: int
    num_refused: int


def transfer_stats(endpoint: PrefillEndpoint | DecodeEndpoint) -> TransferStats:
    """Take a snapshot. Memory only, any thread."""
    stats: Any = endpoint.stats
    sends = hasattr(stats, "sent_bytes")
    return TransferStats(
        endpoint.num_sessions,
        endpoint.num_rooms,
        stats.num_rooms_sent if sends else stats.num_rooms_received,
        stats.num_rooms_failed,
        stats.num_sessions_lost,
        stats.sent_bytes if sends else stats.received_bytes,
        stats.pulled_bytes,
        stats.num_resent if sends else stats.num_damaged,
        stats.num_refused if sends else stats.num_forged,
    )


def manager_of(scheduler: Any) -> Any:
    """Return the KV manager of a scheduler process; None where it hands nothing over, or hands it
    over through another backend."""
    for queue in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        manager = getattr(getattr(scheduler, queue, None), "kv_manager", None)
        if getattr(manager, "endpoint", None) is not None:
            return manager
    return None


class Holding(TypedDict):
    """One tier. What is free to be taken again, but found until then, is held."""

    capacity_bytes: int
    capacity_tokens: int
    held_bytes: int
    held_tokens: int


def holdings(cache: Any) -> dict[str, Holding]:
    """Return a ``Holding`` for each tier that this rank keeps: ``device``, ``host``, ``nvme`` and
    ``object``, the last as far as its listing was read. ``cache`` is a ``TieredRadixCache``. Memory
    only; the scheduler's thread.

    Bytes are this rank's, as stored, and tokens those of its replica, of which every rank has a
    part. A tier's capacity is in tokens as long as in host memory: with a codec it holds more.
    Where pools lie beside a model's KV (sliding windows, states, drafts), tokens are estimates.
    """
    group = cache.cache_controller.mem_pool_host
    host_tokens, host_bytes = int(group.logical_size), _pool_bytes(group)

    def bytes_of(num_tokens: int) -> int:
        return num_tokens * host_bytes // max(host_tokens, 1)

    def tokens_of(nbytes: int) -> int:
        return nbytes * host_tokens // max(host_bytes, 1)

    def tokens_in(num_pages: int) -> int:
        """Of pages that may be encoded."""
        return num_pages // len(group.entries) * int(cache.page_size)

    def in_tokens(capacity: int, held: int) -> Holding:
        return Holding(
            capacity_bytes=bytes_of(capacity),
            capacity_tokens=capacity,
            held_bytes=bytes_of(held),
            held_tokens=held,
        )

    allocator = cache.token_to_kv_pool_allocator
    device_tokens = int(allocator.size_full)
    found = {
        "device": in_tokens(device_tokens, device_tokens - _num_free(allocator)),
        "host": in_tokens(host_tokens, host_tokens - int(group.available_size())),
    }
    storage = cache.storage
    if storage is None or storage.borrows:
        return found
    nvme = storage.region_engine.stats()
    found["nvme"] = Holding(
        capacity_bytes=nvme.capacity_bytes,
        capacity_tokens=tokens_of(nvme.capacity_bytes),
        held_bytes=nvme.stored_bytes,
        held_tokens=tokens_in(nvme.num_pages),
    )
    if storage.stack.bucket is not None:
        bucket = storage.stack.bucket.stats()
        found["object"] = Holding(
            capacity_bytes=bucket.capacity_bytes,
            capacity_tokens=tokens_of(bucket.capacity_bytes),
            held_bytes=bucket.physical_bytes,
            held_tokens=tokens_in(bucket.num_pages),
        )
    return found


def _pool_bytes(group: Any) -> int:
    pools = [entry.host_pool for entry in group.entries]
    return sum(int(pool.size * getattr(pool, "size_per_token", 0)) for pool in pools)


def _num_free(allocator: Any) -> int:
    """Models with sliding windows have fewer of the window's slots than of the others."""
    free = getattr(allocator, "full_available_size", allocator.available_size)
    return int(free())

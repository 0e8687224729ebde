"""What the metric tables read of one scheduler process (``process_stats``) and of its endpoint in a
handoff (``transfer_stats``), and what its tiers hold (``holdings``)."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

from sglang_tiered import __version__
from sglang_tiered.codecs import NO_CODEC
from sglang_tiered.storage.base import Tier
from sglang_tiered.storage.region.engine import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.transfer.decode.endpoint import DecodeEndpoint
    from sglang_tiered.transfer.prefill.endpoint import PrefillEndpoint


Stats = dict[str, Any]
"""By the names that paths in the tables begin with. Some of it goes on counting: read it at once,
on the thread that took it."""


def process_stats(
    storage: TieredStorage | None,
    tiering: Any = None,
    held: Mapping[str, Mapping[str, int]] | None = None,
) -> Stats:
    """Take a snapshot. Memory only, scheduler thread.

    ``storage``: None without tiers, and while they are detached. ``tiering``: None without tiers,
    and on a stage of a pipeline. ``held``: see ``holdings``.
    """
    stats: Stats = {
        "build": _build(),
        "holdings": {tier: _bounded(holding) for tier, holding in (held or {}).items()},
    }
    reads: Mapping[Tier, Any] = {}
    if tiering is not None:
        planner = tiering.planner.stats()
        reads = planner["reads"]
        stats |= {
            "planner": planner,
            "reads": reads[Tier.NVME],
            "spill": tiering.stores.queue,
            "copies": tiering.stores,
            "hints": tiering.hints,
            "waits": tiering.planner.loads.wait_stats(),
            "request_log_dropped": tiering.notes.num_dropped,
        }
    if storage is None:
        return stats
    stack, region = storage.stack, storage.region_engine
    encoding = region.encoding if isinstance(region, RegionEngine) else None
    if encoding is not None and encoding.name != NO_CODEC:
        stats["codec"] = encoding.stats()
    if stack.bucket is not None:
        stats["object"] = {
            "engine": stack.bucket.stats(),
            "bucket": stack.bucket.object_stats(),
            "moved": stack.stack_stats(),
            "reads": reads.get(Tier.OBJECT),
        }
    if (peers := stack.remote.get(Tier.PEER)) is not None:
        stats["peer"] = {
            "tier": peers.stats(),
            "moved": stack.remote_stats(Tier.PEER),
            "reads": reads.get(Tier.PEER),
        }
    return stats | {
        "nvme": stack.nvme.stats(),
        "host": storage.accounting,
        "admission": storage.gate.outcomes,
        "write_budget_bytes": storage.gate.budget_bytes,
        "budget": storage.budget,
    }


def health_reasons(stats: Stats) -> dict[str, str]:
    """Return why tiers are not running, or a bucket refuses changes: one clause each, by the
    tier's name."""
    found = {"nvme": stats["nvme"].health_reason} if "nvme" in stats else {}
    if "object" in stats:
        below = stats["object"]
        found["object"] = below["engine"].health_reason or below["bucket"].trouble
    if "peer" in stats:
        found["peer"] = stats["peer"]["tier"].health_reason
    return {name: reason for name, reason in found.items() if reason}


def _bounded(holding: Mapping[str, int]) -> dict[str, int]:
    """Leave out the capacity of a tier that has no cap."""
    is_bounded = holding["capacity_bytes"] < sys.maxsize
    return {name: n for name, n in holding.items() if is_bounded or not name.startswith("capacity")}


@functools.cache
def _build() -> dict[tuple[str, str], int]:
    """Return the versions of this package and of SGLang, with a 1."""
    return {(__version__, importlib.metadata.version("sglang")): 1}


def transfer_stats(endpoint: PrefillEndpoint | DecodeEndpoint) -> Stats:
    """Take a snapshot of what the endpoint of either role did since the start. Memory only, any
    thread."""
    stats: Any = endpoint.stats
    sends = hasattr(stats, "sent_bytes")
    return {
        "num_peers": endpoint.num_sessions,
        "num_rooms": endpoint.num_rooms,
        "num_rooms_done": stats.num_rooms_sent if sends else stats.num_rooms_received,
        "num_rooms_failed": stats.num_rooms_failed,
        "num_sessions_lost": stats.num_sessions_lost,
        "wire_bytes": stats.sent_bytes if sends else stats.received_bytes,
        "same_host_bytes": stats.pulled_bytes,
        "num_damaged": stats.num_resent if sends else stats.num_damaged,
        "num_refused": stats.num_refused if sends else stats.num_forged,
    }


def manager_of(scheduler: Any) -> Any:
    """Return the KV manager of a scheduler process; None where it hands nothing over, or hands it
    over through another backend."""
    for queue in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        manager = getattr(getattr(scheduler, queue, None), "kv_manager", None)
        if getattr(manager, "endpoint", None) is not None:
            return manager
    return None


def holdings(cache: Any) -> dict[str, dict[str, int]]:
    """Return the bytes and tokens that each tier of this rank can hold and holds: ``device``,
    ``host``, ``nvme`` and ``object``, the last as far as its listing was read. ``cache`` is a
    ``TieredRadixCache``. Memory only; the scheduler's thread.

    Bytes are this rank's, as stored, and tokens those of its replica, of which every rank has a
    part. A tier's capacity is in tokens as long as in host memory: with a codec it holds more.
    Where pools lie beside a model's KV (sliding windows, states, drafts), tokens are estimates.
    What is free to be taken again, but found until then, is held.
    """
    group = cache.cache_controller.mem_pool_host
    host_tokens, host_bytes = int(group.logical_size), _pool_bytes(group)

    def in_tokens(capacity: int, num_free: int) -> dict[str, int]:
        held = capacity - num_free
        return {
            "capacity_bytes": capacity * host_bytes // max(host_tokens, 1),
            "capacity_tokens": capacity,
            "held_bytes": held * host_bytes // max(host_tokens, 1),
            "held_tokens": held,
        }

    def in_bytes(capacity: int, held: int, num_pages: int) -> dict[str, int]:
        """Of pages that may be encoded."""
        return {
            "capacity_bytes": capacity,
            "capacity_tokens": capacity * host_tokens // max(host_bytes, 1),
            "held_bytes": held,
            "held_tokens": num_pages // len(group.entries) * int(cache.page_size),
        }

    allocator = cache.token_to_kv_pool_allocator
    found = {
        "device": in_tokens(int(allocator.size_full), _num_free(allocator)),
        "host": in_tokens(host_tokens, int(group.available_size())),
    }
    storage = cache.storage
    if storage is None or storage.borrows:
        return found
    nvme = storage.region_engine.stats()
    found["nvme"] = in_bytes(nvme.capacity_bytes, nvme.stored_bytes, nvme.num_pages)
    if storage.stack.bucket is not None:
        bucket = storage.stack.bucket.stats()
        found["object"] = in_bytes(bucket.capacity_bytes, bucket.physical_bytes, bucket.num_pages)
    return found


def _pool_bytes(group: Any) -> int:
    pools = [entry.host_pool for entry in group.entries]
    return sum(int(pool.size * getattr(pool, "size_per_token", 0)) for pool in pools)


def _num_free(allocator: Any) -> int:
    """Models with sliding windows have fewer of the window's slots than of the others."""
    free = getattr(allocator, "full_available_size", allocator.available_size)
    return int(free())

"""``holdings``: what the tiers of one rank can hold and do hold, in bytes and in tokens."""

from __future__ import annotations

from typing import Any, TypedDict

__all__ = ["Holding", "holdings"]


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

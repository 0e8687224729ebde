"""Makes a conversation durable in a tier. Runs on the checkpoint threads, never on the
scheduler's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from sglang_tiered.integration.storage.host_pages import page_segments
from sglang_tiered.storage.base import Run, Tier
from sglang_tiered.storage.region import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.integration.storage.backend import TieredStorage

__all__ = ["WORK_S", "make_durable"]

WORK_S = 25.0
"""Time after which a checkpoint reports what is missing; shorter than the wait of the HTTP client's
request (``service.TIMEOUT_S``)."""

_LOOK_S = 0.02
_AGAIN_S = 1.0
_BATCH_BYTES = 8 << 20


def make_durable(
    storage: TieredStorage, hashes: Sequence[str], tier: Tier, tenant: bytes, work_s: float = WORK_S
) -> int:
    """Wait until pages are durable in a tier, and return how many leading ones are. For NVMe, pages
    that only the bucket or other servers hold are loaded and stored under their tenant. Never on
    the scheduler thread."""
    shard, stack = storage.region_engine, storage.stack
    if not isinstance(shard, RegionEngine):
        return len(hashes)  # decided by the rank that keeps the pages
    deadline = time.monotonic() + work_s
    keys = storage.keys_of_pools(hashes)
    wanted = keys[: len(hashes)]  # KV pages; the other pools hold only some
    is_below = tier is Tier.OBJECT and stack.bucket is not None
    brings_up_at = 0.0
    while (now := time.monotonic()) < deadline:
        held = shard.view.contains(wanted)
        if is_below:
            below = stack.contains_in_bucket(wanted)
            held = [up or down for up, down in zip(held, below, strict=True)]
        if all(held):
            break
        if stack.remote and not is_below and now >= brings_up_at:
            _bring_up(storage, shard, hashes, tenant, deadline)
            brings_up_at = time.monotonic() + _AGAIN_S
        time.sleep(_LOOK_S)
    left_s = max(1.0, deadline - time.monotonic())
    if is_below:
        return _leading(stack.flush_to_bucket(keys, left_s)[: len(hashes)])
    before = shard.view.contains(wanted)  # the barrier may miss later ones
    is_synced = shard.flush(left_s)
    after = shard.view.contains(wanted)
    shard.view.use(keys)  # counts as use: reclaim keeps them longer
    held = [was and is_held for was, is_held in zip(before, after, strict=True)]
    return _leading(held) if is_synced else 0


def _bring_up(
    storage: TieredStorage,
    shard: RegionEngine,
    hashes: Sequence[str],
    tenant: bytes,
    deadline: float,
) -> None:
    """Load pages that NVMe lacks and remote tiers hold into private memory, which stores them on
    NVMe as well. Ends early where NVMe does not take them or no tier serves them."""
    stack = storage.stack
    keys, number = storage.keys_of_pools(hashes), len(hashes)
    for at, page_bytes in enumerate(_page_bytes(storage)):
        of_pool = keys[at * number : (at + 1) * number]
        pages = zip(
            of_pool, shard.view.contains(of_pool), stack.contains_remote(of_pool), strict=True
        )
        lacking = [key for key, is_here, is_far in pages if is_far and not is_here]
        size = max(1, _BATCH_BYTES // page_bytes)
        for start in range(0, len(lacking), size):
            batch = tuple(lacking[start : start + size])
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            room = memoryview(bytearray(len(batch) * page_bytes))
            buffers = tuple(
                (room[i * page_bytes : (i + 1) * page_bytes],) for i in range(len(batch))
            )
            job = stack.submit_load(Run(batch, buffers), deadline_s=left_s, tenant=tenant)
            job.wait()
            loaded = [key for key, is_ok in zip(batch, job.ok, strict=True) if is_ok]
            if not loaded or not _wait_until_kept(shard, loaded, deadline):
                return


def _wait_until_kept(shard: RegionEngine, keys: Sequence[bytes], deadline: float) -> bool:
    deadline = min(deadline, time.monotonic() + _AGAIN_S)
    while not all(shard.view.contains(keys)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def _page_bytes(storage: TieredStorage) -> list[int]:
    """Return the bytes of a page in each pool, in the order of ``keys_of_pools``."""
    pools = {PoolName.KV: storage.mem_pool_host, **getattr(storage, "registered_pools", {})}
    sizes = []
    for pool in pools.values():
        page_size = getattr(pool, "logical_page_size", pool.page_size)
        (page,) = page_segments(pool, torch.arange(page_size), 1)
        sizes.append(sum(segment.nbytes for segment in page))
    return sizes


def _leading(held: Sequence[bool]) -> int:
    return held.index(False) if False in held else len(held)

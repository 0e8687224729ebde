"""The real ``TieredRadixCache`` over the real ``TieredStorage`` and region store, without a model.

It has one rank, or is one of two ranks of a given process group. The process's environment, server
arguments and place among ranks are set once and stay.
"""

from __future__ import annotations

import os
import time
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack
    from pathlib import Path

    import torch

PAGE, LAYERS, HEADS, DIM, PAGES = 16, 4, 2, 64, 16
TOKENS = list(range(100, 100 + 4 * PAGE))
"""A prompt."""
DEADLINE_S = 60.0


def storage_flags() -> dict[str, str]:
    """SGLang's flags for our storage, by the names of its settings."""
    from sglang_tiered.integration.resolve import _storage_arguments

    return {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in _storage_arguments(PAGE).items()
        if flag.startswith("--hicache-storage-backend")
    }


def make_pool(num_pages: int, page_size: int, *, layers: int, heads: int, dim: int) -> Any:
    """A device pool on the CPU: its allocator, which knows it."""
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    size = num_pages * page_size
    shape = {"head_num": heads, "head_dim": dim, "layer_num": layers, "dtype": torch.float32}
    where: Any = {"device": "cpu", "enable_memory_saver": False}
    pool = MHATokenToKVPool(size=size, page_size=page_size, **shape, **where)
    return PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", pool, False)


def make_cache(folder: str, held: ExitStack, *, rank: int = 0, **groups: Any) -> Any:
    """``rank``: among all. ``groups``: of this rank, by their names in ``CacheInitParams``."""
    import torch
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    from sglang_tiered.config import NvmeConfig, TieredConfig, TierMode
    from sglang_tiered.flags import MiB
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.identity import namespace

    num_ranks = torch.distributed.get_world_size() if groups else 1
    nvme = NvmeConfig(directory=folder, capacity_bytes=256 * MiB, region_bytes=4 * MiB)
    config = TieredConfig(
        mode=TierMode.NVME, host_bytes=num_ranks * 8 * MiB, nvme=nvme, num_ranks=num_ranks
    )
    config.to_environment(os.environ)
    namespace.server_identity = lambda config: {"model": "m"}
    arguments = ServerArgs(
        model_path="dummy",
        page_size=PAGE,
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
        hicache_write_policy="write_through",
        **storage_flags(),
    )
    set_global_server_args_for_scheduler(arguments)
    sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), num_ranks)
    ranks = {"tp_rank": rank, "attn_tp_rank": rank, "pp_rank": 0, "pp_size": 1}
    held.enter_context(get_parallel().override(**sizes, **ranks))
    params = CacheInitParams(
        req_to_token_pool=ReqToTokenPool(4, 512, "cpu", False),
        token_to_kv_pool_allocator=make_pool(PAGES, PAGE, layers=LAYERS, heads=HEADS, dim=DIM),
        page_size=PAGE,
        disable=False,
        tree_components=(ComponentType.FULL,),
        **groups,
    )
    cache = TieredRadixCache(params, config)
    cache.init_hicache(arguments, params)
    return cache


def attach(cache: Any, **policies: str) -> tuple[bool, str]:
    flags, name = storage_flags(), "hicache_storage_backend"
    given = (flags[name], flags[f"{name}_extra_config"])
    answer: tuple[bool, str] = cache.attach_storage_backend(*given, **policies)
    return answer


@contextmanager
def broken_shard(directory: Path, *, rank: int) -> Iterator[None]:
    """Put a file in the place of a rank's shard, which no process has open."""
    (shard,) = directory.glob(f"shard-tp{rank}of*")
    aside = directory.with_name(f"aside-{rank}")
    shard.rename(aside)
    shard.touch()
    yield
    shard.unlink()
    aside.rename(shard)


def compute(cache: Any, tokens: list[int]) -> torch.Tensor:
    """Put a prompt into the tree, as a request does that has finished. Its copy is queued."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    pool = cache.token_to_kv_pool_allocator.get_kvcache()
    slots: torch.Tensor = cache.token_to_kv_pool_allocator.alloc(len(tokens))
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[slots] = torch.randn(len(slots), HEADS, DIM)
    cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots))
    cache.flush_pending_backups()
    assert cache.ongoing_write_through
    return slots


def keys_of(tokens: list[int]) -> list[str]:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    hashes = get_storage_hash_str(RadixKey(array("q", tokens)), None, page_size=PAGE)
    return list(hashes)


def step(cache: Any, until: Callable[[], bool], steps: int | None = None) -> None:
    """Steps of the scheduler until something is so, with a deadline or a number."""
    deadline = time.monotonic() + DEADLINE_S
    while not until() and steps != 0:
        assert time.monotonic() < deadline
        cache.check_hicache_events()
        steps = None if steps is None else steps - 1
        time.sleep(0.001)


def settle(cache: Any) -> None:
    step(cache, lambda: not cache.ongoing_write_through and not cache.ongoing_backup)


def store(cache: Any, tokens: list[int]) -> None:
    compute(cache, tokens)
    step(cache, lambda: cache.storage.num_kept(keys_of(tokens)) == len(tokens) // PAGE)
    settle(cache)


def flush(cache: Any) -> None:
    cache.reset()
    cache.token_to_kv_pool_allocator.clear()

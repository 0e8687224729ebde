"""The host tier's size, where SGLang knows the device pool.

Without ``--tier-host-bytes`` SGLang sizes it: twice the device pool, less where the machine, the
memory control group or the number of ranks leaves less (``mem_cache.hicache_auto_size``). With it,
SGLang gets the size of the target model's pools. SGLang divides that among a hybrid model's pools,
adds a page of padding, and makes the host pool of a draft model beside it, as many tokens long. The
cap covers all of that.

What does not fit is one sentence here, before SGLang's allocation ends the scheduler with a
traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sglang_tiered.config import TieredConfig


MIN_TOKENS = 1024
"""The smallest device pool and host tier worth a start: a prompt of a page of text."""


SMALL_RATIO = 5 / 4
"""A host tier smaller than this multiple of the device pool would hold hardly anything but copies
of what the device holds."""


def is_small(params: Any, config: TieredConfig | None) -> bool:
    """Whether the host tier to come is smaller than ``SMALL_RATIO`` of the device pool. Answers the
    same on all ranks. ``params`` are those of SGLang's cache, once SGLang has sized the tier."""
    from sglang.srt.runtime_context import get_memory

    pool = params.token_to_kv_pool_allocator.get_kvcache()
    memory = get_memory()
    if config is not None and config.host_bytes_per_rank is not None:
        host_bytes: float = config.host_bytes_per_rank
    elif memory.hicache_size > 0:
        host_bytes = memory.hicache_size * 1e9
    else:
        return bool(memory.hicache_ratio < SMALL_RATIO)
    drafts = params.sidecar_draft_device_pools
    token_bytes = sum(_token_bytes(each) for each in (pool, *drafts))
    return host_bytes < SMALL_RATIO * token_bytes * int(pool.size)


def target_host_bytes(
    host_bytes: int, target: Any, drafts: Iterable[Any], *, page_size: int
) -> int:
    """Return how much of ``host_bytes`` the target's host pools may take.

    ``target`` and ``drafts`` are device pools of SGLang: what a token takes there, it takes in host
    memory. At least one page, however small the cap.
    """
    target_token_bytes = _token_bytes(target)
    token_bytes = target_token_bytes + sum(_token_bytes(draft) for draft in drafts)
    page_bytes = target_token_bytes * page_size
    share = host_bytes * target_token_bytes / token_bytes
    return int(max(page_bytes, share - page_bytes))


def use_host_bytes(host_bytes: int, target: Any, drafts: Iterable[Any], *, page_size: int) -> None:
    """Give SGLang the size in bytes: its flag counts whole gigabytes. As ``target_host_bytes``."""
    from sglang.srt.runtime_context import get_context

    size = target_host_bytes(host_bytes, target, drafts, page_size=page_size)
    get_context().override("sglang_tiered.host_bytes", hicache_size=size / 1e9)


def around_auto_size(
    original: Callable[..., Any], params: Any, draft_plan: Any, *, enabled: bool
) -> Any:
    """Wrap ``kv_cache_builder.auto_size_hicache``, which raises or makes a pool of a few tokens
    where hardly any memory is left, and raises where it cannot see the control group of this
    process. In the first case this raises ``ConfigError``, on all ranks alike."""
    from sglang.srt.mem_cache import hicache_auto_size
    from sglang.srt.runtime_context import get_context, get_memory

    fraction = get_memory().hicache_host_memory_fraction
    if enabled and fraction is not None:
        try:
            device_bytes = hicache_auto_size._estimate_hicache_bytes(params, draft_plan)  # noqa: SLF001
        except ValueError as error:  # a kind of pool that it cannot measure
            raise ConfigError(
                f"SGLang cannot size the host tier: {str(error).rstrip('.')}."
            ) from None
        budget = int(hicache_auto_size.host_memory_budget_bytes() * fraction)
        num_tokens = params.token_to_kv_pool_allocator.get_kvcache().size
        check_host_bytes(device_bytes * MIN_TOKENS // num_tokens, budget)
        try:
            hicache_auto_size.host_memory_budget_bytes(auto_size=True)
        except RuntimeError:
            ratio = min(get_memory().hicache_ratio, least_of_ranks(budget) / device_bytes)
            get_context().override(
                "sglang_tiered.host_ratio",
                hicache_ratio=ratio,
                hicache_host_memory_fraction=None,
            )
    return original(params, draft_plan, enabled=enabled)


def reserve_for_tier(config: TieredConfig) -> None:
    """Keep free what an NVMe tier in memory (``--tier-dir`` on a tmpfs) may still take, beside what
    SGLang keeps free. Once in a process."""
    from sglang.srt.mem_cache.pool_host import base

    if config.nvme is not None:
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES += config.nvme.memory_bytes


def check_asked_size(target: Any, drafts: Iterable[Any]) -> None:
    """Refuse a host tier of a size that the user gave, in bytes, gigabytes or as a ratio, where
    SGLang's allocation would. ``target`` and ``drafts`` as in ``target_host_bytes``."""
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes
    from sglang.srt.runtime_context import get_memory

    memory = get_memory()
    if memory.hicache_size > 0:
        check_host_bytes(int(memory.hicache_size * 1e9), host_memory_budget_bytes())
    elif memory.hicache_host_memory_fraction is None and hasattr(target, "get_kv_size_bytes"):
        token_bytes = sum(_token_bytes(pool) for pool in (target, *drafts))
        needed = int(memory.hicache_ratio * target.size * token_bytes)
        check_host_bytes(needed, host_memory_budget_bytes())


def check_host_bytes(needed: int, budget: int) -> None:
    """Refuse a host tier of one rank that SGLang's check of the machine's memory would refuse. All
    ranks call it, and get the answer of the rank that has the least."""
    needed, budget = -least_of_ranks(-needed), least_of_ranks(budget)
    if needed > budget:
        raise ConfigError(
            f"a host tier of {format_bytes(needed)} a rank does not fit the "
            f"{format_bytes(max(0, budget))} that can be allocated beside the device pool and "
            "SGLang's reserve; size it with --tier-host-bytes (SGLang's own launcher: "
            "--hicache-size), lower --max-total-tokens, raise the memory limit of this process, or "
            "pass --tier-mode off."
        )


def least_of_ranks(value: int) -> int:
    """Return the smallest of all ranks' values."""
    import torch

    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return value
    from sglang.srt.runtime_context import get_parallel

    least = torch.tensor(value, dtype=torch.int64)
    group = get_parallel().world_group.cpu_group
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    return int(least)


def _token_bytes(pool: Any) -> float:
    sizes = pool.get_kv_size_bytes()
    return float(sum(sizes) if isinstance(sizes, tuple) else sizes) / max(1, int(pool.size))

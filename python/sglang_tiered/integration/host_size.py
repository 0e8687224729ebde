"""The host tier's size, where SGLang knows the device pool.

Without ``--tier-host-bytes`` SGLang sizes it: twice the device pool, less where the machine, the
memory control group or the number of ranks leaves less (``mem_cache.hicache_auto_size``). With it,
SGLang gets the size of the target model's pools: it divides that among a hybrid model's pools, adds
a page of padding, and makes the host pool of a draft model beside it, as many tokens long. The cap
covers all of that.

What does not fit is one sentence here, before SGLang's allocation ends the scheduler with a
traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_tiered.config import format_bytes
from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "MIN_TOKENS",
    "around_auto_size",
    "check_asked_size",
    "check_host_bytes",
    "target_host_bytes",
]

MIN_TOKENS = 1024
"""The smallest device pool and host tier worth a start: a prompt of a page of text."""


def target_host_bytes(
    host_bytes: int, target: Any, drafts: Iterable[Any], *, page_size: int
) -> int:
    """What of ``host_bytes`` the target's host pools may take.

    ``target`` and ``drafts`` are device pools of SGLang: what a token takes there, it takes in host
    memory. At least one page, however small the cap.
    """
    target_token_bytes = _token_bytes(target)
    token_bytes = target_token_bytes + sum(_token_bytes(draft) for draft in drafts)
    page_bytes = target_token_bytes * page_size
    share = host_bytes * target_token_bytes / token_bytes
    return int(max(page_bytes, share - page_bytes))


def around_auto_size(
    original: Callable[..., Any], params: Any, draft_plan: Any, *, enabled: bool
) -> Any:
    """``kv_cache_builder.auto_size_hicache``, which raises or makes a pool of a few tokens where
    hardly any memory is left. Raises ``ConfigError`` in its place."""
    from sglang.srt.mem_cache import hicache_auto_size
    from sglang.srt.runtime_context import get_memory

    fraction = get_memory().hicache_host_memory_fraction
    if enabled and fraction is not None:
        try:
            device_bytes = hicache_auto_size._estimate_hicache_bytes(params, draft_plan)  # noqa: SLF001
            budget = hicache_auto_size.host_memory_budget_bytes(auto_size=True)
        except (RuntimeError, ValueError) as error:  # a pool or a control group it cannot measure
            raise ConfigError(
                f"SGLang cannot size the host tier ({error}); pass --tier-host-bytes."
            ) from error
        num_tokens = params.token_to_kv_pool_allocator.get_kvcache().size
        check_host_bytes(device_bytes * MIN_TOKENS // num_tokens, int(budget * fraction))
    return original(params, draft_plan, enabled=enabled)


def check_asked_size(target: Any, drafts: Iterable[Any]) -> None:
    """Refuse a host tier of a size that the user gave, in bytes, gigabytes or as a ratio, where
    SGLang's allocation would. ``target`` and ``drafts`` as in ``target_host_bytes``."""
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes
    from sglang.srt.runtime_context import get_memory

    memory = get_memory()
    if memory.hicache_size > 0:
        check_host_bytes(int(memory.hicache_size * 1e9), host_memory_budget_bytes())
    elif memory.hicache_host_memory_fraction is None and memory.hicache_ratio is not None:
        token_bytes = sum(_token_bytes(pool) for pool in (target, *drafts))
        needed = int(memory.hicache_ratio * target.size * token_bytes)
        check_host_bytes(needed, host_memory_budget_bytes())


def check_host_bytes(needed: int, budget: int) -> None:
    """Refuse a host tier of one rank that SGLang's check of the machine's memory would refuse."""
    if needed > budget:
        raise ConfigError(
            f"a host tier of {format_bytes(needed)} a rank does not fit the "
            f"{format_bytes(max(0, budget))} that can be allocated beside the device pool and "
            "SGLang's reserve; size it with --tier-host-bytes, lower --max-total-tokens, raise the "
            "memory limit of this process, or pass --tier-mode off."
        )


def _token_bytes(pool: Any) -> float:
    sizes = pool.get_kv_size_bytes()
    return float(sum(sizes) if isinstance(sizes, tuple) else sizes) / max(1, int(pool.size))

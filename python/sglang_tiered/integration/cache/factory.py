"""``register``: ``--radix-cache-backend tiered``, and which cache SGLang's factory gets for it."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    create_unified_radix_cache,
    default_radix_cache_factory,
    register_radix_cache_backend,
    registered_radix_cache_backends,
)
from sglang.srt.runtime_context import get_memory

from sglang_tiered.config import CACHE_BACKEND
from sglang_tiered.integration.cache import small_host
from sglang_tiered.integration.cache.host_size import SMALL_RATIO, is_small
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    from sglang_tiered.config import TieredConfig


logger = logging.getLogger(__name__)


def register(build_cache: Callable[[TreeCacheBuildContext], BasePrefixCache]) -> None:
    """Register ``--radix-cache-backend tiered`` in this process. Idempotent."""
    if CACHE_BACKEND not in registered_radix_cache_backends():
        register_radix_cache_backend(CACHE_BACKEND, build_cache)


def build(ctx: TreeCacheBuildContext, config: TieredConfig | None) -> BasePrefixCache:
    """Build the cache for SGLang's factory; without an ordinary host tier, SGLang's own.
    ``config``: of our launcher."""
    memory = get_memory()
    is_pure_swa = ctx.is_hybrid_swa and ctx.full_tokens_per_layer == 0
    if (
        ctx.disable_radix_cache
        or is_pure_swa
        or memory.enable_lmcache
        or memory.enable_flexkv
        or memory.enable_unified_cache_external_linker
        or not ctx.enable_hierarchical_cache
    ):
        return default_radix_cache_factory(ctx)
    params = ctx.params
    is_ours = config is not None and config.nvme is not None and params.pp_size == 1
    if is_ours and memory.hicache_write_policy == "write_through" and is_small(params, config):
        least = f"{SMALL_RATIO * 100:.0f}% of device memory"
        if ctx.is_hybrid_swa or ctx.is_hybrid_ssm:
            reason = small_host.reason_against_buffer()
            if reason is None:
                small_host.use_buffer(params)
                logger.info(
                    "The host tier is smaller than %s: it holds what is on its way to NVMe and "
                    "back, and nothing comes back from host memory itself.",
                    least,
                )
            else:
                logger.warning(
                    "The host tier is smaller than %s, and no buffer, since %s: what it has no "
                    "room for never reaches NVMe; raise --tier-host-bytes.",
                    least,
                    reason,
                )
        else:
            small_host.register_core()
            params.tree_core_backend = small_host.BACKEND_NAME
            logger.info(
                "The host tier is smaller than %s: copies of what the device holds give way once "
                "NVMe has them, and what the device gives up comes back from NVMe.",
                least,
            )
    cache_class: Any = partial(TieredRadixCache, config=config)
    return create_unified_radix_cache(ctx, cache_class=cache_class)

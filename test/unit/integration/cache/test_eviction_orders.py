"""Every order of eviction that SGLang offers is left as it is, over its own tree and pools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_world import PAGE, cache_world, prompt
from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

CONFIGS = {"tlru": {"threshold": 2 * PAGE, "next_prompt_estimate": 0}}
"""Unset, this one goes by age alone."""
NUM_PAGES, NUM_PROMPTS, NUM_AGAIN = 8, 48, 16


def order_of_eviction(cache: Any, allocator: Any, settle: Callable[[], None]) -> list[int]:
    """In which order prompts leave the device, of different age, length, use and priority."""
    prompts = [prompt(number, 1 + number % 3) for number in range(6)]
    first_slot = {}
    uses = ((0, 2), (1, 0), (2, 1), (1, 0), (1, 0), (3, 2), (3, 0), (4, 0), (5, 1))
    for number, priority in uses:
        slots = allocator.alloc(len(prompts[number]))
        key = RadixKey(prompts[number], None)
        cache.insert(InsertParams(key=key, value=slots, priority=priority))
        first_slot.setdefault(number, int(slots[0]))
        settle()
    order: list[int] = []
    while len(order) < len(prompts):
        cache.evict(EvictParams(num_tokens=PAGE))
        held = set(cache.all_values_flatten().tolist())
        gone = [number for number, slot in first_slot.items() if slot not in held]
        order += [number for number in gone if number not in order]
    return order


def test_tiers_keep_the_order_of_eviction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    for policy in RADIX_EVICTION_POLICY_CHOICES:
        config = CONFIGS.get(policy)
        with cache_world(
            tmp_path / policy, monkeypatch, policy=policy, policy_config=config
        ) as world:
            cache, allocator = world.cache, world.allocator
            params = CacheInitParams(
                disable=False,
                req_to_token_pool=cache.req_to_token_pool,
                token_to_kv_pool_allocator=allocator,
                page_size=PAGE,
                tree_components=(ComponentType.FULL,),
                eviction_policy=policy,
                eviction_policy_config=config,
            )
            plain = order_of_eviction(UnifiedRadixCache(params), allocator, lambda: None)
            tiered = order_of_eviction(cache, allocator, world.wait_for_copies)
            assert tiered == plain, policy
            orders.append(tuple(tiered))
    assert len(set(orders)) == len(orders)

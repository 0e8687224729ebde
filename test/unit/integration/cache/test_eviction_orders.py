"""Every order of eviction that SGLang offers: the tiers leave it as it is, and bring back what it
gives up, bit for bit. Over SGLang's own tree, pools and threads, without a server."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_world import PAGE, CacheWorld, cache_world, prompt
from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

CONFIGS = {"tlru": {"threshold": 2 * PAGE, "next_prompt_estimate": 0}}
"""Unset, this one goes by age alone."""
NUM_PAGES, NUM_PROMPTS, NUM_AGAIN = 8, 48, 16
"""Of one prompt, and prompts: half as much again as the host tier holds, which is four times what
the device holds."""


class Requests:
    """What a scheduler does for a prompt, whose KV is the number of each token."""

    def __init__(self, world: CacheWorld) -> None:
        self._world, self._cache = world, world.cache
        pool = world.allocator.get_kvcache()
        self._buffers = [*pool.k_buffer, *pool.v_buffer]
        self.num_cached: Counter[str] = Counter()

    def run(self, name: str, tokens: array[int], priority: int) -> None:
        cache = self._cache
        request = self._world.asks(name, tokens)
        self._world.until(lambda: cache.check_prefetch_progress(request))
        num_stored, _ = cache.pop_prefetch_loaded_span(request)
        match = self._world.match(tokens)
        if match.host_hit_length:
            assert cache.load_back(match.best_match_node)
            cache.ready_to_load_host_cache()
            self._world.until(lambda: not cache.ongoing_load_back)
        cache.finish_storage_prefetch_admission(request, num_stored, reason=None)
        self.num_cached["device"] += match.device_prefix_len
        self.num_cached["host"] += match.host_hit_length - num_stored
        self.num_cached["storage"] += num_stored
        num_cached = match.device_prefix_len + match.host_hit_length
        self._compute(tokens, num_cached, priority)

    def _compute(self, tokens: array[int], num_cached: int, priority: int) -> None:
        """The rest, while the cached part is locked, as it is while a request runs."""
        cache, allocator = self._cache, self._world.allocator
        match = self._world.match(tokens)
        assert match.device_prefix_len == num_cached
        lock = cache.lock(match.last_device_node)
        held = cache.path_device_indices(match.last_device_node)
        # [tokens, heads, head_dim], the same number in all of it
        written = torch.tensor(tokens[:num_cached], dtype=torch.float32).view(-1, 1, 1)
        for buffer in self._buffers:
            assert bool((buffer[held] == written).all())
        missing = len(tokens) - num_cached
        if allocator.available_size() < missing:
            cache.evict(EvictParams(num_tokens=missing - allocator.available_size()))
        slots = allocator.alloc(missing) if missing else held[:0]
        fresh = torch.tensor(tokens[num_cached:], dtype=torch.float32).view(-1, 1, 1)
        for buffer in self._buffers:
            buffer[slots] = fresh.expand(-1, *buffer.shape[1:])
        params = InsertParams(
            key=RadixKey(tokens, None),
            value=torch.cat([held, slots]),
            prev_prefix_len=num_cached,
            priority=priority,
        )
        cache.insert(params)
        cache.unlock(lock)
        self._world.wait_for_copies()


@pytest.mark.parametrize("policy", RADIX_EVICTION_POLICY_CHOICES)
def test_evicted_prefixes_return_from_every_tier(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(number, NUM_PAGES) for number in range(NUM_PROMPTS)]
    source = random.Random(policy)
    config = CONFIGS.get(policy)
    with cache_world(tmp_path / "kv", monkeypatch, policy=policy, policy_config=config) as world:
        requests = Requests(world)
        # All once, then some again, of these every other twice: hits and age come apart.
        again = source.sample(range(NUM_PROMPTS), NUM_AGAIN)
        again = [number for number in again for _ in range(1 + number % 2)]
        for number, chosen in enumerate([*range(NUM_PROMPTS), *again]):
            requests.run(f"r{number}", prompts[chosen], priority=chosen % 3)
        found = requests.num_cached
        assert found["device"] > 0
        assert found["host"] > 0
        assert found["storage"] > 0
        world.check_owners()


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

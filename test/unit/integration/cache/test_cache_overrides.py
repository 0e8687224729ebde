"""What the cache tells the books of host memory, and what its chains cost to bring back."""

from __future__ import annotations

import pytest
from cache_world import PAGE, CacheWorld, hashes_of, prompt
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_tiered.policy.admission import EvictionOutcome as Left

TOKENS = prompt(1, 4)


def left(world: CacheWorld) -> dict[Left, int]:
    accounting = world.cache.storage.accounting
    return {why: num for why, num in accounting.left.items() if num}


def test_loaded_pages_leave_host_memory_clean(world: CacheWorld) -> None:
    world.store(TOKENS)
    request = world.asks("r", TOKENS)
    world.until(lambda: world.cache.load_has_ended(request))
    assert world.cache.storage.accounting.num_dirty == 0
    world.cache.release_aborted_request(request)
    before = left(world)[Left.CLEAN]
    world.cache.evict_host(world.num_host_tokens)
    assert left(world) == {Left.CLEAN: before + 4}


def test_skipped_copy_is_made_when_room_comes(world: CacheWorld) -> None:
    """SGLang skips it silently where host memory is short; and so nothing is stored."""
    host = world.cache.cache_controller.mem_pool_host
    taken = host.alloc(host.available_size())
    world.compute(TOKENS)
    for _ in range(200):
        world.cache.check_hicache_events()
    assert world.num_stored() == 0 and world.cache.tiering.stores.num_skipped == 1
    world.compute(prompt(2, 3))
    world.cache.evict(EvictParams(num_tokens=len(TOKENS)))  # the older one
    assert left(world) == {Left.LOST_HOST_SHORT: 4}
    host.free(taken)
    world.until(lambda: world.num_stored() == 3)
    assert world.cache.tiering.stores.num_recovered == 1


def test_reset_counts_what_was_not_stored(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(world.cache.storage), "takes_stores", False)
    world.compute(TOKENS)
    world.cache.reset()
    assert left(world) == {Left.LOST_FLUSHED: 4}
    assert not world.cache.tiering.stores.queue and not world.cache.tiering.stores._skipped


def test_chain_on_the_disk_costs_a_load(world: CacheWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or is about to have it; else a prefill."""
    world.store(TOKENS)
    monkeypatch.setattr(type(world.cache.storage), "takes_stores", False)
    world.compute(waiting := prompt(2, 2))
    node = world.match(waiting).best_match_node
    tiering, held, size = world.cache.tiering, hashes_of(TOKENS)[-1], 64 * PAGE
    costs, other = tiering.planner.costs, "ab" * 32
    load, prefill = costs.load_seconds((size,)) / size, costs.prefill.seconds(size, 0) / size
    assert load < prefill
    found = [tiering.cost_to_bring_back(*which, size) for which in ((0, other), (0, held))]
    assert found == pytest.approx([prefill, load])
    assert tiering.cost_to_bring_back(node, other, size) == pytest.approx(load)
    world.has_ranks(monkeypatch)
    assert tiering.cost_to_bring_back(node, other, size) == 1.0, "ranks must agree"

"""In a small host tier a load waits for room where it gains by it, and takes none from a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, prompt
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kit.clock import Clock

WHOLE = prompt(1, 20)
"""Of which host memory has no room for two."""


@pytest.fixture
def small(open_world: Callable[..., CacheWorld]) -> CacheWorld:
    """NVMe holds a prompt."""
    world = open_world(is_small=True)
    assert len(WHOLE) <= world.num_host_tokens < 2 * len(WHOLE)
    world.store(WHOLE)
    return world


@pytest.mark.parametrize("why", ["stores end", "time", "a sick disk", "several ranks"])
def test_load_waits_for_room_but_not_for_ever(
    small: CacheWorld, monkeypatch: pytest.MonkeyPatch, hang: threading.Event, why: str
) -> None:
    """It would find no room at once, and compute all of its prompt; but a store may hang."""
    cache, loads = small.cache, small.cache.tiering.loads
    clock = Clock(100.0)
    monkeypatch.setattr(loads.planner.loads, "_clock", clock)
    small.compute(prompt(2, 20))
    small.until(lambda: cache.ongoing_backup)
    if why == "several ranks":
        small.has_ranks(monkeypatch)
        small.asks("r", WHOLE)
        cache.check_hicache_events()
        assert small.asks("r", WHOLE) in cache.ongoing_prefetch, "they do not know of each other"
        return
    request = small.asks("r", WHOLE)
    small.asks("cold", prompt(3, 4))
    for _ in range(5):
        cache.check_hicache_events()
        assert not cache.load_has_ended(request) and request not in cache.ongoing_prefetch
    assert loads.planner.loads.get(request).num_put_off == len(WHOLE)
    assert cache.tiering.stores._load_waits, "no skipped copy takes the room before it"
    if why == "time":
        clock.now += 1e6
    elif why == "a sick disk":
        monkeypatch.setattr(type(cache.storage), "takes_stores", False)
    else:
        hang.set()

    def goes_on() -> bool:
        return bool(cache.load_has_ended(request) or small.is_retried(request))

    if hang.is_set():
        small.until(goes_on)
    assert any(goes_on() or cache.check_hicache_events() for _ in range(20))
    small.asks("r", WHOLE)
    if why == "stores end":
        assert request in cache.ongoing_prefetch
        small.until(lambda: cache.load_has_ended(request))
        assert small.match(WHOLE).host_hit_length == len(WHOLE)
    small.until(lambda: cache.load_has_ended(request))
    loads.drop(request)
    cache.check_hicache_events()
    assert not cache.tiering.stores._load_waits, "nothing is kept of a load that waited"


def test_load_takes_no_device_memory_from_a_batch(small: CacheWorld) -> None:
    """A copy made between two steps locks what a request was admitted to evict, and the scheduler
    ended with "Prefill out of memory"."""
    cache, front = small.cache, WHOLE[: 4 * PAGE]

    def computed(name: str) -> Any:
        small.compute(front)
        small.until(lambda: not cache.ongoing_backup)
        cache.evict_host(small.num_host_tokens)
        assert not cache.tree_core.full_host_duplicates
        return small.asks(name, WHOLE)

    early = computed("early")
    cache.evict(EvictParams(num_tokens=len(front)))  # and is gone by the next step
    cache.check_hicache_events()
    cache.release_aborted_request(early)
    request = computed("returns")
    assert cache.full_evictable_size() == len(front) and not cache.ongoing_write_through
    small.until(lambda: small.is_retried(request))
    small.asks("returns", WHOLE)
    assert request in cache.ongoing_prefetch


@pytest.mark.parametrize("how", ["ends", "is dropped"])
def test_store_that_is_over_locks_no_device_memory(
    small: CacheWorld, monkeypatch: pytest.MonkeyPatch, hang: threading.Event, how: str
) -> None:
    """It keeps there what has no copies up to it; whoever forgets that shrinks the device."""
    cache = small.cache
    monkeypatch.setattr(type(cache.tree_core), "has_copied_path", lambda *_: False)
    small.compute(prompt(2, 4))
    small.until(lambda: cache.ongoing_backup)
    assert cache.tree_core.full_protected_size() == 4 * PAGE
    if how == "ends":
        hang.set()
        small.until(lambda: not cache.ongoing_backup)
    else:
        cache.tiering.detached()
    assert cache.tree_core.full_protected_size() == 0

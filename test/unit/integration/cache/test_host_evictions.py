"""Which host copies stay, over SGLang's own tree and pools."""

from __future__ import annotations

from collections.abc import Callable

from cache_world import PAGE, CacheWorld, prompt
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType


def test_residents_give_way_to_windows(open_world: Callable[..., CacheWorld]) -> None:
    """A load takes host memory for its window too, and without it all of the load is lost."""
    world, num_pages = open_world(has_window=True), 8
    cache = world.cache
    for number in range(2):
        world.compute(prompt(number, num_pages))
    world.until(lambda: world.num_stored() and not cache.ongoing_backup)
    cache.evict(EvictParams(num_tokens=2 * num_pages * PAGE))
    assert cache.tiering.residents.num_tokens > 0
    windows = cache.components[ComponentType.SWA]
    free_tokens = windows._swa_kv_pool_host.available_size()
    assert windows.alloc_prefetch_staging(free_tokens + 2 * PAGE) is not None


def test_growing_conversation_is_one_resident(world: CacheWorld) -> None:
    for num_pages in range(2, 15, 4):
        world.compute(prompt(1, num_pages))
        assert world.cache.tiering.residents.num_tokens == num_pages * PAGE

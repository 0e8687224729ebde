"""The whole cache over a real store: what outlives a storage that is detached and attached."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from small_cache import PAGE, compute, keys_of, make_cache, step, storage_flags

from sglang_tiered.config import ENVIRONMENT_VARIABLE
from sglang_tiered.integration import namespace
from sglang_tiered.integration.tier_events import TierEvents, tiers_of
from sglang_tiered.storage.layered.tiers import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKENS = list(range(100, 100 + 4 * PAGE))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")  # so that it is put back
    monkeypatch.setattr(namespace, "server_identity", None)
    monkeypatch.setattr(namespace, "_files_are_old", False)
    with ExitStack() as held:
        cache = make_cache(str(tmp_path / "kv"), held)
        yield cache
        cache.release_host_resources()


def store(cache: Any, tokens: list[int]) -> None:
    """A prompt is computed, and NVMe holds it."""
    compute(cache, tokens)
    step(cache, lambda: cache.storage.num_kept(keys_of(tokens)) == len(tokens) // PAGE)
    step(cache, lambda: not cache.ongoing_backup)


def attach_again(cache: Any) -> None:
    assert cache.detach_storage_backend()[0]
    assert cache.storage is None
    flags = storage_flags()
    attached, message = cache.attach_storage_backend(
        flags["hicache_storage_backend"], flags["hicache_storage_backend_extra_config"]
    )
    assert attached, message


def load(cache: Any, tokens: list[int]) -> list[bool]:
    hashes = keys_of(tokens)
    host = cache.cache_controller.mem_pool_host.anchor_entry.host_pool
    pages = host.alloc(len(tokens))
    loaded: list[bool] = cache.storage.batch_get_v1(hashes, pages)
    host.free(pages)
    return loaded


def test_storage_attached_again_goes_on_teaching_what_loads_take(cache: Any) -> None:
    store(cache, TOKENS)
    attach_again(cache)
    meter = cache._planner.meters[Tier.NVME]
    cache._planner.wants_probe()  # which learns
    before = meter.num_loads
    assert load(cache, TOKENS) == [True] * 4
    cache._planner.wants_probe()
    assert meter.num_loads > before
    assert cache.storage.stats().num_loads == meter.num_loads


def test_metrics_and_events_are_those_of_the_storage_that_was_attached_again(cache: Any) -> None:
    store(cache, TOKENS)
    read: list[Any] = []
    cache._exporter = SimpleNamespace(export=lambda: None, read_from=read.append)
    params = SimpleNamespace(page_size=PAGE, dynamo_kv_event_format=False, kv_event_lora_names=None)
    cache._tier_events = TierEvents(cache.tree_core, tiers_of(cache.storage), params)
    attach_again(cache)
    assert read == [cache.storage.stats]
    ((_, _, holds),) = cache._tier_events._tiers
    keys = [bytes.fromhex(text) for text in keys_of(TOKENS)]
    assert holds(keys) == [True] * 4, "the storage that was closed is asked"


def test_kv_of_weights_replaced_while_detached_is_not_stored_as_that_of_the_new_ones(
    cache: Any,
) -> None:
    compute(cache, TOKENS)
    step(cache, lambda: not cache.ongoing_write_through and not cache.ongoing_backup)
    assert cache.detach_storage_backend()[0]
    cache.change_weights(tree_was_flushed=False)
    attach_again(cache)
    compute(cache, [*TOKENS, *range(9000, 9000 + PAGE)])
    step(cache, lambda: not cache.ongoing_write_through and not cache.ongoing_backup)
    assert cache.storage.stats().num_pages_stored == 0
    cache.reset()
    cache.token_to_kv_pool_allocator.clear()
    store(cache, TOKENS)

"""SGLang's own fixtures of its radix cache (``sglang.test.kits.unified_radix_cache``), on our cache
over our store.

The wheel brings the fixtures (configurations, trees, pools, requests, steps with checks in them),
but none of the tests that SGLang has on them, so what is done with them here is ours.

Left out of the kit: configurations with windows and Mamba states, which have no host tier anywhere
(``requires_hicache``); ``host_memory_mode="buffer_only"``, a host tier that keeps nothing; and
components of SGLang's tree that its own tests put in the place of real ones.
"""

from __future__ import annotations

import os
import unittest
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures, insert_walk
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig, supports_hicache
from sglang.test.kits.unified_radix_cache.core import UnifiedRadixCacheCoreFixtures
from sglang.test.kits.unified_radix_cache.insert_walk import (
    ResumableInsertWalkSWAFixtures,
    SegmentLockFuzzFixtures,
    SegmentLockProtocolFixtures,
    StreamingSessionLockLifecycleFixtures,
)
from sglang.test.kits.unified_radix_cache.load_back import UnifiedRadixCacheLoadBackFixtures
from sglang.test.kits.unified_radix_cache.storage import (
    UnifiedRadixCacheStorageFixtures,
    aux_storage_key_transfers,
)

from sglang_tiered.config import ENVIRONMENT_VARIABLE, MiB, NvmeConfig, TieredConfig, TierMode
from sglang_tiered.integration.cache import prefill_times as prefill_prior
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.launch.resolve import _storage_arguments
from sglang_tiered.policy.cost_model import PrefillCost

DEADLINE_S = 60.0


class Kit(
    UnifiedRadixCacheStorageFixtures,
    UnifiedRadixCacheLoadBackFixtures,
    UnifiedRadixCacheCoreFixtures,
    ResumableInsertWalkSWAFixtures,
    SegmentLockProtocolFixtures,
    SegmentLockFuzzFixtures,
    StreamingSessionLockLifecycleFixtures,
    unittest.TestCase,
):
    """The steps of the kit. What differs from the kit is what a CPU and our store need."""

    __test__ = False

    def __init__(self, cfg: CacheConfig) -> None:
        super().__init__("run")
        self.cfg = cfg

    def _init_hicache(
        self,
        cache: Any,
        *,
        storage_dir: str | None = None,
        write_policy: str = "write_through",
        **_: Any,
    ) -> None:
        """The host tier as our launcher sets it up: the kit's own copies are kernels for a GPU."""
        flags: dict[str, Any] = {}
        if storage_dir is not None:
            held = get_parallel().override(
                tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_rank=0, attn_dcp_size=1
            )
            held.__enter__()
            self.addCleanup(held.__exit__, None, None, None)
            flags = self._storage_flags(storage_dir)
        arguments = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct",
            hicache_write_policy=write_policy,
            **flags,
        )
        arguments._mamba_cache_chunk_size = max(fixtures.FLA_CHUNK_SIZE, self.cfg.page_size)
        set_global_server_args_for_scheduler(arguments)
        cache.init_hicache(arguments, cache.cache_init_params)
        self.addCleanup(fixtures.drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0
        if storage_dir is not None:
            controller = cache.cache_controller
            controller.prefetch_capacity_limit = max(
                controller.prefetch_capacity_limit, controller.mem_pool_host.size
            )
            self.addCleanup(cache.shutdown)

    def _storage_flags(self, storage_dir: str) -> dict[str, Any]:
        nvme = NvmeConfig(directory=storage_dir, capacity_bytes=512 * MiB, region_bytes=64 * MiB)
        TieredConfig(mode=TierMode.NVME, nvme=nvme, num_ranks=1).to_environment(os.environ)
        return {
            flag.removeprefix("--").replace("-", "_"): value
            for flag, value in _storage_arguments(self.cfg.page_size).items()
        }

    def store(self, cache: Any, tokens: list[int]) -> None:
        """Until the store holds all of a prompt, of every kind of state."""
        leaf = fixtures.match_prefix(cache, tokens).last_device_node
        self._backup_node(cache, leaf)
        self._write_path_to_l3(cache, leaf)
        hashes = self._all_page_hashes(cache, leaf)
        states = aux_storage_key_transfers(cache, leaf)
        self.until(cache, lambda: self._storage_exists_count(cache, hashes, states) == len(hashes))
        self.until(cache, lambda: not cache.ongoing_backup)

    def hashes(self, events: list[Any], medium: str) -> set[int]:
        chosen = [event for event in events if event.medium == medium]
        return {block for event in chosen for block in event.block_hashes}

    def until(self, cache: Any, condition: Callable[[], object]) -> None:
        self._pump_hicache_until(cache, condition, "it never came to be", timeout=DEADLINE_S)

    def prompt(self) -> list[int]:
        """Longer than the sliding window."""
        window_pages = -(-(self.cfg.sliding_window_size or 0) // self.cfg.page_size)
        return list(self._make_seq(1, window_pages + 3))

    def compute(self, fixture: Any, tokens: list[int]) -> list[torch.Tensor]:
        """A prompt gets into the tree; its KV and states, which are like no other's."""
        cache, allocator, pool = fixture
        self._insert(cache, allocator, pool, tokens)
        for buffer, rows in self._rows(fixture, tokens):
            buffer[rows] = torch.randn(buffer[rows].shape).to(buffer.dtype)
        return self.kv(fixture, tokens)

    def kv(self, fixture: Any, tokens: list[int]) -> list[torch.Tensor]:
        return [buffer[rows] for buffer, rows in self._rows(fixture, tokens)]

    def _rows(self, fixture: Any, tokens: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of each layer, what the device must hold for a prompt."""
        cache, allocator, pool = fixture
        leaf = fixtures.match_prefix(cache, tokens).last_device_node
        slots = cache.path_device_indices(leaf)
        full = self._get_full_kv_pool(allocator)
        for buffer in (*full.k_buffer, *full.v_buffer):
            yield buffer, slots
        if self.cfg.has_swa:
            window = allocator.full_to_swa_index_mapping[slots[-self.cfg.sliding_window_size :]]
            swa = allocator.get_kvcache().swa_kv_pool
            for buffer in (*swa.k_buffer, *swa.v_buffer):
                yield buffer, window
        if self.cfg.has_mamba:
            state = fixtures.node_device_value(cache, leaf, ComponentType.MAMBA).reshape(-1)
            states = pool.mamba_pool.mamba_cache
            for buffer in (states.temporal, *states.conv):
                for layer in buffer:
                    yield layer, state

    def loses_the_device(self, fixture: Any, tokens: list[int]) -> None:
        cache = fixture[0]
        cache.evict(
            EvictParams(
                num_tokens=len(tokens),
                swa_num_tokens=len(tokens) if self.cfg.has_swa else 0,
                mamba_num=self.cfg.mamba_cache_size if self.cfg.has_mamba else 0,
            )
        )
        self.assertEqual(fixtures.match_prefix(cache, tokens).device_prefix_len, 0)

    def overwrite_the_device(self, fixture: Any) -> None:
        _, allocator, pool = fixture
        cache = allocator.get_kvcache()
        pools = [self._get_full_kv_pool(allocator)]
        pools += [cache.swa_kv_pool] if self.cfg.has_swa else []
        buffers = [buffer for each in pools for buffer in (*each.k_buffer, *each.v_buffer)]
        if self.cfg.has_mamba:
            states = pool.mamba_pool.mamba_cache
            buffers += [states.temporal, *states.conv]
        for buffer in buffers:
            buffer.zero_()

    def comes_back(self, fixture: Any, tokens: list[int]) -> list[torch.Tensor]:
        """A request comes for a prompt that host memory holds; the KV it gets."""
        cache, _, pool = fixture
        self._load_back_through_admission(cache, pool, tokens)
        self._finish_pending_loads(cache)
        match = fixtures.match_prefix(cache, tokens)
        self.assertEqual(match.device_prefix_len, len(tokens))
        return self.kv(fixture, tokens)


def allocator_of_pages(size: int, *, kvcache: Any, **arguments: Any) -> Any:
    """As servers allocate: the kit's own allocator begins pages at any slot."""
    if kvcache.page_size == 1:
        return TokenToKVPoolAllocator(size, kvcache=kvcache, **arguments)
    return PagedTokenToKVPoolAllocator(size, kvcache.page_size, kvcache=kvcache, **arguments)


@pytest.fixture
def kit(cfg: CacheConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kit]:
    """The kit of a configuration, with our cache."""
    monkeypatch.setattr(fixtures, "UnifiedRadixCache", TieredRadixCache)
    monkeypatch.setattr(fixtures, "TokenToKVPoolAllocator", allocator_of_pages)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    monkeypatch.setattr(namespace, "server_identity", lambda config: {"model": "m"})
    slow = PrefillCost((1.0, 1.0, 0.0))  # so that every load pays
    monkeypatch.setattr(prefill_prior, "probe_prefill", lambda *_, **__: slow)
    kit = Kit(cfg)
    yield kit
    kit.doCleanups()


MAX_SLOTS = 512
"""Of device memory in the configurations of each run; larger ones take seconds and are slow."""


def configurations(where: Callable[[CacheConfig], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "cfg",
        [
            pytest.param(
                cfg, id=cfg.label, marks=[pytest.mark.slow] if cfg.kv_size > MAX_SLOTS else []
            )
            for cfg in CONFIGS
            if where(cfg)
        ],
    )


with_host_tier = configurations(supports_hicache)


def equal(first: Any, second: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@with_host_tier
def test_evicted_kv_returns_from_host_byte_for_byte(kit: Kit) -> None:
    fixture = kit._build_hicache_fixture()
    tokens = kit.prompt()
    computed = kit.compute(fixture, tokens)
    cache = fixture[0]
    kit._backup_node(cache, fixtures.match_prefix(cache, tokens).last_device_node)
    kit.loses_the_device(fixture, tokens)
    kit.overwrite_the_device(fixture)
    assert equal(kit.comes_back(fixture, tokens), computed)
    kit._release_ongoing_load_back_locks(cache)
    cache.sanity_check()


@with_host_tier
def test_stored_kv_survives_a_restart_byte_for_byte(kit: Kit, tmp_path: Path) -> None:
    tokens = kit.prompt()
    first = kit._l3_consumer(str(tmp_path))
    computed = kit.compute(first, tokens)
    kit.store(first[0], tokens)
    kit.doCleanups()  # the first process ends
    second = kit._l3_consumer(str(tmp_path))
    kit._consume_prefetch(second[0], tokens, CacheRequestHandle("returns", 0))
    assert equal(kit.comes_back(second, tokens), computed)
    kit._release_ongoing_load_back_locks(second[0])
    second[0].sanity_check()


@configurations(lambda cfg: supports_hicache(cfg) and cfg.page_size == 16)
def test_a_request_ended_while_loading_frees_host_memory(kit: Kit, tmp_path: Path) -> None:
    tokens = kit.prompt()
    first = kit._l3_consumer(str(tmp_path))
    kit.compute(first, tokens)
    kit.store(first[0], tokens)
    kit.doCleanups()
    cache = kit._l3_consumer(str(tmp_path))[0]
    free = kit._host_avail_sizes(cache)
    request = CacheRequestHandle("leaves", 0)
    cache.prefetch_from_storage(request, cache.root_node_handle(), array("q", tokens), None, None)
    assert request in cache.ongoing_prefetch
    cache.release_aborted_request(request)
    kit.until(cache, lambda: not cache.ongoing_prefetch)
    # What was loaded before the end may stay, for whoever comes next.
    kit.until(cache, lambda: kit._host_avail_sizes(cache) == free or cache.evict_host(len(tokens)))
    kit.until(cache, lambda: kit._host_avail_sizes(cache) == free)
    cache.sanity_check()


@configurations(lambda cfg: supports_hicache(cfg) and cfg.has_swa and cfg.page_size == 1)
def test_random_locks_and_evictions_keep_the_tree_sound(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = []

    def build(cfg: CacheConfig) -> Any:
        fixture = kit._l3_consumer(str(tmp_path))
        cache, check = fixture[0], fixture[0].sanity_check
        cache.write_through_threshold = 1

        def step_and_check() -> None:  # what the kit calls after each operation
            cache.check_hicache_events()
            check()

        monkeypatch.setattr(cache, "sanity_check", step_and_check)
        caches.append(cache)
        return fixture

    monkeypatch.setattr(insert_walk, "build_fixture", build)
    kit._run_seed(1)
    (cache,) = caches
    kit.until(cache, lambda: not cache.ongoing_write_through and not cache.ongoing_backup)
    host = cache.cache_controller.mem_pool_host
    assert host.available_size() < host.logical_size, "nothing was copied"


@configurations(lambda cfg: cfg == CONFIGS[0])
def test_a_sessions_turn_leaves_nothing_locked(kit: Kit, cfg: CacheConfig, tmp_path: Path) -> None:
    cache, allocator, pool = kit._l3_consumer(str(tmp_path))
    slot, request = kit._later_turn(cache, allocator, pool)
    request.finished_reason = FINISH_LENGTH(length=0)
    assert cache.session.try_cache_finished_req(request)
    assert cache.session.slots["s"] is slot
    cache.release_session("s")
    cache.sanity_check()
    assert allocator.available_size() + cache.full_evictable_size() == cfg.kv_size


@configurations(lambda cfg: supports_hicache(cfg) and cfg.page_size == 16 and not cfg.has_swa)
def test_events_add_the_disk_to_those_of_stock(kit: Kit, cfg: CacheConfig, tmp_path: Path) -> None:
    """The one expected difference: a reader that adds up tokens without looking at the medium
    counts those on NVMe once more. Stock tells nobody what its storage holds, and a router cannot
    send a prompt to NVMe that it was not told of."""
    fixture = fixtures.build_fixture(cfg, enable_kv_cache_events=True)
    cache = fixture[0]
    kit._init_hicache(cache, storage_dir=str(tmp_path))
    tokens = kit.prompt()
    kit.compute(fixture, tokens)
    kit.store(cache, tokens)
    kit.loses_the_device(fixture, tokens)
    events = cache.take_events()
    stored = [event for event in events if isinstance(event, BlockStored)]
    told = {
        medium: sum((list(event.token_ids) for event in stored if event.medium == medium), [])
        for medium in {event.medium for event in stored}
    }
    media = ["GPU", "CPU_PINNED", "DISK"]
    assert told == dict.fromkeys(media, tokens)
    hashes = {medium: kit.hashes(stored, medium) for medium in media}
    assert len(hashes["GPU"]) == len(tokens) // cfg.page_size
    assert all(each == hashes["GPU"] for each in hashes.values())
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert kit.hashes(removed, "GPU") and {event.medium for event in removed} == {"GPU"}

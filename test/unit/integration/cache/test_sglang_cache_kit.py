"""SGLang's own fixtures of its radix cache (``sglang.test.kits.unified_radix_cache``), on our cache
over our store, for every kind of model that has a host tier."""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures, insert_walk
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig, supports_hicache
from sglang.test.kits.unified_radix_cache.core import UnifiedRadixCacheCoreFixtures
from sglang.test.kits.unified_radix_cache.insert_walk import SegmentLockFuzzFixtures
from sglang.test.kits.unified_radix_cache.load_back import UnifiedRadixCacheLoadBackFixtures
from sglang.test.kits.unified_radix_cache.storage import (
    UnifiedRadixCacheStorageFixtures,
    aux_storage_key_transfers,
)

from sglang_tiered.config import ENVIRONMENT_VARIABLE, NvmeConfig, TieredConfig, TierMode
from sglang_tiered.flags import MiB
from sglang_tiered.integration.cache import prefill_times as prefill_prior
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.resolve import _storage_arguments
from sglang_tiered.policy.cost_model import PrefillCost

DEADLINE_S = 60.0


class Kit(
    UnifiedRadixCacheStorageFixtures,
    UnifiedRadixCacheLoadBackFixtures,
    UnifiedRadixCacheCoreFixtures,
    SegmentLockFuzzFixtures,
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
        storage_dir: str,
        write_policy: str = "write_through",
        **_: Any,
    ) -> None:
        """The host tier as our launcher sets it up: the kit's own copies are kernels for a GPU."""
        held = get_parallel().override(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_rank=0, attn_dcp_size=1
        )
        held.__enter__()
        self.addCleanup(held.__exit__, None, None, None)
        nvme = NvmeConfig(directory=storage_dir, capacity_bytes=512 * MiB, region_bytes=64 * MiB)
        TieredConfig(mode=TierMode.NVME, nvme=nvme, num_ranks=1).to_environment(os.environ)
        flags: dict[str, Any] = {
            flag.removeprefix("--").replace("-", "_"): value
            for flag, value in _storage_arguments(self.cfg.page_size).items()
        }
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
        controller = cache.cache_controller
        controller.prefetch_capacity_limit = max(
            controller.prefetch_capacity_limit, controller.mem_pool_host.size
        )
        self.addCleanup(cache.shutdown)

    def store(self, cache: Any, tokens: list[int]) -> None:
        """Until the store holds all of a prompt, of every kind of state."""
        leaf = fixtures.match_prefix(cache, tokens).last_device_node
        self._backup_node(cache, leaf)
        self._write_path_to_l3(cache, leaf)
        hashes = self._all_page_hashes(cache, leaf)
        states = aux_storage_key_transfers(cache, leaf)
        self.until(cache, lambda: self._storage_exists_count(cache, hashes, states) == len(hashes))
        self.until(cache, lambda: not cache.ongoing_backup)

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


def equal(first: Any, second: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@configurations(supports_hicache)
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


@configurations(lambda cfg: supports_hicache(cfg) and cfg.has_swa and cfg.page_size == 1)
def test_random_locks_and_evictions_keep_the_tree_sound(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nodes with windows are copied and stored."""
    caches = []

    def build(cfg: CacheConfig) -> Any:
        fixture = kit._l3_consumer(str(tmp_path))
        cache, check = fixture[0], fixture[0].sanity_check
        cache.write_through_threshold = 1
        step_and_check = lambda: (cache.check_hicache_events(), check())  # noqa: E731
        monkeypatch.setattr(cache, "sanity_check", step_and_check)  # called after each operation
        caches.append(cache)
        return fixture

    monkeypatch.setattr(insert_walk, "build_fixture", build)
    kit._run_seed(1)
    (cache,) = caches
    kit.until(cache, lambda: not cache.ongoing_write_through and not cache.ongoing_backup)
    host = cache.cache_controller.mem_pool_host
    assert host.available_size() < host.logical_size, "nothing was copied"

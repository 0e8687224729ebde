"""The real ``TieredRadixCache`` over SGLang's tree, pools and threads and a real store, without a
model or a server; and a disk that gives nothing until it is told to.

What it asks of the cache are SGLang's own hooks, by the names the scheduler calls them by. The
configuration comes from the command line's own parser, so it is that of a server.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_memory, get_parallel

from sglang_tiered.integration.admin.costs import CostBoard, CostPublisher
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.resolve import resolve
from sglang_tiered.storage.region.device import FileDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


PAGE, PAGES_EACH = 16, 2  # tokens of a page, pages of a prompt
HEADS, HEAD_DIM, LAYERS = 1, 16, 1
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 4
DEADLINE_S = 60.0
NUM_LESSONS, LESSON_TOKENS = 16, 2048


class _Gate:
    """Reads of the store wait while it is shut."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()

    def hold_back(self, readv: Callable[..., int]) -> Callable[..., int]:
        def wait_and_read(*given: Any) -> int:
            self.open.wait()
            return readv(*given)

        return wait_and_read


class Waiting:
    """One request in the scheduler's queue: as much of ``Req`` as the calls need."""

    def __init__(self, number: int) -> None:
        self.rid = f"r{number}"
        self.cache_request_handle = CacheRequestHandle(self.rid, 0)
        self.storage_prefetch_retry_attempts = 0
        self.tokens = array("q", range(number * 1000, number * 1000 + PAGES_EACH * PAGE))


class World:
    """A cache, and what the scheduler does with it in a step."""

    def __init__(self, cache: Any, allocator: Any, gate: _Gate, num_at_once: int) -> None:
        self.cache, self._allocator, self._gate = cache, allocator, gate
        self._num_at_once = num_at_once

    def store(self, requests: Sequence[Waiting]) -> None:
        """The KV of every request's prompt gets into the store, and out of memory; as many at a
        time as the device holds."""
        cache = self.cache
        held = int(cache.process_stats()["nvme"].num_pages)
        for start in range(0, len(requests), self._num_at_once):
            chosen = requests[start : start + self._num_at_once]
            for request in chosen:
                slots = self._allocator.alloc(len(request.tokens))
                cache.insert(InsertParams(key=RadixKey(request.tokens, None), value=slots))
            held += len(chosen) * PAGES_EACH
            self._until(partial(self._holds, held))
            self._until(lambda: not cache.ongoing_write_through and not cache.ongoing_backup)
            cache.reset()
            self._allocator.clear()

    def _holds(self, num_pages: int) -> bool:
        return bool(self.cache.process_stats()["nvme"].num_pages >= num_pages)

    def shut_disk(self) -> None:
        self._gate.open.clear()

    def open_disk(self) -> None:
        self._gate.open.set()

    def arrive(self, requests: Sequence[Waiting]) -> None:
        """The requests come, as the scheduler's ``_prefetch_kvcache`` has it."""
        for request in requests:
            self._prefetch(request)

    @property
    def num_loads(self) -> int:
        return len(self.cache.ongoing_prefetch)

    def step(self, waiting: Sequence[Waiting]) -> float:
        """Seconds of this thread's own time in one step in which the queue is looked at whole: the
        cache's events, loads that are asked for again, and whether each load has ended."""
        cache = self.cache
        begun = time.thread_time()
        cache.check_hicache_events()
        retries = cache.storage_prefetch_retries
        if retries is not None:
            memory = get_memory()
            for request, _ in retries.pop_ready(
                waiting,
                memory.hicache_storage_prefetch_retry_poll_interval,
                memory.hicache_storage_prefetch_retry_max_attempts,
            ):
                request.storage_prefetch_retry_attempts += 1
                self._prefetch(request)
        for request in waiting:
            cache.check_prefetch_progress(request.cache_request_handle)
        return time.thread_time() - begun

    def _prefetch(self, request: Waiting) -> None:
        cache, tokens = self.cache, request.tokens
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:], None)))
        start = match.device_prefix_len + match.host_hit_length
        cache.prefetch_from_storage(
            request.cache_request_handle,
            match.last_host_node,
            tokens[start:],
            cache.get_last_hash_value(match.last_host_node),
            matched_prefix_tokens=tokens[:start],
        )

    def _until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() >= deadline:
                held = self.cache.process_stats()["nvme"].num_pages
                raise TimeoutError(
                    f"the store holds {held} pages, which is not all "
                    f"that was computed, and has taken nothing else for {DEADLINE_S:.0f} s"
                )
            self.cache.check_hicache_events()
            time.sleep(0.0005)  # the threads that copy and store need the interpreter too


@contextmanager
def make_world(directory: Path, num_loads: int) -> Iterator[World]:
    """Host memory of which half, but for what copies the device, holds so many loads. What the
    process is told (environment, SGLang's arguments, place among ranks) is set until it ends."""
    prompt_tokens = PAGES_EACH * PAGE
    num_at_once = max(1, num_loads // 4)
    device_tokens = 2 * num_at_once * prompt_tokens
    host_tokens = 2 * num_loads * prompt_tokens + device_tokens + 2 * PAGE
    region_bytes = 4 << 20
    explicit = {
        "tier_dir": str(directory),
        "tier_nvme_bytes": str(64 * region_bytes),
        "tier_nvme_region_bytes": str(region_bytes),
        "page_size": PAGE,
    }
    resolved = resolve(explicit, [], on_cpu=True)
    # Not by its flag, which asks for the memory that a server keeps free besides.
    config = msgspec.structs.replace(resolved.config, host_bytes=host_tokens * TOKEN_BYTES)
    config.to_environment(os.environ)
    load_plugins()  # ours among them: the platform without CUDA, and the hooks
    namespace.server_identity = lambda storage_config: {"model": "none"}
    flags = {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in zip(
            resolved.sglang_arguments, [*resolved.sglang_arguments[1:], ""], strict=True
        )
        if flag.startswith("--hicache-storage")
    }
    gate = _Gate()
    FileDevice.readv = gate.hold_back(FileDevice.readv)  # type: ignore[method-assign]
    server = get_context().override_server_args(
        **flags,
        device="cpu",
        page_size=PAGE,
        enable_hierarchical_cache=True,
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
        hicache_write_policy="write_through",
    )
    ranks = get_parallel().override(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_rank=0, attn_dcp_size=1
    )
    with server as server_args, ranks:
        pool = MHATokenToKVPool(
            device_tokens,
            layer_num=LAYERS,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            device="cpu",
            enable_memory_saver=False,
        )
        allocator = PagedTokenToKVPoolAllocator(
            device_tokens, PAGE, torch.float32, "cpu", pool, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, 1024, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )
        cache: Any = TieredRadixCache(params, config)
        cache.init_hicache(server_args, params)
        for _ in range(NUM_LESSONS):  # prefill is so slow here that every load pays
            cache.tiering.planner.note_batch([(LESSON_TOKENS, 0)], LESSON_TOKENS)
        world = World(cache, allocator, gate, num_at_once)
        with CostBoard.create(1) as board:
            # In every step, where a server does it every 50 ms.
            scheduler = _scheduler_of(cache, allocator)
            costs = CostPublisher(scheduler, cache, board, rank=0, interval_s=0.0)
            cache.tiering.publish_costs = costs.publish_if_due
            try:
                yield world
            finally:
                world.open_disk()
                cache.release_host_resources()


def _scheduler_of(cache: Any, allocator: Any) -> Any:
    """What the record of costs reads of SGLang's scheduler."""

    def kv_token_stats() -> tuple[int, float]:
        held = allocator.size_full - allocator.available_size() - cache.evictable_size()
        return held, held / allocator.size_full

    pool_stats = SimpleNamespace(get_kv_token_stats=kv_token_stats)
    return SimpleNamespace(
        disaggregation_mode=SimpleNamespace(value="null"),
        server_args=SimpleNamespace(device="cpu"),
        pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: pool_stats),
        running_batch=SimpleNamespace(reqs=[]),
        waiting_queue=[],
        chunked_req=None,
        max_running_requests=2048,
        max_total_num_tokens=allocator.size_full,
        decode_moment_totals=[0.0] * 6,
    )

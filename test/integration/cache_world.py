"""The real ``TieredRadixCache`` over SGLang's tree, pools and threads and a real store, without a
model: what a scheduler asks of it, one call at a time."""

from __future__ import annotations

import time
from array import array
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_parallel
from small_cache import make_pool

from sglang_tiered.config import NvmeConfig, TieredConfig, TierMode
from sglang_tiered.flags import MiB
from sglang_tiered.integration.cache import prefill_times as prefill_prior
from sglang_tiered.integration.cache import small_host as small_host_core
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.ranks import SILENT, RankAgreement
from sglang_tiered.integration.resolve import _storage_arguments
from sglang_tiered.policy.cost_model import PrefillCost
from sglang_tiered.remote_config import ObjectConfig
from sglang_tiered.request_log import RequestLogConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest
    from sglang.srt.managers.schedule_batch import Req


PAGE, HEADS, HEAD_DIM = 16, 2, 64
DEVICE_TOKENS = 64 * PAGE
WINDOW_PAGES = 2
DEADLINE_S = 120.0


def prompt(number: int, num_pages: int) -> array[int]:
    """Tokens that no other number's prompt begins with."""
    return array("q", range(number * 10_000, number * 10_000 + num_pages * PAGE))


def hashes_of(
    tokens: array[int],
    extra_key: str | None = None,
    *,
    is_bigram: bool = False,
    page_size: int = PAGE,
) -> list[str]:
    """What the pages of a prompt go by, on every server."""
    key = RadixKey(tokens, extra_key, is_bigram=is_bigram).page_aligned(page_size)
    return list(get_storage_hash_str(key, None, page_size=page_size))


class CacheWorld:
    """A cache, and the calls that SGLang's scheduler makes for its requests."""

    def __init__(
        self,
        server_args: Any,
        config: TieredConfig,
        *,
        has_window: bool,
        is_small: bool,
        page_size: int,
        **of_cache: Any,
    ) -> None:
        self.page_size = page_size
        self.has_window = has_window
        self.allocator: Any
        if has_window:
            pool: Any = SWAKVPool(
                size=DEVICE_TOKENS,
                size_swa=DEVICE_TOKENS,
                swa_attention_layer_ids=[0],
                full_attention_layer_ids=[1],
                page_size=page_size,
                dtype=torch.float32,
                head_num=HEADS,
                head_dim=HEAD_DIM,
                device="cpu",
                enable_memory_saver=False,
            )
            self.allocator = SWATokenToKVPoolAllocator(
                DEVICE_TOKENS, DEVICE_TOKENS, page_size, torch.float32, "cpu", pool, need_sort=False
            )
            of_cache["sliding_window_size"] = WINDOW_PAGES * page_size
        else:
            num_pages = DEVICE_TOKENS // page_size
            self.allocator = make_pool(num_pages, page_size, layers=2, heads=HEADS, dim=HEAD_DIM)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, 1024, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            tree_components=(ComponentType.FULL, *[ComponentType.SWA] * has_window),
            **of_cache,
        )
        if is_small:
            small_host_core.register_core()
            params.tree_core_backend = small_host_core.BACKEND_NAME
        self.cache: Any = TieredRadixCache(params, config)
        self.cache.init_hicache(server_args, params)

    @property
    def num_host_tokens(self) -> int:
        return int(self.cache.cache_controller.mem_pool_host.logical_size)

    def compute(self, tokens: array[int]) -> None:
        """A prompt's KV gets into the tree, and a copy of it on its way to host memory."""
        slots = self.alloc(len(tokens) // self.page_size * self.page_size)
        self.cache.insert(InsertParams(key=RadixKey(tokens, None), value=slots))
        self.wait_for_copies()

    def wait_for_copies(self) -> None:
        self.until(lambda: not self.cache.ongoing_write_through)

    def alloc(self, num_tokens: int) -> torch.Tensor:
        allocator = self.allocator
        if not self.has_window:
            slots: torch.Tensor = allocator.alloc(num_tokens)
            return slots
        slots = allocator.full_attn_allocator.alloc(num_tokens)
        allocator.set_full_to_swa_mapping(slots, allocator.swa_attn_allocator.alloc(num_tokens))
        return slots

    # ---- A request from its admission to its end ----

    def match(self, tokens: array[int], key: str | None = None, req: Req | None = None) -> Any:
        """What memory has of a prompt."""
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:], key), req=req))

    def num_in_memory(self, tokens: array[int]) -> int:
        match = self.match(tokens)
        return int(match.device_prefix_len + match.host_hit_length)

    def admit(self, req: Req, tokens: array[int], key: str | None = None) -> None:
        """Lock what the device has of these tokens, and give it to the request."""
        req.refresh_fill_ids()
        match, pool = self.match(tokens, key, req), self.cache.req_to_token_pool
        req.last_node, req.prefix_len = match.last_device_node, match.device_prefix_len
        req.last_host_node = match.last_host_node
        req.lock = self.cache.lock(req.last_node)
        if not req.kv.holds_kv:  # as a session's next turn does
            pool.alloc([req])
            held = self.cache.path_device_indices(req.last_node)
            pool.write((req.kv.req_pool_idx, slice(0, len(held))), held)
            req.kv.cache_protected_len = req.kv.kv_allocated_len = len(held)

    def take_slots(self, req: Req, start: int, end: int) -> None:
        """Compute these tokens of a request."""
        row = self.cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        for position in range(start, end):
            if position % PAGE == 0 and self.allocator.available_size() < PAGE:
                self.wait_for_copies()
                self.cache.evict(EvictParams(num_tokens=PAGE))
            row[position] = row[position - 1] + 1 if position % PAGE else self.alloc(PAGE)[0]
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end

    def end(self, req: Req, reason: Any = None, *, num_output: int | None = None) -> None:
        req.finished_len = len(req.output_ids) if num_output is None else num_output
        req.finished_reason = reason or FINISH_LENGTH(length=req.finished_len)
        release_kv_cache(req, self.cache, checkpoint=True)

    def check_owners(self) -> None:
        """Every slot of the device has one owner, where no request is left."""
        self.wait_for_copies()
        self.until(lambda: not self.cache.ongoing_backup)
        assert self.cache.protected_size() == 0
        owned = self.cache.all_values_flatten()
        assert len(set(owned.tolist())) == len(owned)
        assert self.allocator.available_size() + len(owned) == self.allocator.size_full
        self.cache.sanity_check()

    # ---- Tiers ----

    def store(self, *prompts: array[int]) -> None:
        """Prompts' KV gets into the store, and out of memory."""
        for tokens in prompts:
            self.compute(tokens)
            # What a busy machine dropped is offered again.
            self.until(partial(self._is_stored, tokens))
            self.until(lambda: not self.cache.ongoing_backup)
        self.cache.reset()
        self.allocator.clear()

    def num_stored(self) -> int:
        """KV pages that NVMe holds."""
        return int(self.cache.process_stats()["nvme"].num_pages)

    def _is_stored(self, tokens: array[int]) -> bool:
        """Whether NVMe holds all of a prompt, its window included."""
        hashes = hashes_of(
            tokens, is_bigram=self.cache.tree_core.is_eagle, page_size=self.page_size
        )
        keys, policy = hashes[-WINDOW_PAGES:], PoolHitPolicy.TRAILING_PAGES
        window = PoolTransfer(PoolName.SWA, keys=keys, hit_policy=policy)
        states = [window] if self.has_window else []
        return bool(self.cache.storage.batch_exists_v2(hashes, states).kv_hit_pages == len(hashes))

    def until(self, condition: Callable[[], object]) -> None:
        """Scheduler steps until it is so."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            self.cache.check_hicache_events()
            time.sleep(0.0005)  # the threads that copy and load need the interpreter too

    def asks(
        self, name: str, tokens: array[int], key: RadixKey | None = None
    ) -> CacheRequestHandle:
        """A request comes (or its load is asked for again), as the scheduler's
        ``_prefetch_kvcache`` has it."""
        request = CacheRequestHandle(name, 0)
        cache = self.cache
        key = RadixKey(tokens[:], None) if key is None else key
        match = cache.match_prefix(MatchPrefixParams(key=key))
        start = match.device_prefix_len + match.host_hit_length
        cache.prefetch_from_storage(
            request,
            match.last_host_node,
            tokens[start:],
            cache.get_last_hash_value(match.last_host_node),
            matched_prefix_tokens=tokens[:start],
            extra_key=key.extra_key,
        )
        return request

    def is_retried(self, request: CacheRequestHandle) -> bool:
        """Whether the scheduler was told to ask for the load again."""
        return request.rid in self.cache.storage_prefetch_retries._pending

    def has_ranks(
        self, monkeypatch: pytest.MonkeyPatch, other: Callable[[Any], int] = lambda question: SILENT
    ) -> None:
        """From now on there is another rank, which answers the ranks' questions so."""
        cache = self.cache

        def reduce(data: torch.Tensor, op: Any) -> None:
            questions = cache.tiering.agreement._questions
            # What is exchanged in each step; a call may tell less.
            if data.dtype == torch.int64 and len(data) > len(questions):
                for place, question in enumerate(reversed(questions)):
                    data[-1 - place] = min(int(data[-1 - place]), other(question))

        monkeypatch.setattr(cache, "_all_reduce_attn_groups", reduce)
        monkeypatch.setattr(cache, "decides_alone", False)
        cache.tiering.loads.agreement = RankAgreement(is_first=True, is_alone=False)


@contextmanager
def cache_world(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_window: bool = False,
    policy: str = "lru",
    policy_config: dict[str, int] | None = None,
    is_small: bool = False,
    is_eagle: bool = False,
    bucket: Path | None = None,
    log: Path | None = None,
    page_size: int = PAGE,
    **server_args: Any,
) -> Iterator[CacheWorld]:
    """A world whose prefill is slow enough that every load pays. ``policy``: what
    ``--radix-eviction-policy`` says, and ``policy_config`` its ``-config``. ``is_small``: the host
    tier is smaller than device memory. ``is_eagle``: pages are of pairs of tokens. ``bucket``:
    where an object tier is, if there is one. ``log``: where lines of requests are written.
    ``server_args``: of SGLang, beside those that all have."""
    config = TieredConfig(
        mode=TierMode.NVME,
        host_bytes=(1 if is_small else 8) * MiB,
        nvme=NvmeConfig(directory=str(directory), capacity_bytes=64 * MiB, region_bytes=8 * MiB),
        num_ranks=1,
        object=None if bucket is None else ObjectConfig(url=bucket.as_uri()),
        request_log=None if log is None else RequestLogConfig(path=str(log)),
    )
    environment: dict[str, str] = {}
    config.to_environment(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(namespace, "server_identity", lambda config: {"model": "m"})
    slow = PrefillCost((1.0, 1.0, 0.0))
    monkeypatch.setattr(prefill_prior, "probe_prefill", lambda *_, **__: slow)
    flags = _storage_arguments(page_size).items()
    override = get_context().override_server_args(
        **{flag.lstrip("-").replace("-", "_"): value for flag, value in flags},
        **server_args,
        device="cpu",
        page_size=page_size,
        enable_hierarchical_cache=True,
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
        hicache_write_policy="write_through",
    )
    ranks = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "attn_dcp_rank")
    sizes = ("tp_size", "pp_size", "attn_dcp_size")
    alone = {**dict.fromkeys(ranks, 0), **dict.fromkeys(sizes, 1), "dp_rank": None}
    with override as settings, get_parallel().override(**alone):
        world = CacheWorld(
            settings,
            config,
            has_window=has_window,
            is_small=is_small,
            page_size=page_size,
            is_eagle=is_eagle,
            eviction_policy=policy,
            eviction_policy_config=policy_config,
        )
        yield world
        world.cache.release_host_resources()

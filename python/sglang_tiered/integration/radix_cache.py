"""``TieredRadixCache``: SGLang's radix cache with the tiers below it.

A subclass of ``UnifiedRadixCache``, so that sessions, hybrid models, speculative decoding and
disaggregation keep working. The tree, the host tier and the device copies are SGLang's; this class
decides which storage loads begin, when a request waits for one, how large the host tier is, and
tells admission what each store belongs to.
Every method runs on the scheduler thread and none waits for a disk.

With several ranks every decision must come out the same on all of them, and what a rank's own
shard holds may differ after a crash. So the local index is asked only by a scheduler that decides
alone; with tensor parallelism the window and the residents work from token counts, which SGLang
keeps equal on all ranks, and with pipeline parallelism SGLang's own path runs unchanged.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    create_unified_radix_cache,
    default_radix_cache_factory,
    register_radix_cache_backend,
    registered_radix_cache_backends,
)
from sglang.srt.mem_cache.unified_cache.component_type import (
    BASE_COMPONENT_TYPE,
    ComponentType,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_memory

from sglang_tiered.config import TieredConfig
from sglang_tiered.integration.metrics_exporter import MetricsExporter
from sglang_tiered.integration.storage_backend import TieredStorage
from sglang_tiered.policy.prefetch import PrefetchWindow
from sglang_tiered.policy.resident import ResidentSet

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import (
        BasePrefixCache,
        CacheInitParams,
        CacheRequestHandle,
        DecLockRefParams,
        InitLoadBackParams,
    )
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo

    from sglang_tiered.integration.store_gate import StoreGate

__all__ = ["BACKEND_NAME", "TieredRadixCache", "register"]

BACKEND_NAME = "tiered"

# Shares of what the host tier holds beyond device memory (a prefix on the device keeps its host
# copy). What both leave, a sixth, is the least that running requests find for what they write.
LOADING_SHARE = 1 / 2
RESIDENT_SHARE = 1 / 3

logger = logging.getLogger(__name__)


def register() -> None:
    """Make ``--radix-cache-backend tiered`` known to this process. Idempotent."""
    if BACKEND_NAME not in registered_radix_cache_backends():
        register_radix_cache_backend(BACKEND_NAME, build)


def build(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """SGLang's factory call. Cases that have no host tier of the usual kind stay SGLang's."""
    memory = get_memory()
    is_pure_swa = ctx.is_hybrid_swa and ctx.full_tokens_per_layer == 0
    if (
        ctx.disable_radix_cache
        or is_pure_swa
        or memory.enable_lmcache
        or memory.enable_flexkv
        or memory.enable_unified_cache_external_linker
        or not ctx.enable_hierarchical_cache
    ):
        return default_radix_cache_factory(ctx)
    return create_unified_radix_cache(ctx, cache_class=TieredRadixCache)


class TieredRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """See the module docstring. Owned by the scheduler, used on its thread only."""

    # Set here because the parent's constructor calls ``reset`` before ours could run.
    _window: PrefetchWindow[CacheRequestHandle] | None = None
    # Chains by the hash of their last page, which a node keeps when the tree splits it.
    _residents: ResidentSet[str] | None = None
    _pins: dict[str, tuple[int, DecLockRefParams]]
    _exporter: MetricsExporter | None = None

    def init_hicache(self, server_args: Any, params: CacheInitParams) -> None:
        config = TieredConfig.from_environment()
        if config is not None and config.host_bytes_per_rank is not None:
            self._size_host_tier(config.host_bytes_per_rank)
        super().init_hicache(server_args, params)
        if self.pp_size == 1 and self.storage is not None:
            host_tokens = self.cache_controller.mem_pool_host.logical_size
            device_tokens = self.token_to_kv_pool_allocator.size_full
            own_tokens = max(host_tokens - device_tokens, host_tokens // 4)
            self._window = PrefetchWindow(int(own_tokens * LOADING_SHARE))
            self._residents = ResidentSet(int(own_tokens * RESIDENT_SHARE))
            self._pins = {}
        if self._enable_metrics_flag and self.storage is not None:
            self._exporter = MetricsExporter(self.storage.stats)

    def _size_host_tier(self, host_bytes: int) -> None:
        """Give SGLang the size in bytes: its flag counts whole gigabytes."""
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        sizes = pool.get_kv_size_bytes()
        device_bytes = sum(sizes) if isinstance(sizes, tuple) else sizes
        # SGLang adds one page of padding to every host pool; the cap includes it.
        page_bytes = device_bytes * self.page_size // max(1, pool.size)
        size = max(page_bytes, host_bytes - page_bytes)
        get_context().override("sglang_tiered.host_bytes", hicache_size=size / 1e9)

    @property
    def storage(self) -> TieredStorage | None:
        """The attached NVMe tier; None in host mode, or while an operator has detached it."""
        backend = getattr(self.cache_controller, "storage_backend", None)
        return backend if isinstance(backend, TieredStorage) else None

    def _decides_alone(self) -> bool:
        """Whether no other rank must come to the same decisions."""
        return bool(self.tp_world_size == 1 and self.pp_size == 1)

    # ---- Loads from storage: which begin, and when a request waits ----

    def prefetch_from_storage(
        self,
        request: CacheRequestHandle,
        last_host_node_id: int,
        new_input_tokens: list[int],
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        matched_prefix_tokens: list[int] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> bool | None:
        """Begin a load of what the NVMe tier holds of the request, now or in its turn.

        A cold request of a scheduler that decides alone returns at once and is admitted in the
        same pass: the index is in memory, so there is no query to wait for. A load that would
        overfill the window is put off until ``check_prefetch_progress`` reaches the request again;
        SGLang drops it at that point, and with it the prefix, whenever more requests return
        together than half the host tier holds.
        """
        tokens = new_input_tokens
        if self._window is not None and self.storage is not None:
            self._window.withdraw(request)
            num_held = len(tokens) // self.page_size * self.page_size
            if self._decides_alone():
                num_held = self._num_held_tokens(tokens, last_hash, extra_key, cache_salt)
            if num_held < self.prefetch_threshold:
                return None
            if not self._window.has_room(num_held, self._num_loading_tokens()):
                self._window.put_off(request)
                return None
            tokens = tokens[: num_held + int(self.tree_core.is_eagle)]
        result: bool | None = super().prefetch_from_storage(
            request,
            last_host_node_id,
            tokens,
            last_hash,
            prefix_keys,
            matched_prefix_tokens,
            extra_key=extra_key,
            cache_salt=cache_salt,
            storage_hit_end=storage_hit_end,
        )
        return result

    def _num_held_tokens(
        self,
        tokens: list[int],
        last_hash: str | None,
        extra_key: str | None,
        cache_salt: str | None,
    ) -> int:
        """Leading tokens whose pages the NVMe tier could load now. Memory only."""
        key = RadixKey(
            tokens,
            extra_key=extra_key,
            is_bigram=self.tree_core.is_eagle,
            cache_salt=cache_salt,
        ).page_aligned(self.page_size)
        if len(key) == 0 or self.storage is None:
            return 0
        hashes = get_storage_hash_str(key, last_hash, page_size=self.page_size)
        return self.storage.lookup_leading(hashes) * int(self.page_size)

    def _num_loading_tokens(self) -> int:
        """Host tokens taken by loads in flight and by loads no request has consumed yet."""
        loading: int = self.cache_controller.prefetch_tokens_occupied
        unconsumed: int = sum(self.prefetch_loaded_tokens_by_reqid.values())
        return loading + unconsumed

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Whether the request may be admitted now: nothing it waits for is still loading."""
        if self._window is not None and self._window.is_put_off(request):
            if self.storage is None or (self._decides_alone() and not self.storage.serves_loads):
                self._window.withdraw(request)
                return True
            if not self._window.ask(request):
                return True
            # The scheduler repeats the load's request with a fresh match in its next pass.
            self.storage_prefetch_retries.refetch(request.rid)
            return False
        ready: bool = super().check_prefetch_progress(request)
        return ready

    def _prefetch_deadline_expired(self, operation: Any) -> bool:
        """Give up waiting early when the tier stopped serving; SGLang reduces this over ranks."""
        expired: bool = super()._prefetch_deadline_expired(operation)
        return expired or (self.storage is not None and not self.storage.serves_loads)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        if self._window is not None:
            self._window.withdraw(request)
        super().release_aborted_request(request)

    # ---- Stores: what admission must know of them ----

    def write_backup_storage(self, node_id: int) -> None:
        """Queue the store of a node's pages, and say how long the chain is that they end.

        Ancestors that were dropped while the chain was short are queued again once it is long:
        without them the tier could not serve it. That depends on what the local shard holds, so a
        scheduler does it only if it decides alone.
        """
        if self.storage is None or not self.tree_core.is_backuped(node_id):
            super().write_backup_storage(node_id)
            return
        gate = self.storage.gate
        path = self.tree_core.collect_path_info([node_id])[0]
        chain_tokens = path[-1].path_end
        if self._decides_alone() and gate.wants_ancestors(chain_tokens):
            for node in path[:-1]:
                hashes = self.tree_core.get_hash_values(node.node_id)
                if gate.offer_again(hashes, prefix_tokens=chain_tokens):
                    self._queue_store(gate, node, hashes, chain_tokens)
        hashes = self.tree_core.get_hash_values(node_id)
        self._queue_store(gate, path[-1], hashes, chain_tokens)

    def _queue_store(
        self, gate: StoreGate, node: TreePathNodeInfo, hashes: list[str], chain_tokens: int
    ) -> None:
        num_tokens = node.path_end - node.path_start
        gate.announce(hashes, num_tokens=num_tokens, prefix_tokens=chain_tokens)
        super().write_backup_storage(node.node_id)

    # ---- Host tier: which copies stay ----

    def _finish_write_through_ack(self, ack_id: int) -> None:
        pending = self.ongoing_write_through.get(ack_id)
        super()._finish_write_through_ack(ack_id)
        for node_id in pending.publish_node_ids if pending is not None else ():
            self._offer_resident(node_id)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, int] | None:
        result: tuple[int, int] | None = super().init_load_back(params)
        if self._residents is not None:
            for node in self.tree_core.collect_path_info([params.best_match_node])[0]:
                # A longer prompt uses the resident that its prefix is.
                if self.tree_core.get_last_hash_value(node.node_id) in self._residents:
                    self._offer_resident(node.node_id)
            self._offer_resident(params.best_match_node)
        return result

    def evict_host(
        self, num_tokens: int, component_type: ComponentType = BASE_COMPONENT_TYPE
    ) -> int:
        """Free host tokens; residents go only when nothing else is left to evict."""
        freed: int = super().evict_host(num_tokens, component_type)
        if self._residents is None or component_type is not BASE_COMPONENT_TYPE:
            return freed
        self._residents.evicted(freed)
        while freed < num_tokens and (dismissed := self._residents.give_up()) is not None:
            self._unpin(dismissed)
            freed += super().evict_host(num_tokens - freed, component_type)
        return freed

    def _offer_resident(self, node_id: int) -> None:
        """Pin the chain that ends in a node, if it is to stay: a pinned node keeps its ancestors,
        for only leaves are evicted."""
        if self._residents is None or not self.tree_core.is_backuped(node_id):
            return
        chain = self.tree_core.get_last_hash_value(node_id)
        path = self.tree_core.collect_path_info([node_id])[0]
        if chain is None or not path:
            return
        offer = self._residents.offer(chain, path[-1].path_end)
        for dismissed in offer.dismissed:
            self._unpin(dismissed)
        if offer.accepted:
            self._pins[chain] = (node_id, self.inc_host_lock_ref(node_id).to_dec_params())

    def _unpin(self, chain: str) -> None:
        node_id, lock = self._pins.pop(chain)
        self.dec_host_lock_ref(node_id, lock)

    # ---- Life cycle ----

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        if self._exporter is not None:
            self._exporter.export()

    def reset(self) -> None:
        super().reset()
        if self._window is not None:
            self._window.clear()
        if self._residents is not None:
            self._residents.clear()
            self._pins.clear()
        if self.storage is not None:
            self.storage.tree_was_reset()

    def change_weights(self, *, tree_was_flushed: bool) -> None:
        """The model's weights were replaced: nothing stored so far may be read again."""
        if self.storage is not None:
            self.storage.change_weights(tree_was_flushed=tree_was_flushed)

    def release_host_resources(self) -> None:
        # The engine reads and writes the host pools' memory, so it goes first.
        self.shutdown()
        super().release_host_resources()

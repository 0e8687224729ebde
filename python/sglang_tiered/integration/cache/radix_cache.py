"""``TieredRadixCache``: SGLang's radix cache with the tiers below it.

A subclass of ``UnifiedRadixCache``: SGLang offers sessions, hybrid models, speculative decoding and
disaggregation to no other class. The tree, the host tier and the device copies are SGLang's; this
class decides which storage loads begin, when a request waits for one, how large the host tier is,
and tells admission what each store belongs to.
Every method runs on the scheduler thread and none waits for a disk.

With several ranks every decision must come out the same on all of them, and what a rank's own
shard holds may differ after a crash. So the local index is asked only by a scheduler that decides
alone; with tensor parallelism the window and the residents work from token counts, which SGLang
keeps equal on all ranks, and with pipeline parallelism SGLang's own path runs unchanged.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from functools import cached_property
from typing import TYPE_CHECKING, Any

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
from sglang.srt.runtime_context import get_context, get_disagg, get_memory, get_parallel

from sglang_tiered.config import TieredConfig
from sglang_tiered.integration.cache import small_host_core
from sglang_tiered.integration.cache.host_size import (
    SMALL_RATIO,
    check_asked_size,
    is_small,
    least_of_ranks,
    target_host_bytes,
)
from sglang_tiered.integration.cache.purge_exchange import PurgeExchange
from sglang_tiered.integration.cache.rank_consensus import least_on_every_rank
from sglang_tiered.integration.cache.recent_requests import RecentRequests, Selector
from sglang_tiered.integration.cache.spilling_cache import SpillingRadixCache
from sglang_tiered.integration.cache.streaming_sessions import PublishingSession
from sglang_tiered.integration.cache.warm_restart import WarmHost, remove_list
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.identity.tenants import SECRET_BITS
from sglang_tiered.integration.names import CACHE_BACKEND
from sglang_tiered.integration.observe.exporter import MetricsExporter
from sglang_tiered.integration.observe.kv_events import TierEvents, tiers_of
from sglang_tiered.integration.observe.stats import TierStats, tier_stats
from sglang_tiered.policy.residents import ResidentSet

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from sglang.srt.mem_cache.base_prefix_cache import (
        BasePrefixCache,
        CacheInitParams,
        DecLockRefParams,
        InitLoadBackParams,
    )

    from sglang_tiered.integration.storage.backend import TieredStorage

__all__ = ["TieredRadixCache", "register"]

# Shares of what the host tier holds beyond device memory (a prefix on the device keeps its host
# copy). What both leave, a sixth, is the least that running requests find for what they write.
LOADING_SHARE = 1 / 2
RESIDENT_SHARE = 1 / 3

WARM_SHARE = 1 / 2
"""Of it, what is loaded after a restart before anybody asks."""

# What SGLang sets with a storage that is attached, beside the controller's policy.
_POLICIES = ("prefetch_stop_policy", "write_through_threshold", "is_write_back")

_NO_RANK = 1 << 40
"""In place of the rank that could not attach a storage."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Make ``--radix-cache-backend tiered`` known to this process. Idempotent."""
    if CACHE_BACKEND not in registered_radix_cache_backends():
        register_radix_cache_backend(CACHE_BACKEND, build)


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
    config, params = TieredConfig.from_environment(), ctx.params
    is_ours = config is not None and config.nvme is not None and params.pp_size == 1
    if is_ours and memory.hicache_write_policy == "write_through" and is_small(params):
        least = f"{SMALL_RATIO * 100:.0f}% of device memory"
        if ctx.is_hybrid_swa or ctx.is_hybrid_ssm:
            logger.warning(
                "The host tier is smaller than %s, so what it has no room for never reaches NVMe; "
                "raise --tier-host-bytes.",
                least,
            )
        else:
            small_host_core.register()
            params.tree_core_backend = small_host_core.BACKEND_NAME
            logger.info(
                "The host tier is smaller than %s: copies of what the device holds give way once "
                "NVMe has them, and what the device gives up comes back from NVMe.",
                least,
            )
    return create_unified_radix_cache(ctx, cache_class=TieredRadixCache)


class TieredRadixCache(SpillingRadixCache):
    """See the module docstring. Owned by the scheduler, used on its thread only."""

    # Set here because the parent's constructor calls ``reset`` before ours could run.
    # Chains by the hash of their last page, which a node keeps when the tree splits it.
    _residents: ResidentSet[str] | None = None
    _pins: dict[str, tuple[int, DecLockRefParams]]
    _warm_host: WarmHost | None = None
    _exporter: MetricsExporter | None = None
    _tier_events: TierEvents | None = None
    _purge_exchange: PurgeExchange | None = None
    _holds_old_kv = False  # of weights that were replaced, whether or not a tier was attached
    purge_as_told: Callable[[bytes | None], object] | None = None  # once there is a scheduler

    @cached_property
    def recent_requests(self) -> RecentRequests:
        """For those who ask for a conversation by the id of its last request."""
        return RecentRequests()

    def init_hicache(self, server_args: Any, params: CacheInitParams) -> None:
        config = TieredConfig.from_environment()
        if config is not None and config.host_bytes_per_rank is not None:
            self._size_host_tier(config.host_bytes_per_rank, params)
        check_asked_size(
            self.token_to_kv_pool_allocator.get_kvcache(), params.sidecar_draft_device_pools
        )
        super().init_hicache(server_args, params)
        self.session = PublishingSession(self)
        if get_disagg().disaggregation_mode == "decode":
            # SGLang copies no fewer than 10 tokens back, but promises prefill fewer too.
            self.load_back_threshold = 1
        self.fence.use_secret(least_on_every_rank(self, [secrets.randbits(SECRET_BITS)])[0])
        if self.pp_size == 1 and self.storage is not None:
            own_tokens = self.own_host_tokens()
            self.begin_loading(int(own_tokens * LOADING_SHARE))
            if not self.has_small_host:  # whose copies must be free to go
                self._residents = ResidentSet(int(own_tokens * RESIDENT_SHARE))
            self._pins = {}
            if config is not None and config.nvme is not None and config.nvme.warm_host:
                self._warm_host = WarmHost(self, self.storage.notes, int(own_tokens * WARM_SHARE))
        if self.storage is not None and self._warm_host is None:
            remove_list(self.storage.notes)
        if self._enable_metrics_flag and self.storage is not None:
            self._exporter = MetricsExporter(self.tier_stats)
        if self.storage is not None:
            self._tier_events = TierEvents.of_cache(self.tree_core, self.storage, params)

    def attach_storage_backend(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Every rank gets the storage or none: what ranks exchange in a step is longer with it.

        SGLang keeps a storage that fails when the host pools are registered, which is when the
        tiers are opened, and its threads. Before that its attach waits for every rank of the
        server where several hold parts of the same pages, so all of them are asked there; only
        there, as a DP rank that serves requests refuses before it comes here."""
        is_enabled = int(self.enable_storage)
        least, most = least_on_every_rank(self, [is_enabled, -is_enabled])
        if least != -most:
            return False, "Some ranks have a storage backend and some have none; detach it first."
        if self.enable_storage:  # SGLang does no more than change policies
            changed: tuple[bool, str] = super().attach_storage_backend(*args, **kwargs)
            return changed
        if self.pp_size > 1:  # SGLang's first stage would wait for stages it has not told
            return False, "With pipeline parallelism storage is attached at the start only."
        controller = self.cache_controller
        policies = {name: getattr(self, name) for name in _POLICIES}
        write_policy = controller.write_policy
        try:
            attached, answer = super().attach_storage_backend(*args, **kwargs)
        except Exception as error:  # the other ranks wait for what this one says
            logger.exception("The storage backend could not be attached.")
            attached, answer = False, f"Failed to attach storage backend: {error}"
        refusing = _NO_RANK if attached else get_parallel().tp_rank
        has_waited = bool(controller.prefetch_hits_sync_groups)  # which it waited for
        refusing, none_waited = least_on_every_rank(self, [refusing, int(not has_waited)])
        if not none_waited:
            refusing = least_of_ranks(refusing)
        if refusing == _NO_RANK:
            if self.storage is not None:
                self._use_storage(self.storage)
            return True, answer
        detached, why = self.detach_storage_backend()
        if not detached:
            logger.error("What was attached of the storage backend stays: %s", why)
        for name, value in policies.items():
            setattr(self, name, value)
        controller.write_policy = write_policy
        if attached:
            answer = f"Failed to attach storage backend on rank {refusing}, whose log says why."
        return False, answer

    def _use_storage(self, storage: TieredStorage) -> None:
        """An operator attached the tiers again: what knew the storage before knows this one."""
        if self._planner is not None:
            storage.use_planner(self._planner)
        if self._exporter is not None:
            self._exporter.read_from(self.tier_stats)
        if self._tier_events is not None:
            self._tier_events.use_tiers(tiers_of(storage))
        if self._holds_old_kv:
            storage.change_weights(tree_is_empty=False)

    def _size_host_tier(self, host_bytes: int, params: CacheInitParams) -> None:
        """Give SGLang the size in bytes: its flag counts whole gigabytes."""
        size = target_host_bytes(
            host_bytes,
            self.token_to_kv_pool_allocator.get_kvcache(),
            params.sidecar_draft_device_pools,
            page_size=self.page_size,
        )
        get_context().override("sglang_tiered.host_bytes", hicache_size=size / 1e9)

    def prefetch_from_storage(self, *args: Any, **kwargs: Any) -> bool | None:
        if self._warm_host is not None:
            self._warm_host.named(kwargs.get("extra_key"), kwargs.get("cache_salt"))
        return super().prefetch_from_storage(*args, **kwargs)

    # ---- Host tier: which copies stay ----

    def _finish_write_through_ack(self, ack_id: int) -> None:
        pending = self.ongoing_write_through.get(ack_id)
        super()._finish_write_through_ack(ack_id)
        for node_id in pending.publish_node_ids if pending is not None else ():
            self._offer_resident(node_id)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, int] | None:
        result: tuple[int, int] | None = super().init_load_back(params)
        if self._tier_events is not None:
            self._tier_events.note(params.best_match_node)
        if self._warm_host is None and self._residents is None:
            return result
        path = self.tree_core.collect_path_info([params.best_match_node])[0]
        # Between a purge and the next reset, keys carry marks that mean nothing later.
        if self._warm_host is not None and params.req is not None and path and not self.fence:
            hashes = [self.tree_core.get_last_hash_value(node.node_id) for node in path]
            self._warm_host.used(params.req, hashes[-1], path[-1].path_end, hashes[:-1])
        if self._residents is not None:
            for node in path:
                # A longer prompt uses the resident that its prefix is.
                if self.tree_core.get_last_hash_value(node.node_id) in self._residents:
                    self._offer_resident(node.node_id)
            self._offer_resident(params.best_match_node)
        return result

    def evict_host(
        self, num_tokens: int, component_type: ComponentType = BASE_COMPONENT_TYPE
    ) -> int:
        """Free host tokens, or slots of another component's states, which residents pin too;
        residents go only when nothing else is left to evict, and what NVMe does not hold yet only
        after them. What was loaded for requests that wait stays, since the window bounds it; but of
        other components' states it may take all, so of these what came last goes too."""
        freed: int = super().evict_host(num_tokens, component_type)
        is_base = component_type is BASE_COMPONENT_TYPE
        if self._residents is not None and is_base:
            self._residents.evicted(freed)
        while freed < num_tokens and (
            self._dismiss_resident()
            or self.release_dirty_pin()
            or (not is_base and self.unlock_last_loaded())
        ):
            freed += super().evict_host(num_tokens - freed, component_type)
        return freed

    def _dismiss_resident(self) -> bool:
        dismissed = None if self._residents is None else self._residents.give_up()
        if dismissed is None:
            return False
        self._unpin(dismissed)
        return True

    def _offer_resident(self, node_id: int) -> None:
        """Pin the chain that ends in a node, if it is to stay: a pinned node keeps its ancestors,
        for only leaves are evicted."""
        if self._residents is None or not self.tree_core.is_backuped(node_id):
            return
        chain = self.tree_core.get_last_hash_value(node_id)
        path = self.tree_core.collect_path_info([node_id])[0]
        if chain is None or not path:
            return
        cost = self.cost_to_bring_back(node_id, chain, path[-1].path_end)
        offer = self._residents.offer(chain, path[-1].path_end, cost)
        for dismissed in offer.dismissed:
            self._unpin(dismissed)
        if offer.accepted:
            self._pins[chain] = (node_id, self.inc_host_lock_ref(node_id).to_dec_params())

    def store_ended(self, chain: str, num_tokens: int, *, is_held: bool) -> None:
        if self._residents is not None:
            self._residents.price(chain, self._cost(num_tokens, is_held=is_held))

    def _unpin(self, chain: str) -> None:
        node_id, lock = self._pins.pop(chain)
        self.dec_host_lock_ref(node_id, lock)

    # ---- KV events ----

    def _drain_storage_control_queues_impl(self, *args: Any, **kwargs: Any) -> Any:
        before = dict(self.ongoing_backup) if self._tier_events is not None else {}
        result = super()._drain_storage_control_queues_impl(*args, **kwargs)
        if self._tier_events is not None:
            for operation, (node_id, _) in before.items():
                if operation not in self.ongoing_backup:
                    self._tier_events.note(node_id)
        return result

    def take_events(self) -> list[Any]:
        events: list[Any] = super().take_events()
        return events if self._tier_events is None else events + self._tier_events.take()

    # ---- What requests left in the tree ----

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        self.note_request(req, up_to)

    def note_request(self, req: Any, up_to: int) -> None:
        """The tree has a request's first tokens, whose fill ids are up to date."""
        if self.storage is not None:
            tokens = array("q", req.full_untruncated_fill_ids[:up_to])
            selector = Selector(tokens, req.extra_key, req.cache_salt)
            self.recent_requests.note(str(req.rid), selector)

    # ---- Life cycle ----

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        if self.storage is not None:
            self.storage.settle_namespace()
        if self._warm_host is not None and (self.storage is None or self.storage.knows_namespace):
            self._warm_host.tick()
        self._apply_remote_purges()
        if self._exporter is not None:
            self._exporter.export()

    def _apply_remote_purges(self) -> None:
        """Put out of reach what other servers purged: with several ranks, on all in one step."""
        purges = None if self.storage is None else self.storage.remote_purges
        if purges is None or self.agreement is None or self.purge_as_told is None:
            return
        exchange = self._purge_exchange
        if exchange is None or exchange.purges is not purges:
            exchange = self._purge_exchange = PurgeExchange(purges, self.agreement)
        for tenant in exchange.next():
            self.purge_as_told(tenant)
            exchange.applied(tenant)

    def reset(self) -> None:
        super().reset()
        self._holds_old_kv = False
        if self._residents is not None:
            self._residents.clear()
            self._pins.clear()
        if self._warm_host is not None:
            self._warm_host.tree_was_reset()
        if self._tier_events is not None:
            self._tier_events.tree_was_reset()
        if self.storage is not None:
            self.storage.tree_was_reset()

    @property
    def is_empty(self) -> bool:
        """Whether neither the tree, nor a session, nor host memory holds any KV. Walks the tree."""
        host = self.cache_controller.mem_pool_host
        return bool(
            self.total_size() == (0, 0)
            and not self.session.slots
            and host.available_size() == host.logical_size
        )

    def change_weights(self, *, tree_is_empty: bool) -> None:
        """The model's weights were replaced: nothing stored so far may be read again.

        ``tree_is_empty``: no KV of the weights before is left, of running requests neither."""
        namespace.forget_files()
        self._holds_old_kv = not tree_is_empty
        if self.storage is not None:
            self.storage.change_weights(tree_is_empty=tree_is_empty)

    def tier_stats(self) -> TierStats:
        """A snapshot, for a cache that has a storage."""
        assert self.storage is not None
        return tier_stats(self.storage, None if self._planner is None else self._planner.stats())

    def purge_warm_list(self, tenant: bytes | None) -> Future[bool] | None:
        """A tenant was purged, or all were: its prompts are forgotten too."""
        return None if self._warm_host is None else self._warm_host.purge(tenant)

    def release_host_resources(self) -> None:
        if self._warm_host is not None:
            self._warm_host.close()
        if self._tier_events is not None:
            self._tier_events.close()
        # The engine reads and writes the host pools' memory, so it goes first.
        self.shutdown()
        super().release_host_resources()

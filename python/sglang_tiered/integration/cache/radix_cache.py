"""``TieredRadixCache``: SGLang's radix cache with the tiers below it.

A subclass of ``UnifiedRadixCache``: SGLang offers sessions, hybrid models, speculative decoding and
disaggregation to no other class. The tree, the host tier and the device copies are SGLang's. Each
override is SGLang's part and one act of ``Tiering``, which decides, of metrics and events, or of
the books of the storage. Every method runs on the scheduler thread and none waits for a disk.

With several ranks every decision must come out the same on all of them, and what a rank's own shard
holds may differ after a crash. So the local index is asked only by a scheduler that decides alone.
With tensor parallelism the window and the residents work from token counts, which SGLang keeps
equal on all ranks. With pipeline parallelism SGLang decides alone: there is no ``Tiering`` then,
nor in host mode.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.component_type import (
    BASE_COMPONENT_TYPE,
    ComponentType,
)
from sglang.srt.runtime_context import get_disagg, get_parallel
from sglang.srt.session.streaming_session import is_virtual_node

from sglang_tiered.integration.cache import small_host
from sglang_tiered.integration.cache.hiding_cache import HidingCache, use_unmarked_core
from sglang_tiered.integration.cache.hints import WEIGHTS
from sglang_tiered.integration.cache.host_size import (
    check_asked_size,
    least_of_ranks,
    use_host_bytes,
)
from sglang_tiered.integration.cache.loads import PrefetchArguments
from sglang_tiered.integration.cache.publishing import PublishingSession
from sglang_tiered.integration.cache.quiescing import (
    LoadsUnderWay,
    is_under_way,
    next_items,
    wait_until_quiet,
)
from sglang_tiered.integration.cache.tiering import Tiering
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.identity.recent_requests import PrefixSelector, RecentRequests
from sglang_tiered.integration.identity.request_names import conversation_of
from sglang_tiered.integration.identity.tenants import SECRET_BITS
from sglang_tiered.integration.observe.kv_events import TierEvents, tiers_of
from sglang_tiered.integration.observe.stats import MetricsExporter, holdings, process_stats
from sglang_tiered.integration.ranks import groups_of, least_on_every_rank
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.integration.storage.controller import NextLoad, NextStore, use_tiered_controller

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import torch
    from sglang.srt.mem_cache.base_prefix_cache import (
        CacheInitParams,
        CacheRequestHandle,
        InitLoadBackParams,
    )
    from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.observe.stats import Stats
    from sglang_tiered.storage.base import Erasure


# What SGLang sets with a storage that is attached, beside the controller's policy.
_POLICIES = ("prefetch_stop_policy", "write_through_threshold", "is_write_back")

_NO_RANK = 1 << 40
"""In place of the rank that could not attach a storage."""

logger = logging.getLogger(__name__)


class TieredRadixCache(HidingCache):
    """See the module docstring. Owned by the scheduler, used on its thread only."""

    config: TieredConfig | None = None
    tiering: Tiering | None = None
    _events: TierEvents | None = None
    _exporter: MetricsExporter | None = None
    _is_quiescing = False
    _holds_old_kv = False  # of weights that were replaced, whether or not a tier was attached
    hide_heard: Callable[[Sequence[Erasure]], object] | None = None  # once there is a scheduler

    def __init__(self, params: CacheInitParams, config: TieredConfig | None = None) -> None:
        """``config``: of our launcher; None where another started this process."""
        self.config = config
        self.recent_requests = RecentRequests()  # for queries by a request's id
        self._loads_under_way = LoadsUnderWay()
        use_unmarked_core(params)
        super().__init__(params)  # which calls ``reset``
        # Whether no other rank must come to the same decisions.
        self.decides_alone = self.pp_size == 1 and not groups_of(self)

    def init_hicache(self, server_args: Any, params: CacheInitParams) -> None:
        config, pool = self.config, self.token_to_kv_pool_allocator.get_kvcache()
        drafts = params.sidecar_draft_device_pools
        if config is not None and config.host_bytes_per_rank is not None:
            use_host_bytes(config.host_bytes_per_rank, pool, drafts, page_size=self.page_size)
        check_asked_size(pool, drafts)
        with use_tiered_controller(), small_host.checked_size():
            super().init_hicache(server_args, params)
        self.session = PublishingSession(self)
        if get_disagg().disaggregation_mode == "decode" or get_disagg().enable_pd_role_switch:
            # SGLang copies no fewer than 10 tokens back, but promises prefill fewer too.
            self.load_back_threshold = 1
        secret = least_on_every_rank(self, [secrets.randbits(SECRET_BITS)])[0]
        self.hidden_tenants.use_secret(secret)
        storage = self.storage
        if storage is not None:
            storage.use_hidden(self.hidden_pages, counts_pages=self.buffer_pipeline is None)
            if self.pp_size == 1:
                self.tiering = Tiering(self, storage, self.config)
            self._events = TierEvents.of_cache(self.tree_core, storage, params)
        if self._enable_metrics_flag:
            self._exporter = MetricsExporter(self.process_stats)
            self._exporter.export()  # every series is there before its first failure

    # ---- What the parts ask ----

    @property
    def storage(self) -> TieredStorage | None:
        """The attached tiers; None in host mode, or while an operator has detached them."""
        backend = getattr(self.cache_controller, "storage_backend", None)
        return backend if isinstance(backend, TieredStorage) else None

    @property
    def has_small_host(self) -> bool:
        """Whether copies of what the device holds give way in the host tier."""
        return isinstance(self.tree_core, small_host.SmallHostTreeCore)

    def erase(self, what: Erasure) -> list[Future[bool]]:
        """Hide pages in memory, so that none is stored behind the tiers' back, and erase them in
        the tiers. All are true once that is durable; the scheduler waits for none. Pages are named
        as KV's are, and those of every pool go."""
        self.hide(what)
        return [] if self.storage is None else [self.storage.erase(what)]

    def hide(self, what: Erasure) -> None:
        """Hide pages in memory, and load none ahead."""
        if what.keys is None:
            self.hidden_tenants.quarantine(what.tenant)
            self.recent_requests.drop_tenant(what.tenant)
        else:
            self.hidden_pages.hide(what.hashes)
        self.drop_loads(None if what.keys is None else what.hashes)
        if self.tiering is not None:
            self.tiering.hints.erase(what)

    def tenant_of(self, node_id: int) -> bytes:
        """Return whose pages a node holds."""
        return self.hidden_tenants.tenant_of(*self.tree_core.prefetch_anchor_info(node_id))

    def is_erased(self, node_id: int) -> bool:
        """Whether a node is from before its tenant was erased or all memory was hidden, or a page
        of it was erased: it is never stored."""
        tenants = self.hidden_tenants
        if tenants and tenants.is_hidden(*self.tree_core.prefetch_anchor_info(node_id)):
            return True
        return self.holds_hidden(node_id)

    def begin_store(self, node_id: int, chain_tokens: int = 0) -> int | None:
        """Have SGLang queue a node's store, as part of a chain of that length; return the
        operation, or None if SGLang declined."""
        num_before = len(self.ongoing_backup)
        self.cache_controller.next_store = NextStore(self.tenant_of(node_id), chain_tokens)
        super().write_backup_storage(node_id)
        if len(self.ongoing_backup) == num_before:
            return None
        operation: int = next(reversed(self.ongoing_backup))
        return operation

    def begin_copy(self, action: BackupKV) -> int:
        """Have SGLang copy nodes to host memory; return how many tokens of the last one."""
        written: int = super()._execute_and_commit_kv_backup(action)
        return written

    def is_backuped(self, node_id: int) -> bool:
        """Whether NVMe may be searched for what follows a node; SGLang asks before each search. In
        a small host tier the copy of a node on the device may have been dropped;
        ``has_host_path`` makes it again. SGLang also asks for the node that stands for a streaming
        session's own pages, which the tree does not know: nothing can follow it."""
        if is_virtual_node(node_id):
            return False
        return self.has_small_host or bool(super().is_backuped(node_id))

    def is_root(self, node_id: int) -> bool:
        return not is_virtual_node(node_id) and bool(super().is_root(node_id))

    # ---- Loads from the tiers ----

    def prefetch_from_storage(self, *args: Any, **kwargs: Any) -> bool | None:
        """Begin the load of as much of a prefix as pays, now or in its turn."""
        call = self.visible_part(PrefetchArguments(*args, **kwargs))
        begin = self.begin_load if self.tiering is None else self.tiering.loads.begin_load
        return begin(call)

    def begin_load(self, call: PrefetchArguments, hashes: Sequence[str] = ()) -> bool | None:
        """Have SGLang load a prefix. ``hashes``: of its pages, which the tiers hold; without,
        SGLang looks them up."""
        tenant = self.hidden_tenants.tenant_of(call.extra_key, call.cache_salt)
        self.cache_controller.next_load = NextLoad(hashes, tenant)
        result: bool | None = super().prefetch_from_storage(*call)
        info = self.ongoing_prefetch.get(call.request)
        if info is not None and self.pp_size == 1:  # a later stage hears of no end
            self._loads_under_way.begun(info.operation)
        return result

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Whether the request may be admitted now: nothing it waits for is still loading."""
        has_loaded = self.load_has_ended(request)
        if self.tiering is not None:
            self.tiering.notes.may_start(request, has_loaded)
        return has_loaded

    def load_has_ended(self, request: CacheRequestHandle) -> bool:
        """Whether no load of a request is under way or still to begin."""
        ask = super().check_prefetch_progress
        if self.tiering is None:
            return bool(ask(request))
        return self.tiering.loads.has_loaded(request, ask)

    def _prefetch_deadline_expired(self, operation: Any) -> bool:
        """Whether to start with what has arrived; SGLang reduces it over ranks."""
        expired = bool(super()._prefetch_deadline_expired(operation))
        if self.tiering is None:
            return expired
        return self.tiering.loads.starts_without(operation, is_overdue=expired)

    def _handle_prefetch_result(self, operation: Any) -> None:
        if self.tiering is not None and self.tiering.returns.arrived(operation):
            return
        request, end = operation.handle, operation.completed_tokens
        host_indices = self.ongoing_prefetch[request].host_indices
        self.prefetch_loaded_tokens_by_reqid.pop(request, None)
        super()._handle_prefetch_result(operation)
        num_loaded = self.prefetch_loaded_tokens_by_reqid.get(request, 0)
        if self.tiering is not None:
            self.tiering.loads.ended(request, num_loaded)
        if self.storage is not None and num_loaded > 0 and self.storage.counts_pages:
            self.storage.accounting.note_loaded(host_indices[end - num_loaded : end])

    def revoke_pending_prefetch(self, request: CacheRequestHandle) -> None:
        super().revoke_pending_prefetch(request)
        if self.tiering is not None:
            self.tiering.returns.revoked(request)
            self.tiering.loads.revoked(request)

    def finish_storage_prefetch_admission(
        self, request: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        if self.tiering is not None:
            self.tiering.loads.leaves(request)
        super().finish_storage_prefetch_admission(request, fulfilled_tokens, reason)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        if self.tiering is not None:
            self.tiering.loads.drop(request)
        super().release_aborted_request(request)

    def claim_kv_row(self, req: Any) -> bool:
        """Hear of every request that gives its memory back; SGLang asks whether a session keeps
        it."""
        if self.tiering is not None:
            self.tiering.notes.released(req)
        return bool(super().claim_kv_row(req))

    def query_storage_hit_length(self, *args: Any, **kwargs: Any) -> int:
        """Nothing of our tiers. SGLang's decode alone asks, to promise it before it is loaded."""
        if self.storage is not None:
            return 0
        return int(super().query_storage_hit_length(*args, **kwargs))

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, int] | None:
        result: tuple[int, int] | None = super().init_load_back(params)
        if self._events is not None:
            self._events.announce_node(params.best_match_node)
        if self.tiering is not None:
            # What the device had already, behind states of other components, is not copied.
            num_copied = 0 if result is None else min(result[0], params.host_hit_length)
            self.tiering.loaded_back(params, num_copied)
        return result

    # ---- Copies to host memory, and stores ----

    def _execute_and_commit_kv_backup(self, action: BackupKV, write_back: bool = False) -> int:
        written: int = super()._execute_and_commit_kv_backup(action, write_back)
        last = action.node_ids[-1]
        if self.tiering is not None and not write_back and not self.holds_hidden(last):
            self.tiering.stores.copy_attempted(last)
        return written

    def _execute_kv_backup(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        host_indices: torch.Tensor | None = super()._execute_kv_backup(*args, **kwargs)
        if self.tiering is not None:
            self.tiering.stores.copy_begun()
        if host_indices is not None and self.storage is not None:
            self.storage.accounting.note_written(host_indices)
        return host_indices

    def _finish_write_through_ack(self, ack_id: int) -> None:
        pending = self.ongoing_write_through.get(ack_id)
        if self.buffer_pipeline is not None:
            small_host.describe_store(self, ack_id)
        super()._finish_write_through_ack(ack_id)
        if self.tiering is not None and pending is not None:
            for node_id in pending.publish_node_ids:
                self.tiering.residents.offer_node(node_id)

    def write_backup_storage(self, node_id: int) -> None:
        """Take SGLang's order to store a node; the spiller decides when it is queued."""
        if self._is_quiescing:
            return
        tiering = None if self.storage is None else self.tiering
        if tiering is not None and self.tree_core.is_backuped(node_id):
            tiering.stores.offer_node(node_id)
        elif not self.is_erased(node_id):
            self.begin_store(node_id)

    def _drain_storage_control_queues_impl(
        self,
        n_storage_hit: int | None,
        n_ack_prefetch: int | None,
        n_backup: int | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        results = next_items(self.cache_controller.ack_backup_queue, n_backup)
        n_backup = len(results) if n_backup is None else n_backup  # no end that comes meanwhile
        nodes = small_host.nodes_of_stores(self, results)
        with self._loads_under_way.noting_ends(self, n_storage_hit, n_ack_prefetch):
            super()._drain_storage_control_queues_impl(
                n_storage_hit, n_ack_prefetch, n_backup, *args, **kwargs
            )
        if results and self.tiering is not None:
            self.tiering.stores_ended(results)
        if self._events is not None:
            for node_id in nodes:
                self._events.announce_node(node_id)

    def pages_shown(self, nodes: Sequence[TreePathNodeInfo]) -> None:
        if self.tiering is not None:
            self.tiering.stores.store_soon(nodes)
            return
        copied = {n for each in self.ongoing_write_through.values() for n in each.publish_node_ids}
        for node in nodes:  # the end of a copy brings its store with it
            if self.is_backuped(node.node_id) and node.node_id not in copied:
                self.write_backup_storage(node.node_id)

    # ---- What leaves memory ----

    def evict_host(
        self, num_tokens: int, component_type: ComponentType = BASE_COMPONENT_TYPE
    ) -> int:
        """Free host tokens, or slots of another component's states. What ``Tiering`` keeps is
        evicted only when nothing else is left."""
        freed: int = super().evict_host(num_tokens, component_type)
        if self.tiering is None:
            return freed
        is_base = component_type is BASE_COMPONENT_TYPE
        if is_base:
            self.tiering.residents.note_eviction(freed)
        while freed < num_tokens and self.tiering.unlock_one(is_base=is_base):
            freed += super().evict_host(num_tokens - freed, component_type)
        return freed

    def _drain_host_frees(self, host_frees: dict[ComponentType, list[torch.Tensor]]) -> None:
        if self.storage is not None:
            for host_indices in host_frees.get(BASE_COMPONENT_TYPE, ()):
                self.storage.accounting.note_freed(host_indices)
        super()._drain_host_frees(host_frees)

    def _record_dropped_tokens(self, dropped_tokens: int, reason: str) -> None:
        super()._record_dropped_tokens(dropped_tokens, reason)
        if self.storage is not None and dropped_tokens > 0:
            self.storage.accounting.note_never_written(dropped_tokens)

    # ---- What requests left in the tree, and reports on it ----

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        self.note_request(req, up_to)

    def note_request(self, req: Any, up_to: int) -> None:
        """Remember that the tree holds a request's first tokens; its fill ids are up to date."""
        if self.storage is not None:
            tokens = array("q", req.full_untruncated_fill_ids[:up_to])
            selector = PrefixSelector(tokens, req.extra_key, req.cache_salt)
            tenant = self.hidden_tenants.tenant_of(req.extra_key, req.cache_salt)
            conversation = conversation_of(req)
            self.recent_requests.note_request(str(req.rid), selector, tenant, conversation)

    def take_events(self) -> list[Any]:
        events: list[Any] = super().take_events()
        return events if self._events is None else events + self._events.take_events()

    def process_stats(self) -> Stats:
        """Take a snapshot for the metrics."""
        return process_stats(self.storage, self.tiering, holdings(self))

    # ---- Steps, and agreement between ranks ----

    def check_hicache_events(self) -> None:
        if self.tiering is not None:
            self.tiering.ask_ranks()
        super().check_hicache_events()
        if self.tiering is not None:
            self.tiering.step()
        elif self.storage is not None:
            self.storage.settle_namespace()
        if self._exporter is not None:
            self._exporter.export()
        if self._events is not None:
            self._events.step()

    def _sync_hicache_ready_counts(self) -> Any:
        if self.tiering is None:
            return super()._sync_hicache_ready_counts()
        with self.tiering.agreement.boarding():
            return super()._sync_hicache_ready_counts()

    def _all_reduce(self, data: torch.Tensor, tp_reduce_op: Any) -> None:
        if self.tiering is None:
            super()._all_reduce(data, tp_reduce_op)
        else:
            self.tiering.agreement.ride(super()._all_reduce, data, tp_reduce_op)

    # ---- Coming to rest ----

    @property
    def has_loads_under_way(self) -> bool:
        """Whether a storage thread may still write to host pages; the same on all ranks."""
        return bool(self._loads_under_way)

    def is_under_way(self) -> bool:
        """Whether a copy, a load or a store has not ended."""
        return is_under_way(self) or self.has_loads_under_way

    def quiesce(self) -> bool:
        """Drop what waits to be stored, abort loads, and wait for what has begun. Returns whether
        all of it ended, the same on all ranks: False if a disk hangs. For calls that empty memory
        afterwards; every rank makes it in one step."""
        if self.pp_size > 1:
            return True  # stages are not in the same step
        storage = self.storage
        self._is_quiescing = True
        try:
            if storage is not None:
                storage.drop_stores(True)
            if self.tiering is not None:
                self.tiering.stores.abandon()
            return wait_until_quiet(self, self._loads_under_way, super().check_hicache_events)
        finally:
            if storage is not None:
                storage.drop_stores(False)
            self._is_quiescing = False

    # ---- Life cycle ----

    def attach_storage_backend(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Attach the storage on every rank or on no rank: ranks exchange more in a step with it.

        SGLang keeps a storage that fails when the host pools are registered, which is when the
        tiers are opened, and its threads. Before that its attach waits for every rank of the server
        where several hold parts of the same pages, so all of them are asked there. Only there, as a
        DP rank that serves requests refuses before it comes here."""
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
            logger.exception("attaching the storage backend failed; no rank keeps it")
            attached, answer = False, f"Failed to attach storage backend: {error}"
        refusing = _NO_RANK if attached else get_parallel().tp_rank
        has_waited = bool(controller.prefetch_hits_sync_groups)  # which it waited for
        refusing, none_waited = least_on_every_rank(self, [refusing, int(not has_waited)])
        if not none_waited:
            refusing = least_of_ranks(refusing)
        if refusing == _NO_RANK:
            if self.storage is not None:
                self._tiers_were_attached(self.storage)
            return True, answer
        detached, why = self.detach_storage_backend()
        if not detached:
            logger.error(
                "a partly attached storage backend cannot be detached (%s); it stays attached", why
            )
        for name, value in policies.items():
            setattr(self, name, value)
        controller.write_policy = write_policy
        if attached:
            answer = f"Failed to attach storage backend on rank {refusing}, whose log says why."
        return False, answer

    def detach_storage_backend(self) -> tuple[bool, str]:
        detached, why = super().detach_storage_backend()
        if detached and self.tiering is not None:
            self.tiering.detached()
        if detached and self._exporter is not None:
            self._exporter.export_now()
        return detached, why

    def _tiers_were_attached(self, storage: TieredStorage) -> None:
        """Hand the storage that an operator attached to every part that used the one before."""
        storage.use_hidden(self.hidden_pages, counts_pages=self.buffer_pipeline is None)
        self.storage_existence_cache.clear()
        if self.tiering is not None:
            self.tiering.attached(storage)
        if self._exporter is not None:
            self._exporter.export_now()
        if self._events is not None:
            self._events.use_tiers(tiers_of(storage))
        if self._holds_old_kv:
            storage.change_weights(tree_is_empty=False)

    def reset(self) -> None:
        super().reset()
        self._loads_under_way.clear()  # SGLang has waited for its threads
        self.storage_existence_cache.clear()
        self._holds_old_kv = False
        if self.tiering is not None:
            self.tiering.tree_was_reset()
        if self._events is not None:
            self._events.tree_was_reset()
        if self.storage is not None:
            self.storage.accounting.note_flushed()
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
        """Make all stored pages unreadable: the model's weights were replaced.

        ``tree_is_empty``: no KV of the weights before is left within reach of a request that
        comes: none at all, or all that there was is hidden."""
        namespace.drop_digests()
        if self.tiering is not None:
            self.tiering.returns.drop_all()
            self.tiering.hints.end_all(WEIGHTS)
        self.drop_loads(all_of_them=True)
        self._holds_old_kv = not tree_is_empty
        if self.storage is not None:
            self.storage.change_weights(tree_is_empty=tree_is_empty)

    def release_host_resources(self) -> None:
        if self.tiering is not None:
            self.tiering.close()
        # The engine reads and writes the host pools' memory, so it goes first.
        self.shutdown()
        super().release_host_resources()

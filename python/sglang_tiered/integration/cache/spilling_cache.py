"""``SpillingRadixCache``: SGLang's radix cache, whose host pages are cleaned to NVMe by policy.

The part of ``TieredRadixCache`` between host memory and NVMe. It puts ``Spiller`` in the way of the
stores that SGLang would queue at once, tells ``HostLedger`` what happens to every host page, and
has skipped host copies made later: SGLang skips them without a word while host memory is short.
Every method runs on the scheduler thread and none waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.session.streaming_session import is_virtual_node

from sglang_tiered.integration.cache.load_scheduler import LoadingRadixCache
from sglang_tiered.integration.cache.small_host_core import COPY_SHARE, SmallHostTreeCore
from sglang_tiered.integration.cache.spiller import Spiller

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from sglang.srt.mem_cache.base_prefix_cache import (
        CacheInitParams,
        CacheRequestHandle,
        DecLockRefParams,
    )
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo

    from sglang_tiered.integration.storage.page_accounting import HostLedger

__all__ = ["SpillingRadixCache"]

MIN_COST_S = 1e-6

LOCKED_SHARE = 1 / 2
"""Of device memory: while running requests and stores lock more, several ranks begin no store that
locks any."""


class SpillingRadixCache(LoadingRadixCache):
    """See the module docstring. Owned by the scheduler, used on its thread only."""

    # Set here because the parent's constructor calls ``reset`` before ours could run.
    _spiller: Spiller | None = None
    _stores_on_device: dict[int, tuple[int, DecLockRefParams]]  # by operation
    # In a small host tier: until when a request's load waits for room, and what is counted when
    # it is asked for and something was copied or stored since.
    _waits_for_room: dict[CacheRequestHandle, float]
    _must_stay: int | None = None

    def init_hicache(self, server_args: Any, params: CacheInitParams) -> None:
        super().init_hicache(server_args, params)
        if self.pp_size == 1 and self.storage is not None:
            host_tokens: int = self.cache_controller.mem_pool_host.logical_size
            self._spiller = Spiller(
                self, host_tokens=host_tokens, own_tokens=self.own_host_tokens()
            )
            if self.has_small_host:
                core = self.tree_core
                core.max_copy_tokens = max(int(self.page_size), int(host_tokens * COPY_SHARE))
                core.may_give_up = lambda node_id: not self._spiller.is_under_way(node_id)
                core.is_stored = self._is_stored if self._decides_alone() else None

    @property
    def decides_alone(self) -> bool:
        """Whether no other rank must come to the same decisions."""
        return self._decides_alone()

    @property
    def has_small_host(self) -> bool:
        """Whether copies of what the device holds give way in the host tier."""
        return isinstance(self.tree_core, SmallHostTreeCore)

    def _is_stored(self, last_hash: str) -> bool:
        return self.storage is not None and self.storage.holds(last_hash)

    def is_backuped(self, node_id: int) -> bool:
        """SGLang asks before it lets us look for what NVMe holds below a node. In a small host tier
        the copy of a node on the device may have given way; ``has_host_path`` makes it again.
        Of the node that stands for a streaming session's own pages the tree knows nothing, and
        SGLang asks all the same; nothing can be looked for below it."""
        if is_virtual_node(node_id):
            return False
        return self.has_small_host or bool(super().is_backuped(node_id))

    def is_root(self, node_id: int) -> bool:
        return not is_virtual_node(node_id) and bool(super().is_root(node_id))

    def own_host_tokens(self) -> int:
        """What the host tier holds beyond device memory: a prefix there keeps its host copy, unless
        the tier is small."""
        host_tokens: int = self.cache_controller.mem_pool_host.logical_size
        if self.has_small_host:
            return host_tokens
        device_tokens: int = self.token_to_kv_pool_allocator.size_full
        return max(host_tokens - device_tokens, host_tokens // 4)

    def num_loading_tokens(self) -> int:
        """Host tokens taken by loads in flight and by loads no request has consumed yet."""
        return self._num_loading_tokens()

    # ---- Stores ----

    def write_backup_storage(self, node_id: int) -> None:
        """SGLang asks for the store of a node; the spiller decides when it is queued."""
        if self._is_quiescing:
            return
        storage = self.storage
        if self._spiller is None or storage is None or not self.tree_core.is_backuped(node_id):
            if not self.fence or not self.fence.blocks(self.tenant_of(node_id)):
                super().write_backup_storage(node_id)
            return
        self._spiller.offer(node_id, storage)

    def _drop_stores(self, dropping: bool) -> None:
        if self.storage is not None:
            self.storage.drop_stores(dropping)
        if dropping and self._spiller is not None:
            self._spiller.abandon()

    def tenant_of(self, node_id: int) -> bytes:
        """Whose pages a node holds."""
        return self.fence.tenant_of(*self.tree_core.prefetch_anchor_info(node_id))

    def queue_store(self, node_id: int) -> int | None:
        """Queue a store now, for the spiller; the operation, or None if there is none: SGLang
        declined it, or the node's host pages are still being copied, and then comes the store with
        the end of the copy."""
        if self.fence and self.fence.blocks(self.tenant_of(node_id)):
            return None  # purged, and perhaps not out of the tree yet
        if self._is_being_copied(node_id):
            return None
        # The host copy cannot go while it is read, and the device must not give up a node whose
        # copy it could not keep: SGLang counts only what is locked there as unevictable.
        core = self.tree_core
        needs_device = (
            self.has_small_host
            and not core.is_full_device_evicted(node_id)
            and not core.has_copied_path(node_id)
        )
        if needs_device and not self._decides_alone() and self._locks_too_much():
            return None
        num_before = len(self.ongoing_backup)
        super().write_backup_storage(node_id)
        if len(self.ongoing_backup) == num_before:
            return None
        operation: int = next(reversed(self.ongoing_backup))
        if needs_device:
            self._stores_on_device[operation] = node_id, self.inc_lock_ref(node_id).to_dec_params()
        return operation

    def stores_in_the_way(self, request: CacheRequestHandle, num_tokens: int) -> int:
        """A copy stays until it is stored, and in a small host tier such copies may be most of it.
        A load waits for room only where one rank decides alone, since how long a store takes is no
        rank's to know of another, and only while stores go on and the load still gains."""
        storage, planner = self.storage, self._planner
        if num_tokens == 0 or not self.has_small_host or not self._decides_alone():
            return 0
        if storage is None or planner is None or not storage.takes_stores:
            return 0
        must_stay = self._tokens_that_must_stay()
        host_tokens: int = self.cache_controller.mem_pool_host.logical_size
        taken = must_stay + self._num_loading_tokens()
        in_the_way = min(min(num_tokens, host_tokens) + taken - host_tokens, must_stay)
        if in_the_way <= 0:
            return 0
        now = time.monotonic()
        until = self._waits_for_room.setdefault(request, now + planner.patience_s(request))
        return in_the_way if now < until else 0

    def _tokens_that_must_stay(self) -> int:
        """Of copies that are being made, wait to be stored, or are being stored."""
        if self._must_stay is None:
            making = [pending.publish_node_ids for pending in self.ongoing_write_through.values()]
            nodes = {node_id for node_ids in making for node_id in node_ids}
            nodes.update(node_id for node_id, _ in self.ongoing_backup.values())
            if self._spiller is not None:
                nodes.update(self._spiller.waiting())
            self._must_stay = self.tree_core.num_tokens(nodes)
        return self._must_stay

    @property
    def lets_loads_go_first(self) -> bool:
        """Whether a load waits for host memory, which no skipped copy may take before it."""
        if not self._waits_for_room:
            return False
        now = time.monotonic()
        return any(now < until for until in self._waits_for_room.values())

    def _note_room(self) -> None:
        """Loads that have got their host memory, or what there was of it, wait no more."""
        for request in self._waits_for_room:
            info = self.ongoing_prefetch.get(request)
            if info is not None and info.operation.host_indices is not None:
                self._waits_for_room[request] = 0.0

    def pop_prefetch_loaded_span(self, request: CacheRequestHandle) -> tuple[int, int | None]:
        self._waits_for_room.pop(request, None)
        return super().pop_prefetch_loaded_span(request)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        self._waits_for_room.pop(request, None)
        super().release_aborted_request(request)

    def forget_plan(self, request: CacheRequestHandle) -> None:
        self._waits_for_room.pop(request, None)
        super().forget_plan(request)

    def _locks_too_much(self) -> bool:
        """Whether stores lock as much of device memory as they may; alike on all ranks. One that
        decides alone queues no more than the disk takes."""
        protected: int = self.tree_core.full_protected_size()
        return bool(
            self._stores_on_device
            and protected > self.token_to_kv_pool_allocator.size_full * LOCKED_SHARE
        )

    def _drain_storage_control_queues_impl(self, *args: Any, **kwargs: Any) -> Any:
        num_before = len(self.ongoing_backup)
        result = super()._drain_storage_control_queues_impl(*args, **kwargs)
        if len(self.ongoing_backup) < num_before:
            self._must_stay = None
            if self._spiller is not None and self.has_small_host:
                self._spiller.stores_ended()
        for operation in [
            each for each in self._stores_on_device if each not in self.ongoing_backup
        ]:
            self.dec_lock_ref(*self._stores_on_device.pop(operation))
        return result

    def _is_being_copied(self, node_id: int) -> bool:
        """Whether host pages of a node are not filled yet. SGLang calls a node backed up once its
        copy is queued, and the copy also waits for the forward under way. The same on all ranks."""
        return any(
            node_id in pending.publish_node_ids for pending in self.ongoing_write_through.values()
        )

    def store_soon(self, path: Sequence[TreePathNodeInfo]) -> None:
        """Somebody waits until these nodes are stored. Copies to host memory come first, and bring
        the store with them. What a disk holds already is asked only where no other rank must queue
        the same stores; asking for them twice costs nothing."""
        storage = self.storage
        if self._spiller is None or storage is None:
            return
        for node in path:
            node_id = node.node_id
            last = self.tree_core.get_last_hash_value(node_id)
            if self._decides_alone() and last is not None and storage.holds(last):
                continue
            if not self.tree_core.is_backuped(node_id):
                if not self.back_up(node_id):
                    self._spiller.backup_skipped(node_id)
            elif self._is_being_copied(node_id):
                continue
            elif self._spiller.is_under_way(node_id):
                self._spiller.queue.promote(node_id)
            else:
                self.write_backup_storage(node_id)

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        self._note_room()
        if self._spiller is not None:
            self._spiller.step(self.storage)
        self._must_stay = None

    def release_dirty_pin(self) -> bool:
        """Let a page go that NVMe does not hold yet; False when none is held back."""
        return self._spiller is not None and self._spiller.release_pin()

    def cost_to_bring_back(self, node_id: int, chain: str, num_tokens: int) -> float:
        """Seconds per token to have a chain again once it left host memory: a load if NVMe holds
        it or is about to, else a prefill. The same for all chains where ranks must agree."""
        if self._spiller is None or self.storage is None or not self._decides_alone():
            return 1.0
        is_held = self._spiller.is_under_way(node_id) or self.storage.holds(chain)
        return self._cost(num_tokens, is_held=is_held)

    def _cost(self, num_tokens: int, *, is_held: bool) -> float:
        if self._planner is None:
            return 1.0
        costs = self._planner.costs
        prefill = costs.prefill.seconds(num_tokens, 0)
        seconds = costs.load_seconds((num_tokens,)) if is_held else prefill
        return max(seconds, MIN_COST_S) / num_tokens

    def store_ended(self, chain: str, num_tokens: int, *, is_held: bool) -> None:
        """A store was dropped, or one that had been dropped succeeded."""

    # ---- Host copies ----

    def back_up(self, node_id: int) -> bool:
        """Copy a node to host memory, for the spiller, which notes a failure itself; whether all of
        it is there now. Raises ``KeyError`` if the node is gone."""
        core = self.tree_core
        if core.is_backuped(node_id):
            return True
        if self.has_small_host and self._spiller is not None:
            for part in core.parts_to_copy(node_id):
                if super()._execute_and_commit_kv_backup(BackupKV([part])) == 0 and part != node_id:
                    self._spiller.backup_skipped(part)
        else:
            super()._execute_and_commit_kv_backup(core.build_backup_kv_action(node_id))
        return bool(core.is_backuped(node_id))

    def has_host_path(self, node_id: int) -> bool:
        core = self.tree_core
        if not self.has_small_host or core.has_copied_path(node_id):
            return True
        path = core.collect_path_info([node_id])[0]
        if path and path[-1].path_end > self.cache_controller.mem_pool_host.logical_size:
            return False
        # What is copied first must not give way to what is copied next.
        lock = self.inc_host_lock_ref(node_id).to_dec_params()
        try:
            return all(self.back_up(node.node_id) for node in path)
        finally:
            self.dec_host_lock_ref(node_id, lock)

    def _execute_and_commit_kv_backup(self, action: BackupKV, write_back: bool = False) -> int:
        written: int = super()._execute_and_commit_kv_backup(action, write_back)
        if self._spiller is not None and not write_back:
            last = action.node_ids[-1]
            if not self.tree_core.is_backuped(last):
                self._spiller.backup_skipped(last)
                if self.storage is not None:
                    self.storage.ledger.num_backups_skipped += 1
        return written

    # ---- What becomes of every host page ----

    @property
    def _ledger(self) -> HostLedger | None:
        storage = self.storage
        return None if storage is None else storage.ledger

    def _execute_kv_backup(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        host_indices: torch.Tensor | None = super()._execute_kv_backup(*args, **kwargs)
        self._must_stay = None
        ledger = self._ledger
        if host_indices is not None and ledger is not None:
            ledger.written(host_indices)
        return host_indices

    def _handle_prefetch_result(self, operation: Any) -> None:
        request = operation.handle
        host_indices = self.ongoing_prefetch[request].host_indices
        self.prefetch_loaded_tokens_by_reqid.pop(request, None)
        super()._handle_prefetch_result(operation)
        ledger = self._ledger
        num_loaded = self.prefetch_loaded_tokens_by_reqid.get(request, 0)
        if ledger is not None and num_loaded > 0:
            end = operation.completed_tokens
            ledger.loaded(host_indices[end - num_loaded : end])

    def _drain_host_frees(self, host_frees: dict[ComponentType, list[torch.Tensor]]) -> None:
        ledger = self._ledger
        if ledger is not None:
            for host_indices in host_frees.get(BASE_COMPONENT_TYPE, ()):
                ledger.freed(host_indices)
        super()._drain_host_frees(host_frees)

    def _record_dropped_tokens(self, dropped_tokens: int, reason: str) -> None:
        super()._record_dropped_tokens(dropped_tokens, reason)
        ledger = self._ledger
        if ledger is not None and dropped_tokens > 0:
            ledger.never_written(dropped_tokens)

    def reset(self) -> None:
        super().reset()
        self._stores_on_device = {}
        self._waits_for_room, self._must_stay = {}, None
        if self._spiller is not None:
            self._spiller.clear()
        ledger = self._ledger
        if ledger is not None:
            ledger.flushed()

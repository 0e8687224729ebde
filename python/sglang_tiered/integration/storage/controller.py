"""``TieredController``: SGLang's controller of host and device pools, with storage I/O of ours.

SGLang's threads store one node and load one prefix at a time, up to 128 KV pages a call, and wait
each time. Between two calls the disk is idle, and has nothing to write as one extent. Here these
threads begin parts of several, and wait for none of them (``BackupWorker``, ``LoadWorker``).

SGLang asks a storage how much it holds on another thread, since most must ask a disk or a network.
It allocates host memory for the answer in the next scheduling step. Under load a step lasts as long
as a forward pass, so a load would begin one pass late and its request miss one more. The index of
the tiers is in memory: a lone rank is answered at once.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.integration.storage.workers import (
    BackupWorker,
    LoadOperation,
    LoadWorker,
    StoreOperation,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    from sglang_tiered.integration.storage.admission_gate import QueuedStore


@contextmanager
def use_tiered_controller() -> Iterator[None]:
    """Have SGLang make a ``TieredController`` of each controller that it makes in this context."""
    stock, assembler.HybridCacheController = assembler.HybridCacheController, TieredController
    try:
        yield
    finally:
        assembler.HybridCacheController = stock


class NextStore(NamedTuple):
    """What SGLang does not tell the controller of a node whose store it queues."""

    tenant: bytes = UNKNOWN_TENANT
    chain_tokens: int = 0
    is_refused: bool = False


class NextLoad(NamedTuple):
    """What SGLang does not tell the controller of a prefix that it asks to load."""

    hashes: Sequence[str] = ()  # of pages that the tiers hold; none: to be looked up
    tenant: bytes | None = None


class TieredController(HybridCacheController):  # type: ignore[misc]
    """See the module docstring. A storage of others gets SGLang's own I/O.

    ``next_store`` and ``next_load`` describe what is queued next. Threads are started, stopped and
    joined by SGLang, at a stop after what they have begun."""

    next_store, next_load = NextStore(), NextLoad()
    _last_kv: QueuedStore | None = None

    @property
    def _tiers(self) -> TieredStorage | None:
        backend = self.storage_backend
        return backend if isinstance(backend, TieredStorage) else None

    @property
    def _answers_itself(self) -> bool:
        """Whether no other rank must come to the same numbers, and the tiers are ours."""
        return self._tiers is not None and not self.prefetch_hits_sync_groups

    # ---- Loads ----

    def prefetch(
        self,
        handle: CacheRequestHandle,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        extra_pools: list[Any] | None = None,
        assume_stored: bool = False,
    ) -> Any:
        """Queue the question how much of a prefix can be loaded, or the answer. Scheduler thread,
        memory only."""
        if self._tiers is None:
            return super().prefetch(
                handle, new_input_tokens, last_hash, prefix_keys, extra_pools, assume_stored
            )
        load = LoadOperation(
            handle,
            new_input_tokens,
            last_hash,
            prefix_keys=prefix_keys,
            pool_transfers=extra_pools,
            assume_stored=assume_stored,
            tenant=self.next_load.tenant,
        )
        if self._answers_itself:
            self._answer(load)
        else:
            self.prefetch_queue.put(load)
        return load

    def _answer(self, load: LoadOperation) -> None:
        """Do what SGLang's ``prefetch_thread_func`` does for an operation."""
        hashes = self.next_load.hashes
        if hashes and not load.assume_stored and not load.pool_transfers:
            num_pages = len(hashes)
            load.all_hash_values = hashes
            load.pool_storage_result.update_kv_hit_pages(num_pages)
            load.query_pool_hit_pages = {PoolName.KV: num_pages}
            num_tokens = num_pages * self.page_size
        else:
            hashes, num_tokens = self._storage_hit_query(load)
        num_tokens = self._sync_prefetch_hit_query(load, num_tokens)
        load.hash_value = hashes[: num_tokens // self.page_size]
        load.storage_hit_count = num_tokens
        self.prefetch_hit_queue.put(load)

    def prefetch_thread_func(self) -> None:
        if not self._answers_itself:
            super().prefetch_thread_func()

    def prefetch_io_aux_func(self) -> None:
        tiers = self._tiers
        if tiers is None:
            super().prefetch_io_aux_func()
        else:
            LoadWorker(self, tiers).run()

    def prefetch_sync_thread_func(self) -> None:
        if not self._answers_itself:
            super().prefetch_sync_thread_func()

    # ---- Stores ----

    def write_storage(
        self,
        host_indices: torch.Tensor,
        token_ids: list[int],
        hash_value: list[str] | None = None,
        prefix_keys: list[str] | None = None,
        extra_pools: list[Any] | None = None,
    ) -> int:
        """Queue the store of a node. Scheduler thread, memory only."""
        tiers = self._tiers
        if tiers is None:
            operation_id: int = super().write_storage(
                host_indices, token_ids, hash_value, prefix_keys, extra_pools
            )
            return operation_id
        # SGLang stores each pool of a node by itself where host memory is a buffer.
        others = () if hash_value else [each.keys for each in extra_pools or () if each.keys]
        kv = None if hash_value else self._last_kv
        queued = tiers.gate.queue_store(
            hash_value or next(iter(others), ()),
            num_tokens=len(host_indices),
            prefix_tokens=self.next_store.chain_tokens,
            tenant=self.next_store.tenant,
            kv=kv,
        )
        if hash_value:
            self._last_kv = queued
        if self.next_store.is_refused:
            with tiers.gate.lock:
                tiers.gate.refuse(queued)
        operation = StoreOperation(queued, host_indices, token_ids, hash_value, extra_pools)
        self.backup_queue.put(operation)
        return operation.id

    def backup_thread_func(self) -> None:
        tiers = self._tiers
        if tiers is None:
            super().backup_thread_func()
        else:
            BackupWorker(self, tiers).run()

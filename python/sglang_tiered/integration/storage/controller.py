"""``TieredController``: SGLang's controller of host and device pools, with storage I/O of ours.

SGLang's backup thread stores one pool of one node at a time, up to 128 KV pages a call, and waits
each time: between two calls the disk is idle, and has nothing to write as one extent. Here that
thread begins parts of several nodes, and waits for none of them (``StoreWorker``).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.integration.storage.store_worker import StoreOperation, StoreWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["NextStore", "TieredController", "use_tiered_controller"]


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


class TieredController(HybridCacheController):  # type: ignore[misc]
    """See the module docstring. A storage of others gets SGLang's own I/O.

    ``next_store`` describes the store that is queued next. Threads are started, stopped and joined
    by SGLang, at a stop after what they have begun."""

    next_store = NextStore()

    @property
    def _tiers(self) -> TieredStorage | None:
        backend = self.storage_backend
        return backend if isinstance(backend, TieredStorage) else None

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
        queued = tiers.gate.queue_store(
            hash_value or (),
            num_tokens=len(host_indices),
            prefix_tokens=self.next_store.chain_tokens,
            tenant=self.next_store.tenant,
        )
        operation = StoreOperation(queued, host_indices, token_ids, hash_value, extra_pools)
        self.backup_queue.put(operation)
        return operation.id

    def backup_thread_func(self) -> None:
        tiers = self._tiers
        if tiers is None:
            super().backup_thread_func()
        else:
            StoreWorker(self, tiers).run()

"""Loads that begin at arrival: SGLang's storage query, answered on the spot.

SGLang asks storage backends how much they hold on a thread of their own, since most must ask a
disk or a network, and allocates host memory for the answer in the next scheduling step. Under load
a step lasts as long as a forward pass, so a load begins one pass late and its request misses one
more. Our index is in memory, so a scheduler that decides alone asks it directly and allocates at
once; reads begin while the scheduler still takes requests in.

The one patch is ``HybridCacheController.prefetch`` of the one controller, which here does what
``prefetch_thread_func`` (managers/cache_controller.py) does for each operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

__all__ = ["answer_at_once"]


def answer_at_once(controller: Any) -> None:
    """Make ``controller`` answer storage queries within ``prefetch``. Only where no other rank
    takes part: the ranks' answers are not compared."""

    def prefetch(
        handle: CacheRequestHandle,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        extra_pools: list[Any] | None = None,
        assume_stored: bool = False,
    ) -> PrefetchOperation:
        operation = PrefetchOperation(
            handle,
            new_input_tokens,
            last_hash,
            prefix_keys=prefix_keys,
            pool_transfers=extra_pools,
            assume_stored=assume_stored,
        )
        hashes, num_tokens = controller._storage_hit_query(operation)  # noqa: SLF001
        num_tokens = controller._sync_prefetch_hit_query(operation, num_tokens)  # noqa: SLF001
        operation.hash_value = hashes[: num_tokens // controller.page_size]
        operation.storage_hit_count = num_tokens
        controller.prefetch_hit_queue.put(operation)
        return operation

    controller.prefetch = prefetch

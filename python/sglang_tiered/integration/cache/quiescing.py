"""``QuiescingRadixCache``: what is under way between device memory, host memory and the tiers.

SGLang forgets a load that was given up while its thread may still read into host pages. It would
take itself for idle then, and ``/flush_cache`` stops those threads or ends the scheduler. How long
a read takes is each rank's own affair, but all ranks must be idle in the same step. So what counts
is when SGLang hands on the end of the load, which it does on all ranks in the same step.

SGLang empties memory in an idle scheduler only. With a slow disk stores go on for long after the
last request, and while generation is paused nobody takes note of their ends. ``quiesce`` is for
calls that need memory emptied now.

Every method runs on the scheduler thread.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_tiered.integration.cache.rank_consensus import least_on_every_rank

if TYPE_CHECKING:
    from queue import Queue

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

__all__ = ["QuiescingRadixCache"]

QUIESCE_S = 30.0
"""A disk that has not answered for so long hangs."""
LOOK_S = 0.001


class QuiescingRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """See the module docstring."""

    _is_quiescing = False
    _loads: set[Any]  # operations whose end SGLang has not handed on, wanted or given up

    @property
    def has_loads_under_way(self) -> bool:
        """Whether a storage thread may still write to host pages; the same on all ranks."""
        return bool(self._loads)

    def quiesce(self) -> bool:
        """Bring to an end what is under way: what waits to be stored is dropped, loads are given
        up, and what has begun is waited for. Whether all of it ended, the same on all ranks: false
        if a disk hangs. For calls after which memory is emptied; every rank makes it in one step.
        """
        if self.pp_size > 1:
            return True  # stages are not in the same step
        deadline = time.monotonic() + QUIESCE_S
        self._is_quiescing = True
        try:
            self._drop_stores(True)
            for request in list(self.ongoing_prefetch):
                self.release_aborted_request(request)
            while self._is_under_way():
                if least_on_every_rank(self, [int(time.monotonic() < deadline)]) == [0]:
                    return False
                super().check_hicache_events()
                time.sleep(LOOK_S)
            return True
        finally:
            self._drop_stores(False)
            self._is_quiescing = False

    def _is_under_way(self) -> bool:
        return bool(
            self.ongoing_write_through
            or self.ongoing_load_back
            or self.ongoing_prefetch
            or self.ongoing_backup
            or self._loads
        )

    def _drop_stores(self, dropping: bool) -> None:
        """From now on, or no longer."""

    def prefetch_from_storage(
        self, request: CacheRequestHandle, *args: Any, **kwargs: Any
    ) -> bool | None:
        result: bool | None = super().prefetch_from_storage(request, *args, **kwargs)
        info = self.ongoing_prefetch.get(request)
        if info is not None and self.pp_size == 1:  # a later stage hears of no end
            self._loads.add(info.operation)
        return result

    def _drain_storage_control_queues_impl(
        self, n_storage_hit: int | None, n_ack_prefetch: int | None, *args: Any, **kwargs: Any
    ) -> Any:
        controller = self.cache_controller
        answered = _first(controller.prefetch_hit_queue, n_storage_hit)
        acks = _first(controller.ack_prefetch_queue, n_ack_prefetch)
        result = super()._drain_storage_control_queues_impl(
            n_storage_hit, n_ack_prefetch, *args, **kwargs
        )
        self._loads.difference_update(
            (ack.operation for ack in acks if ack.completed_req),
            # Nobody reads what got no host memory.
            (operation for operation in answered if operation.host_indices is None),
        )
        return result

    def reset(self) -> None:
        super().reset()  # which has waited for the threads
        self._loads = set()


def _first(queue: Queue[Any], number: int | None) -> list[Any]:
    """The items that come next, all of them for None, left where they are."""
    with queue.mutex:
        return list(islice(queue.queue, number))

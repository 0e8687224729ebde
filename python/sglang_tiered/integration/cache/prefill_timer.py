"""``PrefillClock``: how long each prefill batch took, for the cost model.

On a CPU a forward runs within ``Scheduler.run_batch``. On an accelerator ``run_batch`` only
launches it, and ``process_batch_result`` begins by waiting for its end; the batch then took the
time since its launch, or since the batch before it ended if that was later.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PrefillClock"]

MAX_LAUNCHED = 64
"""Bounds the launched batches without a result; with one pipeline stage there are two."""


class PrefillClock:
    """Times prefill batches by two AROUND hooks of one scheduler process. Scheduler thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended_at = 0.0
        self._launched: deque[int] = deque(maxlen=MAX_LAUNCHED)

    def around_run(self, run: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any) -> Any:
        begun = self._clock()
        result = run(scheduler, batch, *rest)
        # Asked now: under overlap the result comes with a copy of the batch, which has neither the
        # device nor the load that the batch waited for.
        if not _waits_for_a_load(batch):
            if str(batch.device).startswith("cpu"):
                self._tell(scheduler, batch, self._clock() - begun)
            else:
                self._launched.append(batch.forward_iter)
        return result

    def around_result(
        self, process: Callable[..., Any], scheduler: Any, batch: Any, result: Any
    ) -> Any:
        returned = process(scheduler, batch, result)
        ended = self._clock()
        if batch.forward_iter in self._launched and batch.launch_ts is not None:
            self._launched.remove(batch.forward_iter)
            self._tell(scheduler, batch, ended - max(batch.launch_ts, self._ended_at))
        self._ended_at = ended
        return returned

    @staticmethod
    def _tell(scheduler: Any, batch: Any, seconds: float) -> None:
        from sglang_tiered.integration.cache.radix_cache import TieredRadixCache

        cache = scheduler.tree_cache
        if not isinstance(cache, TieredRadixCache) or cache.tiering is None:
            return
        if not batch.forward_mode.is_extend():
            return
        if batch.extend_lens and batch.prefix_lens:
            spans = list(zip(batch.extend_lens, batch.prefix_lens, strict=True))
            cache.tiering.loads.note_batch(spans, seconds)


def _waits_for_a_load(batch: Any) -> bool:
    """Whether the time of a batch includes copies from the host."""
    return batch.hicache_consumer_index is not None and batch.hicache_consumer_index >= 0

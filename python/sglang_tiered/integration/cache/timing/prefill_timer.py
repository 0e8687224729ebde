"""``PrefillClock``: how long each prefill batch took, for the cost model.

On a CPU a forward runs within ``Scheduler.run_batch``. On an accelerator ``run_batch`` only
launches it, and ``process_batch_result`` begins by waiting for its end. The batch then took the
time since its launch, or since the batch before it ended if that was later. Copies of cached tokens
to the device run beside the batch that needs them, and are told with its time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.integration.cache.tiering import Tiering

__all__ = ["PrefillClock"]

MAX_LAUNCHED = 64
"""Bounds the launched batches without a result; with one pipeline stage there are two."""


class _Launched(NamedTuple):
    """A batch without a result."""

    num_copied: int  # tokens that were copied to the device for it
    is_prefill: bool


class PrefillClock:
    """Times prefill batches by two AROUND hooks of one scheduler process. Scheduler thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended_at = 0.0
        # Batches without a result.
        self._launched: OrderedDict[int, _Launched] = OrderedDict()

    def around_run(self, run: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any) -> Any:
        tiering = _tiering_of(scheduler)
        if tiering is None:
            return run(scheduler, batch, *rest)
        # Asked now: under overlap the result comes with a copy of the batch, which has neither the
        # device nor the load that the batch waits for.
        num_copied = tiering.take_copied() if _waits_for_a_load(batch) else 0
        running = scheduler.running_batch
        num_running = len(batch.reqs) + (0 if running is batch else len(running.reqs))
        tiering.planner.note_run(num_running)
        begun, spans = self._clock(), _prefill_spans(batch)
        if spans:
            tiering.prefill_begins(spans, begun)
        result = run(scheduler, batch, *rest)
        if str(batch.device).startswith("cpu"):
            ended = self._clock()
            self._tell(tiering, batch, ended - begun, num_copied)
            if spans:
                tiering.prefill_ended(ended)
        else:
            self._launched[batch.forward_iter] = _Launched(num_copied, is_prefill=bool(spans))
            if len(self._launched) > MAX_LAUNCHED:
                _, lost = self._launched.popitem(last=False)
                if lost.is_prefill:
                    tiering.prefill_ended(self._clock())
        return result

    def around_result(
        self, process: Callable[..., Any], scheduler: Any, batch: Any, result: Any
    ) -> Any:
        tiering = _tiering_of(scheduler)
        # SGLang releases requests that end with this batch before anybody can time it.
        with nullcontext() if tiering is None else tiering.notes.until_timed():
            returned = process(scheduler, batch, result)
            ended = self._clock()
            if batch.forward_iter in self._launched and batch.launch_ts is not None:
                launched = self._launched.pop(batch.forward_iter)
                if tiering is not None:
                    seconds = ended - max(batch.launch_ts, self._ended_at)
                    self._tell(tiering, batch, seconds, launched.num_copied)
                    if launched.is_prefill:
                        tiering.prefill_ended(ended)
        self._ended_at = ended
        return returned

    @staticmethod
    def _tell(tiering: Tiering, batch: Any, seconds: float, num_copied: int) -> None:
        if spans := _prefill_spans(batch):
            tiering.planner.note_batch(spans, seconds, num_copied)
            # On a CPU a copy is done when its call returns, before the batch runs.
            is_cpu = str(batch.device).startswith("cpu")
            tiering.notes.batch_ran(batch.reqs, spans, seconds, copies_beside=not is_cpu)


def _tiering_of(scheduler: Any) -> Tiering | None:
    tiering: Tiering | None = getattr(scheduler.tree_cache, "tiering", None)
    return tiering


def _prefill_spans(batch: Any) -> list[tuple[int, int]]:
    """Return the new tokens of each request of a prefill batch, and the tokens before them; none of
    another batch."""
    if batch.forward_mode.is_extend() and batch.extend_lens and batch.prefix_lens:
        return list(zip(batch.extend_lens, batch.prefix_lens, strict=True))
    return []


def _waits_for_a_load(batch: Any) -> bool:
    """Whether the time of a batch includes copies from the host."""
    return batch.hicache_consumer_index is not None and batch.hicache_consumer_index >= 0

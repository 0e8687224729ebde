"""Tracks what is under way between device memory, host memory and the tiers, and ends it.

SGLang drops a load that was aborted while its thread may still read into host pages. It would
take itself for idle then, and ``/flush_cache`` stops those threads or ends the scheduler. How long
a read takes is each rank's own affair, but all ranks must be idle in the same step. So what counts
is when SGLang hands on the end of the load, which it does on all ranks in the same step.

SGLang empties memory in an idle scheduler only. With a slow disk stores go on for long after the
last request, and while generation is paused SGLang takes no note of their ends.
``wait_until_quiet`` is for calls that need memory emptied now, ``wait_for_loads`` for those that
are refused unless the scheduler is idle.

Everything runs on the scheduler thread.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_tiered.integration.cache.small_host import loads_on_the_way
from sglang_tiered.integration.ranks import least_on_every_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from queue import Queue


QUIESCE_S = 30.0
"""A disk that has not answered for this long counts as hung."""
REST_S = 5.0
"""What a call waits for an aborted load that alone keeps the scheduler from being idle."""
LOOK_S = 0.001


class LoadsUnderWay:
    """Holds the loads whose end SGLang has not handed on, aborted ones too. Alike on all ranks."""

    def __init__(self) -> None:
        self._operations: set[Any] = set()
        self._parked: set[Any] = set()  # of these, that wait for memory of a buffer

    def __bool__(self) -> bool:
        return bool(self._operations)

    def begun(self, operation: Any) -> None:
        self._operations.add(operation)

    @contextmanager
    def noting_ends(
        self, cache: UnifiedRadixCache, num_answered: int | None, num_acks: int | None
    ) -> Iterator[None]:
        """Note the ends among the items that SGLang takes of the controller's queues within this
        context: so many, or all of them for None."""
        controller, buffer = cache.cache_controller, cache.buffer_pipeline
        answered = next_items(controller.prefetch_hit_queue, num_answered)
        acks = next_items(controller.ack_prefetch_queue, num_acks)
        yield
        asked = self._parked.union(answered)
        self._parked = set() if buffer is None else set(buffer.pending_hit_allocs)
        self._operations.difference_update(
            (ack.operation for ack in acks if ack.completed_req),
            # No thread reads what got no host memory.
            (each for each in asked - self._parked if each.host_indices is None),
        )

    def clear(self) -> None:
        """Drop all loads: SGLang has waited for its threads."""
        self._operations.clear()
        self._parked.clear()


def is_under_way(cache: UnifiedRadixCache) -> bool:
    """Whether a copy, a load or a store that SGLang tracks has not ended."""
    buffer = cache.buffer_pipeline
    return bool(
        (buffer is not None and not buffer.is_idle())
        or cache.ongoing_write_through
        or cache.ongoing_load_back
        or cache.ongoing_prefetch
        or cache.ongoing_backup
    )


def wait_until_quiet(
    cache: UnifiedRadixCache, loads: LoadsUnderWay, take_ends: Callable[[], None]
) -> bool:
    """Abort loads and wait until nothing is under way. Returns False if a disk hangs, the same on
    all ranks. ``take_ends`` has SGLang take note of ends."""
    for request in loads_on_the_way(cache):
        cache.release_aborted_request(request)
    return _wait_while(
        cache, lambda: is_under_way(cache) or bool(loads), take_ends, seconds=QUIESCE_S
    )


def wait_for_loads(cache: Any) -> None:
    """Wait for aborted loads, if nothing else is under way. Every rank makes this call in the same
    step, when no request runs or waits."""
    if not is_under_way(cache):
        take_ends = partial(UnifiedRadixCache.check_hicache_events, cache)
        _wait_while(cache, lambda: cache.has_loads_under_way, take_ends, seconds=REST_S)


def _wait_while(
    cache: UnifiedRadixCache,
    is_busy: Callable[[], bool],
    take_ends: Callable[[], None],
    *,
    seconds: float,
) -> bool:
    deadline = time.monotonic() + seconds
    while is_busy():
        if least_on_every_rank(cache, [int(time.monotonic() < deadline)]) == [0]:
            return False
        take_ends()
        time.sleep(LOOK_S)
    return True


def next_items(queue: Queue[Any], number: int | None) -> list[Any]:
    """Return the items that come next (all of them for None) without taking them."""
    with queue.mutex:
        return list(islice(queue.queue, number))

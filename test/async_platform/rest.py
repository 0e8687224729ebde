"""Checks an idle scheduler: it holds only the pages of its tree, and the tree can free them all.

SGLang counts device memory then, but accepts locked nodes, and runs the tree's own check only for
hybrid models. The scheduler learns of ends of copies and stores over several steps, so only lasting
findings are reported.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from report import Report

LOOK_S = 0.25
TIMES = 6
"""So often in a row the same is seen before it is told."""


@dataclass
class Rest:
    """Of one scheduler, on its thread."""

    report: Report
    orders: str | None = None
    """A file that exists once the tree is to give everything up; what it says is the order's name.
    Of one rank only: several must evict in the same step."""
    _next_look: float = 0.0
    _seen: tuple[list[str], int] = ([], 0)
    _done: str = ""

    def look(self, scheduler: Any) -> None:
        """Called whenever it has nothing to do."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        rests = is_at_rest(scheduler)
        found = leftovers(scheduler.tree_cache) if rests else []
        number = self._seen[1] + 1 if found == self._seen[0] else 1
        self._seen = (found, number)
        if found and number == TIMES:
            self.report.violation("left-over-at-rest", found=found)
        if rests and self.orders is not None and Path(self.orders).exists():
            order = Path(self.orders).read_text()
            if order != self._done:
                self._done = order
                self._drain(scheduler.tree_cache, order)

    def _drain(self, cache: Any, order: str) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        pool = cache.cache_controller.mem_pool_host
        cache.evict(EvictParams(num_tokens=cache.token_to_kv_pool_allocator.size))
        cache.evict_host(pool.logical_size)
        if taken := pool.logical_size - pool.available_size():
            self.report.violation("host-memory-lost", tokens=taken)
        if left := cache.evictable_size() + cache.protected_size():
            self.report.violation("device-memory-lost", tokens=left)
        self.report.ran(drained(order, os.getpid()))


def drained(order: str, pid: int) -> str:
    return f"drained {order} {pid}"


def is_at_rest(scheduler: Any) -> bool:
    cache = scheduler.tree_cache
    if getattr(cache, "storage", None) is None or not scheduler.is_fully_idle():
        return False
    queue = None if cache.tiering is None else cache.tiering.stores.queue
    waits = queue is not None and (queue.waiting_tokens or queue.flight_tokens)
    return not (waits or cache.is_under_way() or cache.session.any_holding_kv())


def leftovers(cache: Any) -> list[str]:
    found = []
    if locked := cache.protected_size():
        found.append(f"{locked} tokens are locked on the device")
    try:
        cache.sanity_check()
    except AssertionError as error:
        found.append(str(error))
    return found

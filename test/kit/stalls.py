"""How long other threads stand still while one works: whether it holds the GIL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

_NUM_TRIES = 20
_LOOK_S = 0.0002


def least_stall(work: Callable[[], Any], good: float) -> float:
    """Return for which share of the time of ``work`` another thread stood still at once. Of a few
    tries it is the least, until one is ``good``: this machine computes other tests as well."""
    looks, ended, least = [time.perf_counter()], threading.Event(), 1.0

    def look() -> None:
        while not ended.is_set():
            ended.wait(_LOOK_S)
            looks.append(time.perf_counter())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    for _ in range(_NUM_TRIES):
        begin = time.perf_counter()
        made = work()
        end = time.perf_counter()
        while looks[-1] < end:
            time.sleep(_LOOK_S)
        del made  # which takes the GIL
        seen = [begin, *(each for each in looks if begin < each < end), end]
        stall_s = max(after - before for before, after in zip(seen, seen[1:], strict=False))
        least = min(least, stall_s / (end - begin))
        if least <= good:
            break
    ended.set()
    thread.join()
    return least

"""``Durations``: how often something took how long, in buckets, without prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

__all__ = ["BOUNDS_S", "DurationCounts", "Durations"]

BOUNDS_S: Final = (
    (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)
    + (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
)  # fmt: skip
"""Upper bounds of the buckets in seconds, inclusive; what took longer has a bucket of its own."""


@dataclass(frozen=True, slots=True)
class DurationCounts:
    """What was recorded so far, by bucket: one more than ``BOUNDS_S`` has bounds."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    sums_s: tuple[float, ...] = (0.0,) * (len(BOUNDS_S) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def sum_s(self) -> float:
        return sum(self.sums_s)


class Durations:
    """Counts durations. Any thread; the lock is held for two additions, never across I/O, and what
    it keeps does not grow. The sum is kept by bucket: a reader that repeats each bucket's mean gets
    counts and sums exactly, however long it waited."""

    __slots__ = ("_counts", "_lock", "_sums_s")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sums_s = [0.0] * (len(BOUNDS_S) + 1)

    def record(self, seconds: float) -> None:
        """Count one. A clock that went back counts as no time."""
        seconds = max(seconds, 0.0)
        bucket = bisect_left(BOUNDS_S, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self._sums_s[bucket] += seconds

    def take(self) -> DurationCounts:
        """Return what was recorded since the start."""
        with self._lock:
            return DurationCounts(tuple(self._counts), tuple(self._sums_s))

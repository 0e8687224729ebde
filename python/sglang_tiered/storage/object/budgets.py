"""What may be spent: retries in proportion to requests, bytes and requests in a day."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DailyBudget", "RequestCost", "RetryBudget"]

_DAY_S = 24 * 3600
_BURST_SHARE = 0.1
_RETRIES_PER_REQUEST = 0.1
_MAX_SAVED_RETRIES = 10.0
_SMALL_BYTES = 64 << 10
_LARGE_BYTES = 1 << 20
_MIN_GAP = 16 << 10
_MAX_GAP = 4 << 20


class RetryBudget:
    """A tenth of all requests may be retries, and ten in a row: a store that fails altogether is
    not asked three times as often for it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saved = _MAX_SAVED_RETRIES

    def earn(self) -> None:
        """Note that a request succeeded."""
        with self._lock:
            self._saved = min(self._saved + _RETRIES_PER_REQUEST, _MAX_SAVED_RETRIES)

    def take(self) -> bool:
        """Return whether one retry may be made; then it is spent."""
        with self._lock:
            if self._saved < 1.0:
                return False
            self._saved -= 1.0
            return True


class RequestCost:
    """What a request costs before its first byte, in bytes that could be read meanwhile. Moving
    estimates of what was measured: small answers tell the latency, large ones the rate. Threads
    may race: a lost observation is no loss."""

    def __init__(self, gap_bytes: int) -> None:
        self._default = gap_bytes
        self._latency_s = 0.0
        self._bytes_per_s = 0.0

    def observe(self, num_bytes: int, took_s: float) -> None:
        if num_bytes <= _SMALL_BYTES:
            self._latency_s = _moved(self._latency_s, took_s)
        elif num_bytes >= _LARGE_BYTES and took_s > self._latency_s:
            self._bytes_per_s = _moved(self._bytes_per_s, num_bytes / (took_s - self._latency_s))

    @property
    def gap_bytes(self) -> int:
        """Return the gap between two ranges that takes as long to read as another request."""
        if not self._latency_s or not self._bytes_per_s:
            return self._default
        return min(max(int(self._latency_s * self._bytes_per_s), _MIN_GAP), _MAX_GAP)


def _moved(estimate: float, observed: float) -> float:
    return observed if not estimate else estimate + 0.1 * (observed - estimate)


class DailyBudget:
    """A token bucket that keeps what is spent in any 24 hours within ``per_day``; without one
    everything may be spent. A tenth is the largest burst, nine tenths flow in evenly. It starts
    full and may go below zero, as more can be spent than was foreseen. The owner's lock guards
    every call."""

    def __init__(self, per_day: int | None, clock: Callable[[], float]) -> None:
        self._per_day = per_day
        self._clock = clock
        self._content = (per_day or 0) * _BURST_SHARE
        self._at = clock()

    @property
    def available(self) -> float:
        """Return what may be spent now."""
        if self._per_day is None:
            return float("inf")
        inflow = (self._clock() - self._at) * self._per_day * (1 - _BURST_SHARE) / _DAY_S
        return min(self._per_day * _BURST_SHARE, self._content + inflow)

    def spend(self, amount: int) -> None:
        self._content, self._at = self.available, self._clock()
        self._content -= amount

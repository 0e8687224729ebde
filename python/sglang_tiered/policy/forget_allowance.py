"""``ForgetAllowance``: how many pages a server forgets in an hour.

Forgotten keys stay in the memory of every server that shares a bucket, for a week, up to a number
of keys. Beyond that number a server hides pages that it never was asked to hide. Nobody can tell
whether another server holds a page, so a request may name pages that never were; it must not take
what the other tenants have.

Pure: not thread-safe, and the caller says what time it is.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["MAX_KEYS", "ForgetAllowance"]

MAX_KEYS = 1 << 17
"""In any hour: a quarter of the keys that a server remembers."""

WINDOW_S = 3600.0


class ForgetAllowance:
    """Counts page keys by when they were forgotten."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._taken: deque[tuple[float, int]] = deque()
        self._num_taken = 0

    def wait_s(self, num_keys: int, now: float) -> float:
        """Return in how many seconds so many keys may be forgotten: 0 now, infinity never."""
        if num_keys > self._max_keys:
            return math.inf
        # Both ends by one sum: as differences they round apart, and a wait of 0 would be no leave.
        while self._taken and self._taken[0][0] + WINDOW_S <= now:
            self._num_taken -= self._taken.popleft()[1]
        too_many = self._num_taken + num_keys - self._max_keys
        wait_s = 0.0
        for taken_at, num in self._taken:
            if too_many <= 0:
                break
            too_many -= num
            wait_s = (taken_at + WINDOW_S) - now
        return wait_s

    def take(self, num_keys: int, now: float) -> None:
        """Note that so many keys are forgotten."""
        self._taken.append((now, num_keys))
        self._num_taken += num_keys

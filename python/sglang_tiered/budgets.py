"""What may be spent in a day, and what may be forgotten in an hour. Pure: the caller says what time
it is."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


DAY_S = 24 * 3600
BURST_SHARE = 0.1
WORTH_SHARE = 1 / 16  # of the burst


MAX_KEYS = 1 << 17
"""In any hour: a quarter of the keys that a server remembers."""

WINDOW_S = 3600.0


class DailyBudget:
    """A token bucket that keeps what is spent in any 24 hours within ``per_day``; with None there
    is no bound.

    A window can use what the bucket held at its start and what flowed in since, so the two shares
    add up to one day. The bucket (the largest burst) is a tenth, and nine tenths flow in evenly.
    The bucket starts full, so each restart may add a tenth. More may be spent than is available: it
    then goes below zero, until the excess has flowed in again. One thread spends at a time.
    """

    def __init__(self, per_day: float | None, clock: Callable[[], float]) -> None:
        if per_day is not None and per_day <= 0:
            raise ValueError(f"a daily budget of {per_day} lets nothing be spent")
        self._clock = clock
        self._burst = math.inf if per_day is None else per_day * BURST_SHARE
        self._per_s = 0.0 if per_day is None else per_day * (1 - BURST_SHARE) / DAY_S
        self._state = self._burst, clock()  # content, time; replaced as one value, for readers

    def spend(self, amount: int) -> None:
        self._state = self.available - amount, self._clock()

    @property
    def available(self) -> float:
        """Return what may be spent now; negative if more was."""
        content, at = self._state
        return min(self._burst, content + (self._clock() - at) * self._per_s)

    @property
    def burst(self) -> float:
        """The most that is ever available."""
        return self._burst

    def holds(self, amount: float) -> bool:
        """Whether so much may be spent now, and what is left is not better saved up."""
        return self.available >= min(self._burst, max(amount, self._burst * WORTH_SHARE))

    @property
    def pressure(self) -> float:
        """Return the used share of the bucket: 0 while it is full; from 1 on nothing is left."""
        return 1 - self.available / self._burst


class ForgetAllowance:
    """How many pages a server forgets in an hour: page keys, by when they were forgotten. Not
    thread-safe.

    Forgotten keys stay in the memory of every server that shares a bucket, for a week, up to a
    number of keys. Beyond that number a server hides pages that it never was asked to hide. Nobody
    can tell whether another server holds a page, so a request may name pages that never were; it
    must not take what the other tenants have.
    """

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

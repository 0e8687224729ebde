"""What may be spent in a day. The clock is passed in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DailyBudget"]

DAY_S = 24 * 3600
BURST_SHARE = 0.1
WORTH_SHARE = 1 / 16  # of the burst


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

"""Random numbers from published quantiles, the same from the same seed on every machine."""

from __future__ import annotations

import bisect
import math
import random
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Draws", "Quantiles"]

_NORMAL = statistics.NormalDist()


class Quantiles:
    """A distribution known at some quantiles; between two of them evenly spread, or, where both are
    positive, its logarithm."""

    def __init__(self, points: Mapping[float, float]) -> None:
        self._shares = list(points)
        self._values = list(points.values())

    def at(self, share: float) -> float:
        right = bisect.bisect_right(self._shares, share)
        if right == 0:
            return self._values[0]
        if right == len(self._shares):
            return self._values[-1]
        low, high = self._shares[right - 1], self._shares[right]
        part = (share - low) / (high - low)
        before, after = self._values[right - 1], self._values[right]
        if before > 0:
            return before * math.exp(part * math.log(after / before))
        return before + part * (after - before)


class Draws:
    """Built on ``random.Random.random`` alone, whose numbers Python promises not to change."""

    def __init__(self, *seed: int) -> None:
        self._random = random.Random(":".join(map(str, seed)))

    def share(self) -> float:
        """From 0 to 1, without 0."""
        return 1.0 - self._random.random()

    def below(self, number: int) -> int:
        return min(int(self._random.random() * number), number - 1)

    def happens(self, chance: float) -> bool:
        return self._random.random() < chance

    def of(self, quantiles: Quantiles) -> float:
        return quantiles.at(self._random.random())

    def exponential(self, mean: float) -> float:
        return -mean * math.log(self.share())

    def lognormal(self, median: float, sigma: float) -> float:
        share = min(max(self._random.random(), 1e-12), 1 - 1e-12)
        return median * math.exp(sigma * _NORMAL.inv_cdf(share))

    def index(self, cumulative: Sequence[float]) -> int:
        """An index with a chance in proportion to its step of ``cumulative``."""
        return bisect.bisect_left(cumulative, self.share() * cumulative[-1])

"""``OnlineCost``: seconds as a sum of priced parts, learnt from what things really took.

A cost is ``level * (price_1 * feature_1 + price_2 * feature_2 + ...)``. The level follows the last
few observations, in logarithms, so that a disk that becomes a hundred times slower is believed
after two or three, and one that recovers as soon. The prices say how the parts compare (the fixed
part with the part per byte) and move slowly, by least squares with exponential forgetting (Haykin,
Adaptive Filter Theory) on relative errors and with no price below zero. Both start from a prior,
which keeps deciding about parts that no observation speaks of.

Pure arithmetic on a few numbers, some 50 microseconds an observation. Not thread-safe.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["OnlineCost"]

PRIOR_WEIGHT = 0.05
"""Of each prior price, in observations of that price alone."""

MAX_SURPRISE = 2.0
"""How far from its expectation an observation can be for the prices; what is beyond is a change
of level."""

MAX_LEVEL_STEP = math.log(1000)
"""One observation's largest claim about the level: a clock that jumped must not decide alone."""

SWEEPS = 12
"""Of coordinate descent, from the last solution on."""

TINY_S = 1e-9


class OnlineCost:
    """``prior`` holds a price per feature, ``typical`` the size of each feature in an ordinary
    case: together they say what share a price has. An observation counts half for the level after
    ``level_half_life`` others, for the prices after ``price_half_life``."""

    def __init__(
        self,
        prior: Sequence[float],
        typical: Sequence[float],
        *,
        level_half_life: float,
        price_half_life: float,
    ) -> None:
        if len(prior) != len(typical) or not prior:
            raise ValueError(f"{len(prior)} prices do not fit {len(typical)} features")
        if min(prior) < 0 or min(typical) <= 0 or not any(prior):
            raise ValueError("prices must not be negative, and typical sizes must be positive")
        self._level_gain = 1 - 0.5 ** (1 / level_half_life)
        self._kept = 0.5 ** (1 / price_half_life)
        self._prior = tuple(prior)
        total = sum(p * t for p, t in zip(prior, typical, strict=True))
        # A prior price counts as an observation of its own part, relative to the typical cost.
        self._ridge = tuple(PRIOR_WEIGHT * (t / total) ** 2 for t in typical)
        self._squares = [[0.0] * len(prior) for _ in prior]
        self._targets = [0.0] * len(prior)
        self._prices = self._prior
        self._log_level = 0.0
        self.num_observed = 0

    @property
    def prices(self) -> tuple[float, ...]:
        """Seconds per unit of each feature, as believed now."""
        level = math.exp(self._log_level)
        return tuple(level * price for price in self._prices)

    def predict(self, features: Sequence[float]) -> float:
        """Expected seconds."""
        return math.exp(self._log_level) * self._shape(features)

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Something with these features took so long. Nonsense (no time, no work) is ignored."""
        if not 0 < seconds < math.inf or not any(features):
            return
        expected = max(TINY_S, self._shape(features))
        surprise = math.log(seconds / expected) - self._log_level
        gain = max(self._level_gain, 1 / (1 + self.num_observed))
        self._log_level += gain * max(-MAX_LEVEL_STEP, min(MAX_LEVEL_STEP, surprise))
        self.num_observed += 1
        ratio = seconds / expected / math.exp(self._log_level)
        self._learn_prices(features, expected, min(MAX_SURPRISE, max(1 / MAX_SURPRISE, ratio)))

    def _shape(self, features: Sequence[float]) -> float:
        return sum(p * f for p, f in zip(self._prices, features, strict=True))

    def _learn_prices(self, features: Sequence[float], expected: float, ratio: float) -> None:
        weight = 1 / (expected * expected)
        for i, row in enumerate(self._squares):
            for j in range(len(row)):
                row[j] = self._kept * row[j] + weight * features[i] * features[j]
            self._targets[i] *= self._kept
            self._targets[i] += weight * features[i] * expected * ratio
        values = list(self._prices)
        for _ in range(SWEEPS):
            for i, row in enumerate(self._squares):
                others = sum(row[j] * value for j, value in enumerate(values) if j != i)
                top = self._targets[i] + self._ridge[i] * self._prior[i] - others
                values[i] = max(0.0, top / (row[i] + self._ridge[i]))
        if any(values):
            self._prices = tuple(values)

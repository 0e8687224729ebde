"""What a replay counts: one object per policy, shared by its servers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

TIERS = ("device", "host", "nvme")

_STEPS = 100  # bins per factor of e: a percentile is right to 0.5%
_LEAST_S = 1e-6
_NUM_BINS = 2800  # up to 1.4 million seconds


class Distribution:
    """Collects seconds in bins of 1% each: bounded memory whatever is added."""

    def __init__(self) -> None:
        self._bins = [0] * _NUM_BINS
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0

    def add(self, seconds: float) -> None:
        position = int(math.log(max(seconds, _LEAST_S) / _LEAST_S) * _STEPS)
        self._bins[min(position, _NUM_BINS - 1)] += 1
        self.count += 1
        self.sum_s += seconds
        self.max_s = max(self.max_s, seconds)

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the middle of the bin in which that share of the values is reached."""
        wanted = max(1, math.ceil(share * self.count))
        reached = 0
        for position, number in enumerate(self._bins):
            reached += number
            if number and reached >= wanted:
                return min(self.max_s, _LEAST_S * math.exp((position + 0.5) / _STEPS))
        return 0.0

    def curve(self) -> list[tuple[float, float]]:
        """Return points of the cumulative distribution: seconds, share at most that long."""
        points = []
        reached = 0
        for position, number in enumerate(self._bins):
            if number:
                reached += number
                points.append((_LEAST_S * math.exp((position + 1) / _STEPS), reached / self.count))
        return points

    def summary(self) -> dict[str, float]:
        return {
            "num": self.count,
            "mean_s": self.mean_s,
            **{f"p{round(q * 100)}_s": self.quantile(q) for q in (0.5, 0.9, 0.99)},
        }


@dataclass
class Totals:
    """Counts of all servers of one policy. A unit is the part of a prompt that tiers move; bytes
    are payload unless the name says more."""

    num_requests: int = 0
    num_units: int = 0
    num_tokens: int = 0
    units_hit: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    tokens_hit: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    units_missed: int = 0
    tokens_missed: int = 0
    host_bytes_loaded: int = 0  # host to device
    nvme_bytes_loaded: int = 0
    nvme_bytes_wasted: int = 0  # loaded, and evicted or cut off before use
    host_bytes_stored: int = 0
    nvme_bytes_stored: int = 0
    nvme_bytes_written: int = 0  # to the device: headers, padding and reinsertion included
    nvme_bytes_reinserted: int = 0
    units_lost_unspilled: int = 0  # left device memory without a copy below
    units_lost_unstored: int = 0  # left host memory without a copy below
    units_dropped: dict[str, int] = field(default_factory=dict)  # by admission's outcome
    loads_begun: int = 0
    loads_put_off: int = 0
    loads_declined: int = 0
    loads_truncated: int = 0
    loads_cut_off: int = 0  # the request went on without the rest
    ttft: Distribution = field(default_factory=Distribution)
    ttft_returning: Distribution = field(default_factory=Distribution)
    queue_s: float = 0.0
    prefill_s: float = 0.0
    prefill_saved_s: float = 0.0
    last_s: float = 0.0  # simulated time of the last first token

    @property
    def num_units_hit(self) -> int:
        return sum(self.units_hit.values())

    @property
    def num_tokens_hit(self) -> int:
        return sum(self.tokens_hit.values())

    @property
    def hit_rate(self) -> float:
        """Of units."""
        return self.num_units_hit / self.num_units if self.num_units else 0.0

    @property
    def token_hit_rate(self) -> float:
        return self.num_tokens_hit / self.num_tokens if self.num_tokens else 0.0

    @property
    def write_amplification(self) -> float:
        """Return bytes given to the device over bytes stored; 0 when nothing was."""
        return self.nvme_bytes_written / self.nvme_bytes_stored if self.nvme_bytes_stored else 0.0

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when hits and misses are not what was asked for."""
        assert self.num_units_hit + self.units_missed == self.num_units
        assert self.num_tokens_hit + self.tokens_missed == self.num_tokens
        assert self.ttft.count == self.num_requests, (self.ttft.count, self.num_requests)
        assert all(count >= 0 for count in (*self.units_hit.values(), self.units_missed))

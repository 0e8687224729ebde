"""Policies beside each other on the same requests, at loads that do not depend on them.

Load 1 is where routing in turn keeps the servers that prefill busy for 80% of the time: with a
prefill running, or waiting. It is found first, and the other loads are multiples of its speed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_tiered.errors import ConfigError
from sglang_tiered_lab.trace.cluster.simulation import run_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered_lab.trace.cluster.outcome import Outcome
    from sglang_tiered_lab.trace.cluster.plan import Plan
    from sglang_tiered_lab.trace.replay.server import Request


BUSY = 0.8
_CLOSE, _NEAR = 0.01, 0.2
_TRIES = 10


def speed_where_busy(plan: Plan, requests: Sequence[Request], busy: float = BUSY) -> float:
    """Return the speed at which ``in-turn`` without admission is busy for this share, within 1% or
    as near as requests let it come. Raises ``ConfigError`` where it cannot be near."""
    plan = dataclasses.replace(plan, policy="in-turn", admission="none", changes=())
    low, high, speed = 0.0, float("inf"), 1.0
    for _ in range(_TRIES):
        seen = run_cluster(dataclasses.replace(plan, speed=speed), requests).busy
        if abs(seen - busy) <= _CLOSE * busy:
            break
        if seen < busy:
            low = speed
        else:
            high = speed
        # Below saturation the busy share is about proportional to the speed.
        guess = speed * min(4.0, busy / max(seen, 1e-3))
        speed = guess if low < guess < high and seen < 0.95 else (low + min(high, 2 * speed)) / 2
    else:
        if abs(seen - busy) > _NEAR:
            raise ConfigError(
                f"at no speed do these {len(requests):,} requests keep {len(plan.members):,} "
                f"servers busy for {busy:.0%} of the time, which is load 1; take more requests or "
                "fewer servers, or leave out --loads."
            )
    return speed


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """``plan`` at every load with every policy. Without ``loads`` at the speed of ``plan``."""

    plan: Plan
    requests: Sequence[Request]
    policies: Sequence[str]
    loads: Sequence[float] = ()

    @property
    def num_runs(self) -> int:
        return len(self.policies) * max(1, len(self.loads))

    def run(self, step: Callable[[int], None] = lambda _: None) -> Iterator[tuple[float, Outcome]]:
        """Yield each load with its outcome; ``step`` is told of runs as they end."""
        unit = speed_where_busy(self.plan, self.requests) if self.loads else self.plan.speed
        for load in self.loads or (1.0,):
            for policy in self.policies:
                plan = dataclasses.replace(self.plan, policy=policy, speed=load * unit)
                yield load, run_cluster(plan, self.requests)
                step(1)


def ratios(found: Sequence[tuple[float, Outcome]]) -> dict[str, dict[str, Any]]:
    """Mean TTFT of ``cost`` over that of each other policy: the value at load 1 (or the only one),
    least and most over the loads."""
    by_load: dict[float, dict[str, float]] = {}
    for load, outcome in found:
        by_load.setdefault(load, {})[outcome.plan.policy] = outcome.mean_ttft_s
    main = 1.0 if 1.0 in by_load else next(iter(by_load), 1.0)
    names = [name for name in by_load.get(main, {}) if name != "cost"]
    if "cost" not in by_load.get(main, {}):
        return {}
    made = {}
    for name in names:
        values = {load: row["cost"] / row[name] for load, row in by_load.items()}
        made[f"cost_ttft_over_{name.replace('-', '_')}"] = {
            "value": values[main],
            "min": min(values.values()),
            "max": max(values.values()),
            "n": len(values),
        }
    return made

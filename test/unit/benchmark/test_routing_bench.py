"""Figures of what measures routing: pairs of one seed, the median with the least and the most."""

from __future__ import annotations

from typing import Any

import pytest

from bench_routing import CLUSTERS, GRID, over_peers
from bench_routing_front import ratios
from sglang_tiered_lab.trace.cluster.routers import Tuning

TIMES = {"cost": (1.0, 4.0, 3.0), "dynamo": (2.0, 2.0, 2.0), "llm-d": (2.0, 8.0, 3.0)}
ROWS = [
    {"seed": seed, "load": load, "policy": policy, "mean_ttft_s": load * times[seed]}
    for policy, times in TIMES.items()
    for load in (1.0, 1.2)
    for seed in range(3)
]


def test_a_ratio_pairs_what_one_seed_gave() -> None:
    found = over_peers(ROWS, "load")
    assert set(found) == {f"cost_over_{one}_{load}" for one in TIMES for load in ("1", "1.2")} - {
        "cost_over_cost_1",
        "cost_over_cost_1.2",
    }
    one = found["cost_over_dynamo_1"]
    assert one == pytest.approx({"value": 1.5, "min": 0.5, "max": 2.0, "n": 3})
    one = found["cost_over_llm-d_1.2"]
    assert one == pytest.approx({"value": 0.5, "min": 0.5, "max": 1.0, "n": 3})


def test_everybody_is_tuned_and_begins_as_published() -> None:
    published = Tuning()
    assert set(GRID) == {"cache-aware", "dynamo", "llm-d", "cost"}
    for settings in GRID.values():
        assert {getattr(published, key) == value for key, value in settings[0].items()} == {True}
    for parts, _ in CLUSTERS.values():
        assert sum(parts.values()) == 16


def test_ratios_are_of_equal_windows() -> None:
    def row(arm: str, seed: int, seconds: float) -> dict[str, Any]:
        place = {"trace": "synthetic", "seed": seed, "load": 1.0, "arm": arm}
        return {**place, "mean_ttft_s": seconds, "p99_ttft_s": 2 * seconds, "within": 1 / seconds}

    rows = [row("cost", 0, 1.0), row("other", 0, 2.0), row("cost", 1, 3.0), row("other", 1, 4.0)]
    found = ratios([*rows, row("other", 2, 9.0)])
    ratio = {"value": 0.625, "min": 0.5, "max": 0.75, "n": 2}
    assert found["synthetic_cost_over_other_1_mean_ttft"] == ratio
    assert found["synthetic_other_1_within_limit"]["value"] == 0.25

"""A modelled fleet answers over HTTP as real servers do, and counts what it is asked."""

from __future__ import annotations

from typing import Any

from bench_routing_front import ratios


def test_ratios_are_of_equal_windows() -> None:
    def row(arm: str, seed: int, seconds: float) -> dict[str, Any]:
        place = {"trace": "synthetic", "seed": seed, "load": 1.0, "arm": arm}
        return {**place, "mean_ttft_s": seconds, "p99_ttft_s": 2 * seconds, "within": 1 / seconds}

    rows = [row("cost", 0, 1.0), row("other", 0, 2.0), row("cost", 1, 3.0), row("other", 1, 4.0)]
    found = ratios([*rows, row("other", 2, 9.0)])
    ratio = {"value": 0.625, "min": 0.5, "max": 0.75, "n": 2}
    assert found["synthetic_cost_over_other_1_mean_ttft"] == ratio
    assert found["synthetic_other_1_within_limit"]["value"] == 0.25

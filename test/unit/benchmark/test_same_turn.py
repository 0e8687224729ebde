"""Each place of ``same_turn`` is what the answer says, or there is no figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.samples import make_bench, sample
from serving_bench import same_turn
from serving_bench.bench import Bench
from serving_bench.client import Sample
from serving_bench.same_turn import COMPUTED, PLACES, SIZES, found_in
from serving_bench.setting import PAGE_SIZE, TINY

HISTORY = 2 * PAGE_SIZE


def asked(label: str = "a", ttft_s: float = 1.0, output: int = 1, **cached: int) -> Sample:
    return sample(label, ttft_s=ttft_s, reusable=HISTORY, output=(output,), **cached)


@pytest.mark.parametrize(
    ("cached", "loaded", "place"),
    [
        ({}, {}, COMPUTED),
        ({"device": HISTORY}, {}, "device"),
        ({"host": HISTORY}, {"nvme": 1}, "host"),
        ({"storage": HISTORY}, {"nvme": 2, "peer": 0}, "nvme"),
        ({"storage": HISTORY}, {"nvme": 1, "peer": 2}, "peer"),  # and a probe of the disk
        ({"storage": HISTORY}, {"bucket": 2}, "bucket"),
        ({"storage": HISTORY}, {"nvme": 2, "peer": 2}, None),
        ({"storage": HISTORY}, {"nvme": 1, "peer": 1}, None),
        ({"storage": PAGE_SIZE}, {"nvme": 2}, None),
        ({"host": PAGE_SIZE, "storage": PAGE_SIZE}, {"nvme": 1}, None),
    ],
)
def test_a_place_is_one_that_served_all(
    cached: dict[str, int], loaded: dict[str, int], place: str | None
) -> None:
    assert found_in(asked(**cached), loaded, HISTORY) == place


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path, TINY, "tiered")


def measure(bench: Bench, rounds: Iterator[tuple[Any, str]]) -> None:
    servers = SimpleNamespace(sizes=SIZES["tiny"], fillers=[], of=lambda _: SimpleNamespace(url=""))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(same_turn, "ask_each", lambda *_: [])
        patched.setattr(same_turn, "_ask_round", lambda *_: next(rounds))
        same_turn._measure(bench, servers, PLACES)  # type: ignore[arg-type]


def one_round(number: int, output: int = 1) -> dict[str, list[Sample]]:
    """Computing takes 4 s, a host copy 1 s; the host's answer is ``output``."""
    taken = {place: [asked(f"turn/{number}", 2.0)] for place in PLACES}
    taken[COMPUTED] = [asked(f"turn/{number}", 4.0)]
    taken["host"] = [asked(f"turn/{number}", 1.0, output)]
    return taken


def test_a_round_of_another_place_is_left_out(bench: Bench) -> None:
    wrong = one_round(9)
    wrong["host"] = [dataclasses.replace(wrong["host"][0], ttft_s=400.0)]
    taken = [(one_round(0), ""), (one_round(1), ""), (wrong, "host was nvme"), (one_round(2), "")]
    measure(bench, iter(taken))
    ratio = bench.report.ratios["same_turn_host_ttft_over_computed"]
    assert (ratio["value"], ratio["max"], ratio["n"]) == (0.25, 0.25, 2)
    assert bench.report.ratios["same_turn_computed_ms_p99"]["value"] == 4000.0
    assert bench.report.raw["same_turn"]["left_out"] == ["host was nvme"]

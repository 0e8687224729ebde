"""The parts of the serving benchmark that decide what a figure says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.samples import make_bench, sample
from serving_bench.disk_added import _Pairs, _report
from serving_bench.measures import (
    Outcome,
    hit_rate,
    hits_by_tier,
    mean_ttft,
    reusable_tokens,
    round_quotients,
    throughput,
    ttft_percentile,
    unequal_labels,
)
from serving_bench.setting import QUICK, Geometry
from serving_bench.systems import (
    SYSTEMS,
    launch_arguments,
)


def test_a_wrong_token_on_one_system_is_named() -> None:
    right = {"stock": [sample("a"), sample("b")], "tiered": [sample("b"), sample("a")]}
    wrong = {"stock": [sample("c")], "tiered": [sample("c", output=(1, 3))]}
    alone = {"stock": [sample("a"), sample("b")], "tiered": [sample("a")]}
    assert unequal_labels([right]) == []
    assert unequal_labels([right, wrong]) == ["c"]
    assert unequal_labels([alone]) == ["b"], "one system was not asked"


def test_the_hit_rate_counts_whole_pages_seen_before() -> None:
    assert reusable_tokens(sample(prompt=200, reusable=150)) == 128
    # The last token of a prompt is always computed, so its page never hits.
    assert reusable_tokens(sample(prompt=128, reusable=128)) == 64
    taken = [sample(reusable=150, host=64), sample(reusable=150, storage=128), sample()]
    assert hit_rate(taken) == 0.75
    assert hits_by_tier(taken) == {"device": 0, "host": 64, "storage": 128}
    assert hit_rate([sample()]) == 0.0


def test_noise_above_the_divisor_leaves_no_ratio(tmp_path: Path) -> None:
    def pairs(ours_s: float, theirs_s: float = 0.1, host: int = 128) -> dict[str, _Pairs]:
        cold = [sample(ttft_s=0.4 + theirs_s, reusable=150, storage=128)]
        warm = [sample(ttft_s=0.4, reusable=150, host=host)]
        ours = [sample(ttft_s=0.4 + ours_s, reusable=150, storage=128)]
        taken = _Pairs(
            disk=[{"hicache-file": cold, "tiered": ours}],
            host=[{"hicache-file": warm, "tiered": warm}],
        )
        return dict.fromkeys(("one", "many", "restart"), taken)

    # A disk that seems to add less than nothing to ours shows in the spread; theirs is divided by.
    cases = (pairs(0.05), 3), (pairs(-0.01), 3), (pairs(0.05, -0.01), 0), (pairs(0.05, host=64), 0)
    for taken, ratios in cases:
        bench = make_bench(tmp_path, QUICK, "stock", "tiered")
        _report(bench, taken)
        assert len(bench.report.ratios) == ratios
        assert len(bench.report.notes) == 3 - ratios


def test_ratios_divide_tiered_by_others_per_round() -> None:
    rounds = [
        {"stock": [sample(ttft_s=2.0), sample(ttft_s=4.0)], "tiered": [sample(ttft_s=0.3)]},
        {"stock": [sample(ttft_s=1.0)], "tiered": [sample(ttft_s=0.5)]},
    ]
    assert round_quotients(rounds, "stock", mean_ttft) == pytest.approx([0.1, 0.5])
    assert ttft_percentile(0.99)([sample(ttft_s=t / 10) for t in range(1, 201)]) == 19.8


def test_throughput_counts_the_whole_runs_time() -> None:
    both = [sample(started_s=1.0, latency_s=2.0), sample(started_s=2.0, latency_s=3.0)]
    assert throughput(both) == pytest.approx(2 * 202 / 4.0)


def test_every_system_gets_equal_memory_and_cap(tmp_path: Path) -> None:
    geometry = Geometry(device_tokens=4096, host_ratio=2, nvme_bytes=123 << 20)
    given = {name: launch_arguments(name, geometry, tmp_path) for name in SYSTEMS}
    for name, arguments in given.items():
        assert arguments[arguments.index("--max-total-tokens") + 1] == "4096"
        assert ("--tier-mode" in arguments) == (name != "tiered")
        if name != "stock":
            assert arguments[arguments.index("--hicache-ratio") + 1] == "2"
    cap = str(123 << 20)
    assert given["tiered"][given["tiered"].index("--tier-nvme-bytes") + 1] == cap
    assert f'"max_size": {cap}' in given["hicache-file"][-1]
    assert "--hicache-storage-backend" not in given["hicache-host"]
    # A policy of ours would not be SGLang's default.
    assert "--hicache-storage-prefetch-policy" not in given["hicache-file"]


def test_different_answers_leave_no_ratio_and_fail(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, QUICK, "stock", "tiered")
    wrong = {"stock": [sample("c")], "tiered": [sample("c", output=(1, 3))]}
    assert not bench.conclude("x", Outcome(rounds=[wrong]))
    assert "1 of 2 answers are not the same" in bench.failures[0]
    unequal = bench.report.raw["x"]["unequal"]["c"]
    assert [unequal[name][0]["output_ids"] for name in unequal] == [(1, 2), (1, 3)]
    # Answers beside the measured ones count as well.
    right = {"stock": [sample("a")], "tiered": [sample("a")]}
    assert bench.conclude("y", Outcome(rounds=[right]))
    assert not bench.conclude("z", Outcome(rounds=[right], beside={"first": [wrong]}))
    assert len(bench.failures) == 2


def test_bytes_written_are_compared_with_new_kv(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, QUICK, "stock", "tiered")
    right = {"stock": [sample("a")], "tiered": [sample("a")]}
    outcome = Outcome(rounds=[right], new_tokens=100)
    outcome.moved_bytes = {"stock": (0, 0), "tiered": (5, 150_000)}
    bench.conclude("x", outcome)
    figures = bench.report.raw["x"]["systems"]
    assert figures["tiered"]["write_amplification"] == 1.5
    assert "write_amplification" not in figures["stock"]
    assert figures["tiered"]["ttft_p99_s"] == 1.0

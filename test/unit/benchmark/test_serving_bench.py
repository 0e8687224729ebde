"""The parts of the serving benchmark that decide what a figure says."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.commands import ran
from kit.samples import make_bench, sample
from serving_bench.client import (
    Request,
    RequestFailedError,
    cached_by_tier,
    keep_token_ids,
    make_sample,
)
from serving_bench.conversations import make_conversations
from serving_bench.disk_added import _Pairs, _report, share_from
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
from serving_bench.plots import running_hit_rate
from serving_bench.setting import FULL, QUICK, Geometry, context_lengths
from serving_bench.systems import (
    SYSTEMS,
    Fleet,
    UnequalSystemsError,
    launch_arguments,
    parse_metrics,
)

SCRIPT = Path(__file__).parents[3] / "benchmark" / "bench_serving.py"


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


def test_a_side_that_missed_a_due_hit_shows() -> None:
    taken = [sample(reusable=150, storage=128), sample(reusable=150, host=128)]
    assert share_from(taken, "host", "device") == 0.5
    assert share_from(taken, "storage") == 0.5


def test_one_slow_turn_does_not_decide_disk_time() -> None:
    pairs = _Pairs(
        disk=[{"tiered": [sample(ttft_s=0.5), sample(ttft_s=9.0), sample(ttft_s=0.6)]}],
        host=[{"tiered": [sample(ttft_s=0.4), sample(ttft_s=0.2), sample(ttft_s=0.4)]}],
    )
    assert pairs.added_s("tiered") == pytest.approx([0.2])


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


def test_hit_rate_over_time_skips_requests_without_reuse() -> None:
    taken = [
        sample(started_s=5.0),
        sample(started_s=7.0, reusable=150, host=128),
        sample(started_s=6.0, reusable=150),
    ]
    assert running_hit_rate(taken) == ([2.0, 3.0], [0.0, 0.5])
    assert running_hit_rate([sample()]) == ([], [])


def test_the_working_set_has_its_tables_size() -> None:
    for setting in (QUICK, FULL):
        wanted = setting.main.memory_tokens * setting.working_set
        lengths = context_lengths(random.Random(1), setting.contexts, wanted)
        assert wanted <= sum(lengths) < wanted + setting.contexts[1]
        assert setting.contexts[0] <= min(lengths)
        assert max(lengths) <= setting.contexts[1] <= setting.main.device_tokens // 2
        cap = setting.with_nvme(1000).main.nvme_bytes
        assert cap >= sum(lengths) * 1000, "the store must be able to hold all of it"
        # What one round loads and what pushes it off the device both fit in host memory.
        loaded = 8 * (setting.disk_contexts[1] + setting.num_new) + 2 * setting.disk.device_tokens
        assert loaded <= setting.disk.host_tokens + setting.disk.device_tokens


def test_two_turns_share_only_their_history() -> None:
    (one, other) = make_conversations("x", 1, 2)
    first = one.turn(100, 4)
    assert first.prompt != other.turn(100, 4).prompt
    one.answered(first, sample(output=(40, 41)))
    second, third = one.turn(50, 4, "/disk"), one.turn(50, 4, "/host")
    assert second.prompt[:102] == third.prompt[:102] == (*first.prompt, 40, 41)
    assert second.prompt[102:] != third.prompt[102:]
    assert second.num_reusable == 102
    assert len({first.label, second.label, third.label}) == 3


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


def test_a_host_tier_of_another_size_is_refused() -> None:
    geometry = Geometry(device_tokens=4096, host_ratio=2)
    fleet = Fleet(geometry)
    for name, tokens in (("stock", 0), ("tiered", 8256)):
        fleet.systems[name] = SimpleNamespace(host_tokens=tokens)  # type: ignore[assignment]
    assert fleet.check_equal_memory() == {"stock": 0, "tiered": 8256}
    fleet.systems["tiered"].host_tokens = 8192  # type: ignore[misc]
    with pytest.raises(UnequalSystemsError, match="8192 host tokens where 8256"):
        fleet.check_equal_memory()


def test_whoever_was_last_is_first_next_time() -> None:
    fleet = Fleet(Geometry(64, 1))
    for name in "abc":
        fleet.systems[name] = SimpleNamespace(name=name)  # type: ignore[assignment]
    order = [[system.name for system in fleet.in_turn("ab", turn)] for turn in range(2)]
    assert order == [["a", "b"], ["b", "a"]]


def test_metrics_and_tiers_of_answers_are_read() -> None:
    text = '# HELP x\nsglang:kv_used_tokens{model_name="m",tp_rank="0"} 64.0\nsglang:other 1e3\n'
    assert parse_metrics(text) == {"sglang:kv_used_tokens": 64.0, "sglang:other": 1000.0}
    details = {"device": 64, "storage": None, "storage_backend": "file"}
    assert cached_by_tier(details) == {"device": 64, "host": 0, "storage": 0}
    assert sum(cached_by_tier(None).values()) == 0


def test_token_ids_of_the_last_chunk_are_kept() -> None:
    seen = []
    upstream = SimpleNamespace(_record_server_prompt_len=lambda data, _: seen.append(data))
    keep_token_ids(upstream)
    result = SimpleNamespace(success=True, ttft=0.5, itl=[0.1], latency=0.6)
    result.cached_tokens_details = {"host": 64}
    for chunk in ({"output_ids": [7]}, {"output_ids": [7, 8]}, {"meta_info": {}}):
        upstream._record_server_prompt_len(chunk, result)
    assert len(seen) == 3
    request = Request("r", (1, 2, 3), 2, num_reusable=1)
    taken = make_sample(request, 9.0, result)
    assert (taken.output_ids, taken.cached["host"], taken.ended_s) == ((7, 8), 64, 9.6)


def test_an_answer_that_breaks_off_is_no_sample() -> None:
    result = SimpleNamespace(success=True, error="", output_ids=(7,))
    with pytest.raises(RequestFailedError, match="gave 1 tokens, but 2"):
        make_sample(Request("r", (1,), 2), 0.0, result)
    result = SimpleNamespace(success=False, error="Traceback\nConnectionResetError: gone\n")
    with pytest.raises(RequestFailedError, match="r failed: ConnectionResetError: gone"):
        make_sample(Request("r", (1,), 2), 0.0, result)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "returning,nothing"], "no scenario nothing; there are returning"),
        (["--systems", "stock,vllm"], "no system vllm; there are stock"),
        (["--new-tokens", "0"], "--new-tokens 0 is not between 1 and 96"),
        (["--new-tokens", "97"], "--new-tokens 97 is not between 1 and 96"),
        (["--neighbour", "9999"], "--neighbour 9999 is not between 0 and"),
        (["--systems", "stock,hicache-file"], "must name tiered"),
        (["--systems", "tiered"], "at least one other"),
        (["--only", "mooncake", "--trace", "absent.jsonl"], "absent.jsonl"),
        (["--directory", "/dev/shm"], "tmpfs"),
        (["--shape", "3m"], "invalid choice: '3m'"),
    ],
)
def test_an_impossible_setting_is_refused_before_any_start(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    if "/dev/shm" in arguments and not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm here")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("SGLANG_TIERED_DATA", None)
    result = ran(sys.executable, str(SCRIPT), "--quick", *arguments, env=environment, timeout_s=100)
    assert result.returncode in (1, 2)
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "nothing", "../bench_serving", "serving.py"])
def test_an_unknown_benchmark_is_answered_with_a_list(name: str) -> None:
    result = ran(str(SCRIPT.parents[1] / "scripts" / "bench"), name)
    assert result.returncode == 2
    assert result.stderr == (
        f"scripts/bench: no benchmark '{name}'; there are "
        f"{', '.join(sorted(p.stem[6:] for p in SCRIPT.parent.glob('bench_*.py')))}.\n"
    )


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

"""The command, of one server and of a cluster: its table, its figures and its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.commands import cli_of
from kit.talks import talk_lines
from sglang_tiered_lab.trace.cli import main
from sglang_tiered_lab.trace.cluster import POLICIES

LINES = talk_lines(1000, 1)
SIZES = ("--device", "4ktok", "--host", "12ktok", "--nvme", "60%")
CLUSTER = ("--cluster", "--servers", "2")

Replay = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Replay:
    """What is shown, and the document."""

    def run(lines: str, *words: str) -> tuple[str, dict[str, Any]]:
        trace, file = tmp_path / "talks.jsonl", tmp_path / "out.json"
        trace.write_text(lines)
        assert main(["replay", str(trace), *words, "--json", str(file)]) == 0
        assert str(tmp_path) not in file.read_text()
        return capsys.readouterr().out, json.loads(file.read_text())

    return run


def test_every_policy_is_in_table_and_json(replay: Replay) -> None:
    shown, report = replay(LINES, *SIZES)
    assert all(word in shown for word in ("lru", "hicache", "tiered", "belady", "infinite"))
    assert set(report) == {"machine", "versions", "settings", "ratios", "raw"}
    runs = {run["policy"]: run for run in report["raw"]["runs"]}
    ratio = report["ratios"]["hit_rate_over_lru"]
    assert ratio["value"] == runs["tiered"]["hit_rate"] / runs["lru"]["hit_rate"]
    ids = [json.loads(line)["hash_ids"] for line in LINES.splitlines()]
    unique_tokens = 512 * len(set().union(*ids))
    assert runs["lru"]["sizes"]["nvme_tokens"] == int(0.6 * unique_tokens)
    assert runs["infinite"]["units_hit"]["device"] == 64 * 3 + sum(range(8)) * 8 - (8 * 3 - 7) - 56
    for run in runs.values():
        assert run["ttft_returning"]["num"] == 7 * 8  # all turns but the first of each of 8 talks
        assert sum(run["units_hit"].values()) + run["units_missed"] == run["num_units"]


def test_every_router_is_in_table_and_json(replay: Replay) -> None:
    lines = talk_lines(400, 9)
    shown, report = replay(lines, "--cluster", "--servers", "3", "--loads", "0.5,1")
    assert all(name in shown for name in POLICIES)
    runs = {(run["policy"], run["load"]): run for run in report["raw"]["runs"]}
    assert len(runs) == 2 * len(POLICIES)
    ratio = report["ratios"]["cost_ttft_over_least_load"]
    means = [runs[name, 1.0]["mean_ttft_s"] for name in ("cost", "least-load")]
    assert (ratio["value"], ratio["n"]) == (means[0] / means[1], 2)
    assert runs["in-turn", 1.0]["busy"] == pytest.approx(0.8, abs=0.1)


def test_mixed_hardware_and_changes_run(replay: Replay) -> None:
    fleet = "2:h200:prefill,1:a100:prefill,2:2xh100:decode"
    words = ["--fleet", fleet, "--policy", "cost,p2c", "--tiers", "host,nvme,bucket"]
    words += ["--change", "5:die:0", "--lag", "0.5", "--loss", "0.2", "--price-noise", "0.3"]
    assert fleet in replay(talk_lines(400, 9), "--cluster", *words)[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((*SIZES, "--nvme", "5 furlongs"), "--nvme '5 furlongs' is not a size"),
        ((*SIZES, "--page-tokens", "100"), "does not fit the trace's blocks of 512"),
        ((*SIZES, "--prefill-token-s", "nan"), "is not a number of zero or more"),
        ((*CLUSTER, "--fleet", "4:h100:prefill"), "needs servers of both roles"),
        ((*CLUSTER, "--loads", "nan"), "is not a list of numbers"),
        ((*CLUSTER, "--change", "5:die:7"), "is none; write 60:die:3"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    tmp_path: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "talks.jsonl"
    trace.write_text(LINES)
    assert sentence in cli_of(main, capsys)("replay", trace, *words).refusal

"""``trace replay --cluster``: what it prints and writes, and the one sentence for the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.commands import cli_of
from kit.talks import talk_lines
from sglang_tiered_lab.trace.cli import main
from sglang_tiered_lab.trace.cluster import POLICIES

LINES = talk_lines(400, 9)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text(LINES)
    return path


def test_every_policy_is_in_table_and_json(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    words = ("--servers", "3", "--loads", "0.5,1", "--json", str(file))
    assert main(["replay", str(trace), "--cluster", *words]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in POLICIES)
    assert "64 requests on 3:h100" in shown
    report = json.loads(file.read_text())
    assert set(report) == {"machine", "versions", "settings", "ratios", "raw"}
    assert str(tmp_path) not in file.read_text()
    runs = {(run["policy"], run["load"]): run for run in report["raw"]["runs"]}
    assert len(runs) == 2 * len(POLICIES)
    ratio = report["ratios"]["cost_ttft_over_least_load"]
    means = [runs[name, 1.0]["mean_ttft_s"] for name in ("cost", "least-load")]
    assert ratio["value"] == means[0] / means[1]
    assert ratio["n"] == 2
    assert runs["in-turn", 1.0]["busy"] == pytest.approx(0.8, abs=0.1)


def test_mixed_hardware_and_changes_run(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--fleet", "2:h200:prefill,1:a100:prefill,2:2xh100:decode", "--policy", "cost,p2c"]
    words += ["--change", "5:die:0", "--lag", "0.5", "--loss", "0.2", "--price-noise", "0.3"]
    assert main(["replay", str(trace), "--cluster", *words, "--tiers", "host,nvme,bucket"]) == 0
    assert "2:h200:prefill,1:a100:prefill,2:2xh100:decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--balance", "5"), "a --fleet of both roles"),
        (("--fleet", "4:h100:prefill"), "needs servers of both roles"),
        (("--fleet", "1:h100", "--model", "llama-3.1-70b"), "too little for llama-3.1-70b"),
        (("--policy", "best"), "--policy best is unknown to --cluster"),
        (("--loads", "nan"), "is not a list of numbers"),
        (("--loads", "1", "--limit", "1"), "at no speed do these 1 requests"),
        (("--ttft", "0"), "must be greater than zero"),
        (("--change", "5:die:7"), "is none; write 60:die:3"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    trace: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = cli_of(main, capsys)
    assert sentence in cli("replay", trace, "--cluster", "--servers", "2", *words).refusal

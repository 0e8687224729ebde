"""``trace replay --cluster``: what it prints and writes, and the one sentence for the rest."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path

import pytest

from kit.commands import cli_of
from kit.talks import talk_lines
from sglang_tiered_lab.trace.cli import main
from sglang_tiered_lab.trace.cluster import POLICIES, profiles

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


def test_roles_that_follow_the_load_are_told(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    words = ["--fleet", "1:h100:prefill,3:h100:decode", "--policy", "cost", "--stretch", "0.05"]
    words += ["--replicate", "32", "--balance", "2", "--json", str(file)]
    assert main(["replay", str(trace), "--cluster", *words]) == 0
    (run,) = json.loads(file.read_text())["raw"]["runs"]
    at_s, number, role = run["switches"][0]
    assert (
        f"cost at load 1, roles taken: {number} {role} at {at_s:.0f} s" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--balance", "5"), "a --fleet of both roles"),
        (("--balance", "0", "--fleet", "1:h100:prefill,1:h100:decode"), "seconds above zero"),
        (("--fleet", "4xh100"), "is no group of servers"),
        (("--fleet", "4:b200"), "is no hardware"),
        (("--fleet", "4:h100:prefill"), "needs servers of both roles"),
        (("--fleet", "1:h100,1:h100:prefill,1:h100:decode"), "mixes servers"),
        (("--fleet", "9999:h100"), "at most 4,096"),
        (("--fleet", "1:h100", "--model", "llama-3.1-70b"), "too little for llama-3.1-70b"),
        (("--model", "gpt"), "--model gpt is unknown"),
        (("--policy", "best"), "--policy best is unknown to --cluster"),
        (("--policy", "cost,cost"), "must name each policy once"),
        (("--loads", "1,x"), "is not a list of numbers"),
        (("--loads", "nan"), "is not a list of numbers"),
        (("--classes", "0.5,nan"), "is not a list of numbers"),
        (("--loads", "1", "--limit", "1"), "at no speed do these 1 requests"),
        (("--price-noise", "1000"), "--price-noise 1000 is more than 10"),
        (("--tiers", "tape"), "--tiers tape is unknown"),
        (("--ttft", "0"), "must be greater than zero"),
        (("--report", "0"), "must be greater than zero"),
        (("--weights", "2,1"), "must be three numbers"),
        (("--loss", "2"), "not a share from 0 to 1"),
        (("--change", "5:die:7"), "is none; write 60:die:3"),
        (("--json", "/no/such/folder/x.json"), "cannot be written"),
        (("--profiles", "/no/such.json"), "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    trace: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = cli_of(main, capsys)
    assert sentence in cli("replay", trace, "--cluster", "--servers", "2", *words).refusal


def test_a_profile_with_a_gap_is_refused(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = profiles.Path(profiles.__file__).with_name("hardware.json")
    content = json.loads(own.read_text())
    file = tmp_path / "mine.json"
    refusal = lambda: cli_of(main, capsys)("replay", trace, "--cluster", "--profiles", file).refusal  # noqa: E731
    for gap in ("source", "value"):
        broken = json.loads(json.dumps(content))
        del broken["accelerators"]["a100"]["memory_bytes"][gap]
        file.write_text(json.dumps(broken))
        assert "has a gap" in refusal()
    for value, place in (
        (-1, ("accelerators", "a100", "memory_bytes", "value")),
        (1e-300, ("accelerators", "h100", "flops", "value")),
        (0.5, ("fixed", "chunk_tokens", "value")),
        (1e-8, ("models", "llama-3.1-8b", "bytes")),
        (2, ("shares", "loads", "value")),
    ):
        broken = json.loads(json.dumps(content))
        *way, last = place
        functools.reduce(dict.__getitem__, way, broken)[last] = value
        file.write_text(json.dumps(broken))
        assert refusal(), place


def test_a_cluster_is_drawn(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.svg"
    words = ["--servers", "2", "--policy", "cost,in-turn", "--loads", "0.5,1", "--plot", str(file)]
    code = main(["replay", str(trace), "--cluster", *words])
    assert code == (2 if importlib.util.find_spec("matplotlib") is None else 0)
    assert code or b"<svg" in file.read_bytes()

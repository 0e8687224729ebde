"""The commands, as a user calls them: figures, files, exit codes, and one sentence for the rest."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.commands import Cli, cli_of, ran
from sglang_tiered_lab.trace.cli import main
from sglang_tiered_lab.trace.reader import read_trace

Published = Callable[[str], Path]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return cli_of(main, capsys)


def row(second: int, ids: list[int]) -> str:
    about = {"timestamp": 1000 * second, "input_length": 512 * len(ids) - 5, "output_length": 50}
    return json.dumps({**about, "hash_ids": ids}) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six requests of two conversations, one second apart."""
    path = tmp_path / "trace.jsonl"
    starts = [100 * (second % 2) for second in range(6)]
    ids = [[0, *range(one + 1, one + 4 + at // 2)] for at, one in enumerate(starts)]
    path.write_text("".join(row(second, each) for second, each in enumerate(ids)))
    return path


def test_stat_as_a_process_gives_the_published_figures(published: Published) -> None:
    module = (sys.executable, "-m", "sglang_tiered_lab.trace.cli")
    result = ran(*module, "stat", published("conversation"), "--json", "-")
    assert (result.returncode, result.stderr) == (0, "")
    figures = json.loads(result.stdout)
    assert figures["num_requests"] == 12_031
    assert round(100 * figures["ideal_hit_rate"], 1) == 36.6
    lru = {row["blocks"]: round(100 * row["hit_rate"], 1) for row in figures["lru"]}
    assert (lru[3000], lru[30_000]) == (6.5, 32.6)
    assert round(figures["duration_s"]) == 3537
    assert figures["input_tokens"]["p50"] == 6909
    gaps_s = [round(figures["reuse_gap_s"][name]) for name in ("p25", "p50", "p75", "p90")]
    assert gaps_s == [54, 114, 267, 519]
    assert round(100 * figures["top_reuse_share"]["10%"], 1) == 75.1
    assert round(100 * figures["at_most_one_hit_share"], 1) == 61.3


@pytest.mark.parametrize("command", ["stat", "scale", "convert", "replay"])
def test_a_file_mostly_dropped_is_refused(
    cli: Cli, trace: Path, tmp_path: Path, command: str
) -> None:
    trace.write_text(trace.read_text().replace("\n", "\n{broken\n", 1))
    output = ("-o", tmp_path / "x") if command in ("scale", "convert") else ()
    refusal = cli(command, trace, *output).refusal
    assert "1 of 7 rows dropped" in refusal
    assert "more than 10% of the file: repair it, or give --allow-dropped." in refusal
    assert not (tmp_path / "x").exists()
    assert cli(command, trace, *output, "--allow-dropped").code == 0


def test_scale_writes_what_fits_and_prints_the_ratios(
    cli: Cli, trace: Path, tmp_path: Path
) -> None:
    target = tmp_path / "small.jsonl"
    outcome = cli("scale", trace, "--tokens-max", 512, "-o", target, "--rate", 4)
    assert outcome.code == 0
    scaled = list(read_trace(target))
    assert max(request.context_length for request in scaled) <= 512
    assert [request.turn for request in scaled] == [1, 1, 2, 2, 3, 3]
    assert [request.arrival_s for request in scaled] == [0.0, 0.3, 0.6, 0.9, 1.2, 1.5]
    ideal = next(line for line in outcome.out.splitlines() if line.startswith("ideal hit rate, b"))
    assert ideal.split()[-3:] == ["63.3%", "63.3%", "yes"]


def test_an_output_that_exists_is_left_alone(cli: Cli, trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("years")
    for arguments in (
        ("convert", trace, "-o", target),
        ("scale", trace, "-o", target),
        ("stat", trace, "--json", target),
        ("generate", "--mooncake", target),
        ("generate", "--sharegpt", target),
        ("convert", trace, "-o", tmp_path / "no" / "folder"),
    ):
        assert (
            "name a file that does not" in cli(*arguments).refusal
            or "make it first" in cli(*arguments).refusal
        )
    assert target.read_text() == "years"

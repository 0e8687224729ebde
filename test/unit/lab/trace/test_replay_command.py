"""The command: what it prints and writes, and the one sentence for what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.commands import cli_of
from kit.talks import talk_lines
from sglang_tiered_lab.trace.cli import main

LINES = talk_lines(1000, 1)
SIZES = ("--device", "4ktok", "--host", "12ktok", "--nvme", "60%")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text(LINES)
    return path


def test_every_policy_is_in_table_and_json(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    assert main(["replay", str(trace), *SIZES, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    for word in ("lru", "hicache", "tiered", "belady", "infinite", "amplification", "TTFT"):
        assert word in shown
    report = json.loads(file.read_text())
    assert set(report) == {"machine", "versions", "settings", "ratios", "raw"}
    assert str(tmp_path) not in file.read_text()
    runs = {run["policy"]: run for run in report["raw"]["runs"]}
    ratio = report["ratios"]["hit_rate_over_lru"]
    assert ratio["value"] == runs["tiered"]["hit_rate"] / runs["lru"]["hit_rate"]
    assert set(ratio) == {"value", "min", "max", "n"}
    ids = [json.loads(line)["hash_ids"] for line in LINES.splitlines()]
    unique_tokens = 512 * len(set().union(*ids))
    assert runs["lru"]["sizes"]["nvme_tokens"] == int(0.6 * unique_tokens)
    assert runs["lru"]["sizes"]["device_tokens"] == 4000
    assert runs["infinite"]["units_hit"]["device"] == 64 * 3 + sum(range(8)) * 8 - (8 * 3 - 7) - 56
    for run in runs.values():
        assert run["ttft_returning"]["num"] == 7 * 8  # all turns but the first of each of 8 talks
        assert sum(run["units_hit"].values()) + run["units_missed"] == run["num_units"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--nvme", "5 furlongs"), "--nvme '5 furlongs' is not a size"),
        (("--nvme", "1MiB"), "less than two regions"),
        (("--servers", "4", "--only-servers", "2-4"), "not within the 4 of --servers"),
        (("--page-tokens", "100"), "does not fit the trace's blocks of 512"),
        (("--host", "4ktok"), "must be larger than --device"),
        (("--prefill-token-s", "nan"), "is not a number of zero or more"),
        (("--device", "0", "--host", "0", "--nvme", "0"), "are all 0"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    trace: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = cli_of(main, capsys)("replay", trace, *SIZES, *words).refusal
    assert sentence in refusal and refusal.endswith((".\n", "there is.\n"))

"""The commands, as a user calls them: figures, files, exit codes, and one sentence for the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.commands import Cli, cli_of
from sglang_tiered_lab.trace.cli import main
from sglang_tiered_lab.trace.reader import read_trace

Published = Callable[[str], Path]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return cli_of(main, capsys)


def row(second: int, ids: list[int], output: int = 50) -> str:
    length = 512 * len(ids) - 5
    about = {"timestamp": 1000 * second, "input_length": length, "output_length": output}
    return json.dumps({**about, "hash_ids": ids}) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six requests of two conversations, one second apart."""
    path = tmp_path / "trace.jsonl"
    starts = [100 * (second % 2) for second in range(6)]
    ids = [[0, *range(one + 1, one + 4 + at // 2)] for at, one in enumerate(starts)]
    path.write_text("".join(row(second, each) for second, each in enumerate(ids)))
    return path


def run_module(
    *arguments: object, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_tiered_lab.trace.cli", *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        # Buffered, as for a user: what is left in the buffer may fail when Python ends.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        text=True,
        timeout=60,
        check=False,
    )


def test_stat_as_a_process_gives_the_published_figures(published: Published) -> None:
    result = run_module("stat", published("conversation"), "--json", "-")
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


def test_stat_says_what_a_trace_is(cli: Cli, trace: Path) -> None:
    outcome = cli("stat", trace)
    assert (outcome.code, outcome.err) == (0, "")
    assert "6 requests, 5 s, 1.20/s" in outcome.out
    assert "conversations (inferred from shared blocks): 2" in outcome.out
    assert "blocks of 512 tokens: 30, different 11" in outcome.out
    assert "63.3% of blocks" in outcome.out  # 19 of 30


def test_stat_of_requests_without_blocks_has_no_reuse(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 0, "output_length": 0, "hash_ids": []}\n')
    outcome = cli("stat", path)
    assert (outcome.code, outcome.err) == (0, "")
    assert "hit rate without bound: 0.0% of blocks" in outcome.out
    assert cli("scale", path, "--tokens-max", 9, "-o", tmp_path / "out.jsonl").code == 0


def test_mixed_block_sizes_have_no_figures(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    line = '{"timestamp": 0, "input_length": 9, "output_length": 0, "hash_ids": [1]'
    path.write_text(line + "}\n" + line + ', "block_size": 16}\n')
    for command in (("stat", path), ("scale", path, "-o", tmp_path / "out.jsonl")):
        assert "mixes block sizes" in cli(*command).refusal
    assert cli("convert", path, "--block-tokens", 512, "-o", tmp_path / "out.jsonl").code == 0


def test_stat_adds_the_capacities_it_is_asked_for(cli: Cli, trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "stat.json"
    assert cli("stat", trace, "--capacity", "0.003M", "--json", target).code == 0
    rows = json.loads(target.read_text())["lru"]
    assert [row["hit_rate"] for row in rows if row["blocks"] == 5] == [4 / 30]
    assert [row["hit_rate"] for row in rows if row["blocks"] == 11] == [19 / 30]


def test_rows_without_a_request_are_dropped_and_counted(cli: Cli, trace: Path) -> None:
    trace.write_text(trace.read_text().replace("\n", "\n{broken\n", 2))
    outcome = cli("stat", trace, "--allow-dropped")
    assert outcome.code == 0
    assert "6 requests" in outcome.out
    assert "2 of 8 rows dropped: 2 as it is not JSON" in outcome.err
    assert f"(the first: line 2 of {trace})" in outcome.err
    assert outcome.err.count("\n") == 1
    assert "line 2 of" in cli("stat", trace, "--strict").refusal


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


def test_nothing_usable_is_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"hash_ids": []}\n')
    for command in (("stat",), ("scale", "-o", tmp_path / "x"), ("convert", "-o", tmp_path / "x")):
        assert (
            "none is left: check the file, --format and --trace-block-tokens."
            in cli(command[0], path, *command[1:]).refusal
        )
        outcome = cli(command[0], path, *command[1:], "--allow-dropped")
        assert (outcome.code, outcome.out) == (1, "")
        assert "has no request that can be used" in outcome.err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["stat", "scale", "convert"])
def test_an_unusable_file_is_exit_code_2(cli: Cli, tmp_path: Path, command: str) -> None:
    output = () if command == "stat" else ("-o", tmp_path / "out")
    (tmp_path / "empty").touch()
    for name, what in (
        ("absent", "cannot be read (No such file"),
        ("empty", "is empty"),
        ("", "is a folder"),
    ):
        assert what in cli(command, tmp_path / name, *output).refusal
    assert not (tmp_path / "out").exists()


def test_convert_cuts_slices(cli: Cli, trace: Path, tmp_path: Path) -> None:
    for flags, times in (
        (("--from-s", 1, "--to-s", 4), [1.0, 2.0, 3.0]),
        (("--skip", 1, "--count", 2), [1.0, 2.0]),
        (("--from-s", 2, "--skip", 1), [3.0, 4.0, 5.0]),
        (("--limit", 2), [0.0, 1.0]),
    ):
        target = tmp_path / "slice.jsonl"
        assert cli("convert", trace, "-o", target, *flags).code == 0
        assert [request.arrival_s for request in read_trace(target)] == times
        target.unlink()
    outcome = cli("convert", trace, "-o", target, "--from-s", 100)
    assert outcome.code == 1
    assert "no request lies in the slice" in outcome.err


def test_convert_regroups_blocks(cli: Cli, trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "large.jsonl"
    assert cli("convert", trace, "-o", target, "--block-tokens", 1024).code == 0
    assert [request.block_ids for request in read_trace(target)][:3] == [(0, 1), (2, 3), (0, 1, 4)]
    assert (
        "give a multiple or a divisor of 512"
        in cli("convert", trace, "-o", tmp_path / "x", "--block-tokens", 500).refusal
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.jsonl", "trace.jsonl"]


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
    half = cli("scale", trace, "--sessions", 1, "-o", tmp_path / "half.jsonl").out
    ideal = next(line for line in half.splitlines() if line.startswith("ideal hit rate, b"))
    assert ideal.split()[-3:] == ["63.3%", "60.0%", "no"]


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


def test_a_trace_may_go_to_standard_output(trace: Path) -> None:
    for command in (("convert", trace), ("scale", trace)):
        result = run_module(*command, "-o", "-")
        assert result.returncode == 0
        assert len([json.loads(line) for line in result.stdout.splitlines()]) == 6


def test_a_plot_is_drawn(cli: Cli, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert cli("stat", trace, "--plot", tmp_path / "lru.png").code == 0
    assert (tmp_path / "lru.png").read_bytes().startswith(b"\x89PNG")
    assert "is no .png" in cli("stat", trace, "--plot", tmp_path / "lru.txt").err


def test_a_tokenizer_counts_instead_of_bytes(cli: Cli, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"word": 0, "?": 1}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    said = [{"from": "human", "value": "word " * 40}, {"from": "gpt", "value": "word \ud800 word"}]
    (tmp_path / "talk.json").write_text(json.dumps([{"conversations": said}]))
    target = tmp_path / "talk.jsonl"
    flags = ("--tokenizer", tmp_path, "--block-tokens", 16)
    assert cli("convert", tmp_path / "talk.json", "-o", target, *flags).code == 0
    (request,) = read_trace(target)
    assert (request.input_length, request.output_length) == (42, 3)
    assert (
        "is not a tokenizer"
        in cli("stat", tmp_path / "talk.json", "--tokenizer", tmp_path / "talk.json").refusal
    )


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("stt",),
        ("stat",),
        ("scale", "x"),
        ("stat", "x", "--limit", "0"),
        ("stat", "x", "--capacity", "1.5"),
        ("scale", "x", "-o", "y", "--rate", "-1"),
        ("scale", "x", "-o", "y", "--rate", "nan"),
        ("scale", "x", "-o", "y", "--rate", "1", "--time-factor", "2"),
        ("convert", "x", "-o", "y", "--from-s", "5", "--to-s", "5"),
        ("generate",),
        ("generate", "--mooncake", "x", "--sharegpt", "x"),
    ],
)
def test_an_impossible_command_line_is_one_sentence(cli: Cli, arguments: tuple[str, ...]) -> None:
    assert cli(*arguments).refusal.startswith("sglang-tiered: ")


def test_ctrl_c_ends_quietly_and_leaves_no_file(tmp_path: Path) -> None:
    target = tmp_path / "large.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sglang_tiered_lab.trace.cli", "generate"),
            *("--num-conversations", "1000000", "--sharegpt", str(target)),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # Once it writes: between making the file and that, nobody is there yet to remove it.
        while process.poll() is None and not any(
            path.stat().st_size for path in tmp_path.iterdir()
        ):
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert stderr == "sglang-tiered: stopped\n"
    assert not list(tmp_path.iterdir())

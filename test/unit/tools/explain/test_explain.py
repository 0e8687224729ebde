"""``explain`` names the largest measured part, reads what it can, and commands no terminal."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kit.commands import Cli, cli_of
from sglang_tiered.request_log import Load, RequestRecord, TierLoad, Wait
from sglang_tiered.tools.causes import cause, parts
from sglang_tiered.tools.explain import main

MiB = 1 << 20
NVME = TierLoad(tier="nvme", at_s=0.1, read_s=1.2, num_reads=4, num_bytes=96 * MiB, expected_s=0.24)


def record(rid: str) -> RequestRecord:
    """Its turn took 1.3 of 1.4 s, of which it waited 1.2 s for pages of NVMe."""
    fields = {"v": 1, "rid": rid, "arrived_unix_s": 1.8e9, "end": "length", "num_prompt_tokens": 9}
    fields |= {"admitted_s": 1.3, "first_token_s": 1.39, "total_s": 1.4}
    fields |= {"waits": (Wait(why="load", at_s=0.1, wait_s=1.2),)}
    fields |= {"load": Load(at_s=0.1, load_s=1.2, num_tokens=9, num_loaded_tokens=9, tiers=(NVME,))}
    return RequestRecord(**fields)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return cli_of(main, capsys)


def test_largest_measured_part_is_the_cause() -> None:
    made = record("r")
    assert cause(made) == "1.2 of 1.4 s: read 96MiB from nvme at 80MiB/s, planned at 400MiB/s."
    assert sum(part.seconds for part in parts(made)) == pytest.approx(made.total_s)


def test_damaged_lines_are_counted_and_skipped(cli: Cli, tmp_path: Path) -> None:
    other = b'{"v":2,"rid":"later"}\n{"v":2,"rid":"later","end":"stop","num_prompt_tokens":1,'
    other += b'"arrived_unix_s":1.0,"total_s":1.0}\n'
    long = b'{"v":1,"rid":"' + b"x" * (3 << 20) + b'"}\n'
    whole = msgspec.json.encode(record("whole")) + b"\n"
    (tmp_path / "log").write_bytes(whole + b"\0\0\0\n\n[1]\n" + other + long + b'{"v":1,"rid":"ha')
    code, out, err = cli(tmp_path / "log", "--json")
    report = json.loads(out)
    assert code == 0 and [each["rid"] for each in report["requests"]] == ["whole"]
    assert (report["num_damaged_lines"], report["num_lines_of_other_versions"]) == (4, 2)
    assert "4 damaged or half lines were skipped" in err and "2 lines of another version" in err


def test_control_characters_do_not_reach_terminals(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(msgspec.json.encode(record("\x1b[2Jr")) + b"\n")
    for more in ((), ("--rid", "\x1b[2Jr")):
        assert "\x1b" not in cli(tmp_path / "log", *more).out
    refusal = cli(tmp_path / "\x1b[2J").refusal  # as a shell's ``*`` may name it
    assert "does not exist" in refusal and "\x1b" not in refusal

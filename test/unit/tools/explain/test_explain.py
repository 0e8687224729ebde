"""``explain`` names the cause of a slow request by its measured parts, and reads what it can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kit.commands import Outcome, cli_of
from sglang_tiered.request_record import (
    GivenUp,
    Load,
    Plan,
    Prefill,
    RequestRecord,
    Sources,
    TierLoad,
    Wait,
)
from sglang_tiered.tools.explain.causes import cause, parts
from sglang_tiered.tools.explain.cli import main

MiB = 1 << 20


def record(rid: str = "r", **fields: Any) -> RequestRecord:
    """A request of 2.3 s that ran at once."""
    values: dict[str, Any] = {
        "v": 1,
        "arrived_unix_s": 1_795_697_435.0,
        "end": "length",
        "num_prompt_tokens": 5000,
        "num_output_tokens": 8,
        "admitted_s": 0.0,
        "first_token_s": 2.2,
        "total_s": 2.3,
    }
    return RequestRecord(rid=rid, **{**values, **fields})


NVME = TierLoad(tier="nvme", at_s=0.1, read_s=1.2, num_reads=4, num_bytes=96 * MiB, expected_s=0.24)
LOAD = Load(at_s=0.1, load_s=1.2, num_tokens=4096, num_loaded_tokens=4096, tiers=(NVME,))
COMPUTED = Prefill(at_s=2.0, prefill_s=1.8, num_batches=1, num_tokens=5000)
ALL = Sources(num_computed=5000)
COMPUTES: dict[str, Any] = {"tokens": ALL, "prefill": COMPUTED}


def waits(why: str, at_s: float, wait_s: float) -> dict[str, Any]:
    return {"waits": (Wait(why=why, at_s=at_s, wait_s=wait_s),)}


QUEUED = {"admitted_s": 1.9, "num_ahead": 6}
LOADS = {"admitted_s": 1.3, "first_token_s": 1.39, "total_s": 1.4} | waits("load", 0.1, 1.2)
LATE: dict[str, Any] = {"given_up": GivenUp(why="late", at_s=0.3, num_tokens=4096)}
LATE |= {"plan": Plan(at_s=0, decision="load", num_nvme_tokens=4096)}
FRONT = Prefill(at_s=0.4, prefill_s=0.4, num_batches=2, num_tokens=900)
BACK = {"admitted_s": 0.1, "prefill": FRONT} | waits("back", 0.5, 1.4)
ABORTED = {"admitted_s": None, "first_token_s": None, "end": "abort", "num_ahead": 1}
CAUSES: list[tuple[dict[str, Any], str]] = [
    (QUEUED, "1.9 of 2.3 s: waited in the queue behind 6 requests"),
    (LOADS | {"load": LOAD}, "1.2 of 1.4 s: read 96MiB from nvme at 80MiB/s, planned at 400MiB/s"),
    (COMPUTES | LATE | {"load": LOAD}, "given up after 0.3 s"),
    (ABORTED, "2.3 of 2.3 s: waited in the queue behind 1 request; aborted"),
    (BACK | {"load": LOAD}, "1.4 of 2.3 s: waited for its back while its front was computed"),
]


@pytest.mark.parametrize(("fields", "sentence"), CAUSES)
def test_largest_measured_part_is_the_cause(fields: dict[str, Any], sentence: str) -> None:
    made = record(**fields)
    assert sentence in cause(made)
    assert sum(part.seconds for part in parts(made)) == pytest.approx(made.total_s)


class Log:
    """A server's file, and the command that reads it."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self._capsys = path, capsys

    def write(self, *records: RequestRecord, tail: bytes = b"") -> None:
        lines = b"".join(msgspec.json.encode(each) + b"\n" for each in records)
        self.path.write_bytes(lines + tail)

    def said(self, *flags: str, path: str | None = None) -> Outcome:
        return cli_of(main, self._capsys)(self.path if path is None else path, *flags)


@pytest.fixture
def log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Log:
    return Log(tmp_path / "log", capsys)


def test_damaged_lines_are_counted_and_skipped(log: Log) -> None:
    other = b'{"v":2,"rid":"later"}\n{"v":2,"rid":"later","end":"stop","num_prompt_tokens":1,'
    other += b'"arrived_unix_s":1.0,"total_s":1.0}\n'
    long = b'{"v":1,"rid":"' + b"x" * (3 << 20) + b'"}\n'
    log.write(record("whole"), tail=b"\0\0\0\n\n[1]\n" + other + long + b'{"v":1,"rid":"ha')
    code, out, err = log.said("--json")
    report = json.loads(out)
    assert code == 0 and [each["rid"] for each in report["requests"]] == ["whole"]
    assert (report["num_damaged_lines"], report["num_lines_of_other_versions"]) == (4, 2)
    assert "4 damaged or half lines were skipped" in err and "2 lines of another version" in err


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.write_bytes(b"\xff\xfe" * 999)])
def test_wrong_file_is_one_sentence(log: Log, make: Any) -> None:
    assert "does not exist" in log.said().refusal
    make(log.path)
    assert log.said().refusal


def test_control_characters_do_not_reach_terminals(log: Log) -> None:
    log.write(record("\x1b[2Jr"))
    for more in ((), ("--rid", "\x1b[2Jr")):
        assert "\x1b" not in log.said(*more)[1]
    _, _, err = log.said(path=str(log.path.with_name("\x1b[2J")))  # as a shell's ``*`` may name it
    assert "does not exist" in err and "\x1b" not in err

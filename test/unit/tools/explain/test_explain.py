"""``explain`` names the cause of a slow request by its measured parts, and reads what it can."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from sglang_tiered.request_record import (
    MAX_RID,
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

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"admitted_s": 1.9, "num_ahead": 6},
            "1.9 of 2.3 s: waited in the queue behind 6 requests.",
        ),
        (
            {"admitted_s": 1.9, "num_running": 1},
            "1.9 of 2.3 s: waited in the queue while 1 request ran.",
        ),
        (
            {
                "admitted_s": 1.3,
                "first_token_s": 1.39,
                "total_s": 1.4,
                "waits": (Wait(why="load", at_s=0.1, wait_s=1.2),),
                "load": LOAD,
            },
            "1.2 of 1.4 s: read 96MiB from nvme at 80MiB/s, planned at 400MiB/s.",
        ),
        (
            {
                "tokens": ALL,
                "prefill": COMPUTED,
                "plan": Plan(at_s=0, decision="declined", held_load_s=0.9, held_prefill_s=0.4),
            },
            "1.8 of 2.3 s: computed 5,000 tokens; declined: loading was expected to take 0.9 s and "
            "computing 0.4 s; computing took 1.8 s.",
        ),
        (
            {
                "tokens": ALL,
                "prefill": COMPUTED,
                "plan": Plan(at_s=0, decision="absent", prefill_all_s=1.7),
            },
            "1.8 of 2.3 s: computed 5,000 tokens; absent: no tier held them; expected to take "
            "1.7 s.",
        ),
        (
            {
                "tokens": ALL,
                "prefill": COMPUTED,
                "load": LOAD,
                "plan": Plan(at_s=0, decision="load", num_nvme_tokens=4096),
                "given_up": GivenUp(why="late", at_s=0.3, num_tokens=4096),
            },
            "1.8 of 2.3 s: computed 5,000 tokens; given up after 0.3 s, as computing the rest was "
            "sooner by then.",
        ),
        (
            {
                "tokens": ALL,
                "prefill": COMPUTED,
                "plan": Plan(at_s=0, decision="load", num_nvme_tokens=4096),
                "load": msgspec.structs.replace(
                    LOAD,
                    tiers=(msgspec.structs.replace(NVME, failed={"corrupt": 3, "io_error": 1}),),
                ),
            },
            "1.8 of 2.3 s: computed 5,000 tokens, as pages of nvme did not arrive (pages that "
            "failed: 3 corrupt, 1 io_error).",
        ),
        (
            {"admitted_s": 2.0, "waits": (Wait(why="window", at_s=0.1, wait_s=1.5),)},
            "1.5 of 2.3 s: waited for other loads to leave it room.",
        ),
        (
            {"admitted_s": 0.2, "first_token_s": 0.3, "total_s": 9.0, "num_output_tokens": 400},
            "8.7 of 9.0 s: generated 400 tokens; before that 0.2 of 0.3 s: waited in the queue for "
            "the batch before it.",
        ),
        (
            {"admitted_s": None, "first_token_s": None, "end": "abort", "num_ahead": 1},
            "2.3 of 2.3 s: waited in the queue behind 1 request; aborted before it ran.",
        ),
        (
            {
                "admitted_s": 0.1,
                "waits": (Wait(why="back", at_s=0.5, wait_s=1.4),),
                "load": LOAD,
                "prefill": Prefill(at_s=0.4, prefill_s=0.4, num_batches=2, num_tokens=900),
            },
            "1.4 of 2.3 s: waited for its back while its front was computed: read 96MiB from nvme "
            "at 80MiB/s, planned at 400MiB/s.",
        ),
        (
            {
                "tokens": ALL,
                "prefill": COMPUTED,
                "plan": Plan(
                    at_s=0, decision="truncated", num_nvme_tokens=2000, num_peer_tokens=48
                ),
            },
            "1.8 of 2.3 s: computed 5,000 tokens, as no more than 2,048 were expected to be sooner "
            "loaded.",
        ),
        (
            {
                "tokens": Sources(num_nvme=4096, num_computed=904),
                "prefill": COMPUTED,
                "plan": Plan(at_s=0, decision="load", prefill_all_s=1.7, prefill_rest_s=0.3),
                "load": LOAD,
            },
            "1.8 of 2.3 s: computed 904 tokens; absent: no tier held them; expected to take 0.3 s.",
        ),
        (
            {"prefill": msgspec.structs.replace(COMPUTED, prefill_s=0.2, others_s=1.9)},
            "1.9 of 2.3 s: waited for prefills of other requests before its first token.",
        ),
        (
            {"prefill": msgspec.structs.replace(COMPUTED, prefill_s=0.2), "num_retractions": 2},
            "2.0 of 2.3 s: other work between its batches and its first token; gave its memory "
            "back 2 times meanwhile.",
        ),
        (
            {
                "admitted_s": 1.3,
                "first_token_s": 1.39,
                "total_s": 1.4,
                "waits": (Wait(why="load", at_s=0.1, wait_s=1.2),),
                "load": msgspec.structs.replace(
                    LOAD, tiers=(msgspec.structs.replace(NVME, tier="object", read_s=0.2), NVME)
                ),
                "plan": Plan(at_s=0, decision="load", num_nvme_tokens=4096, num_tokens_ahead=2000),
            },
            "1.2 of 1.4 s: read 96MiB from nvme at 80MiB/s, planned at 400MiB/s, behind 2,000 "
            "tokens of other loads.",
        ),
        (
            {
                "admitted_s": 1.3,
                "first_token_s": 1.39,
                "total_s": 1.4,
                "waits": (Wait(why="load", at_s=0.1, wait_s=1.2),),
                "load": msgspec.structs.replace(
                    LOAD,
                    tiers=(msgspec.structs.replace(NVME, num_bytes=0, failed={"io_error": 4}),),
                ),
            },
            "1.2 of 1.4 s: waited for nvme, which gave nothing (pages that failed: 4 io_error).",
        ),
    ],
)
def test_largest_measured_part_is_the_cause(fields: dict[str, Any], sentence: str) -> None:
    made = record(**fields)
    assert cause(made) == sentence
    assert sum(part.seconds for part in parts(made)) == pytest.approx(made.total_s)


def write(path: Path, *records: RequestRecord, tail: bytes = b"") -> str:
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in records) + tail)
    return str(path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    output = capsys.readouterr()
    return code, output.out, output.err


def test_summary_names_the_slowest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [record(f"r{number}", total_s=10.0 + number, tokens=ALL) for number in range(9)]
    code, out, err = said(capsys, write(tmp_path / "log", *made))
    assert (code, err) == (0, "")
    assert re.findall(r"^r\d", out, re.MULTILINE) == ["r8", "r7", "r6", "r5", "r4"]
    assert "9 requests, arrived from 2026-11-26" in out
    assert re.search(r"computed +45,000 +100%", out)
    assert re.search(r"whole +14\.0 s +18\.0 s +18\.0 s", out), "median, 95th percentile, largest"
    assert said(capsys, str(tmp_path / "log"), "--slower-than", "18s")[0] == 1


def test_file_before_is_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = write(tmp_path / "log", record("new"))
    write(tmp_path / "log.1", record("old"))
    _, out, _ = said(capsys, name, "--json")
    assert json.loads(out)["summary"]["num_requests"] == 2
    assert said(capsys, name, "--rid", "old")[0] == 0


def test_last_request_of_an_id_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Clients may use one again, and the file before is older."""
    name = write(tmp_path / "log", *(record("r", num_output_tokens=number) for number in (2, 3)))
    write(tmp_path / "log.1", record("r", num_output_tokens=1))
    _, out, err = said(capsys, name, "--rid", "r", "--json")
    assert json.loads(out)["record"]["num_output_tokens"] == 3
    assert "3 requests have this id" in err


def test_replicas_files_are_one_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        write(tmp_path / f"log[a].replica{number}", record(f"r{number}", replica=number))
    write(tmp_path / "log[a].replica0.1", record("old"))
    _, out, _ = said(capsys, str(tmp_path / "log[a]"), "--json")
    assert sorted(each["rid"] for each in json.loads(out)["requests"]) == ["old", "r0", "r1"]


def test_damaged_lines_are_counted_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = b'{"v":2,"rid":"later"}\n{"v":2,"rid":"later","end":"stop","num_prompt_tokens":1,'
    other += b'"arrived_unix_s":1.0,"total_s":1.0}\n'
    long = b'{"v":1,"rid":"' + b"x" * (3 << 20) + b'"}\n'
    tail = b"\0\0\0\n\n[1]\n" + other + long + b'{"v":1,"rid":"ha'
    code, out, err = said(capsys, write(tmp_path / "log", record("whole"), tail=tail), "--json")
    report = json.loads(out)
    assert code == 0 and [each["rid"] for each in report["requests"]] == ["whole"]
    assert (report["num_damaged_lines"], report["num_lines_of_other_versions"]) == (4, 2)
    assert "4 damaged or half lines were skipped" in err and "2 lines of another version" in err


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is no ordinary file"),
        (lambda path: path.write_text("root:x:0:0\n"), "holds no line that a server writes"),
        (lambda path: path.write_bytes(b"\xff\xfe" * 999), "holds no line that a server writes"),
    ],
)
def test_wrong_file_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, sentence: str
) -> None:
    make(tmp_path / "log")
    code, out, err = said(capsys, str(tmp_path / "log"))
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1


def test_absurd_figures_end_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def made(rid: str, **figures: Any) -> RequestRecord:
        tier = msgspec.structs.replace(NVME, **figures)
        waits = (Wait(why="load", at_s=0.1, wait_s=2.0),)
        load = msgspec.structs.replace(LOAD, tiers=(tier,))
        return record(rid, admitted_s=2.2, waits=waits, load=load)

    name = tmp_path / "log"
    long = msgspec.json.encode(made("long")).replace(b"100663296", b"1" + b"0" * 400)
    at_once = made("at-once", read_s=1e-300, expected_s=1e-300)
    code, out, err = said(capsys, write(name, at_once, tail=long + b"\n"), "--json")
    assert code == 0 and [each["rid"] for each in json.loads(out)["requests"]] == ["at-once"]
    assert "1 damaged or half lines were skipped" in err


@pytest.mark.parametrize("name", ["", "/", "**"])
def test_name_of_no_file_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, name)
    assert (code, out) == (2, "") and err.count("\n") == 1


def test_long_id_is_found_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = write(tmp_path / "log", record("r" * MAX_RID))
    assert said(capsys, name, "--rid", "r" * 1000)[0] == 0


def test_empty_file_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, write(tmp_path / "log"))[:2] == (0, "no request was recorded\n")


def test_nothing_found_is_exit_code_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = write(tmp_path / "log", record())
    assert said(capsys, name, "--rid", "other")[0] == 1
    code, _, err = said(capsys, name, "--slower-than", "1m")
    assert code == 1 and "none of 1 requests took longer than 60 s" in err
    assert said(capsys, name, "--slower-than", "soon")[0] == 2
    assert said(capsys, name, "--slower-than", "1", "--rid", "r")[0] == 2


def test_one_request_is_a_timeline_with_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = record(admitted_s=1.15, tokens=ALL, prefill=COMPUTED)
    _, out, _ = said(capsys, write(tmp_path / "log", made), "--rid", "r")
    assert re.search(r"in the queue +0\.000 s +1\.150 s +50%", out)
    assert "tokens: 5,000 computed" in out


def test_control_characters_do_not_reach_terminals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = write(tmp_path / "log", record("\x1b[2Jr"))
    for more in ((), ("--rid", "\x1b[2Jr")):
        assert "\x1b" not in said(capsys, name, *more)[1]
    _, _, err = said(capsys, str(tmp_path / "\x1b[2J"))  # as a shell's ``*`` may name it
    assert "does not exist" in err and "\x1b" not in err

"""What the demo asks, its table and document: each row asks what lies where the row says, and what
was not as expected is never called a success."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kit.serving import Quiet, serving
from sglang_tiered.demo.command import (
    DEVICE,
    EXPECTED,
    FIRST,
    HOST,
    KILLED,
    NUM_NEW,
    NVME,
    Answer,
    AskedServer,
    Demo,
    Interruption,
    document,
    make_plan,
    run,
    show,
)
from sglang_tiered.demo.server import NotServingError
from sglang_tiered.tools.terminal import run_program


def pools(device_tokens: int, host_tokens: int, page: int = 64) -> AskedServer:
    return AskedServer("m", device_tokens, host_tokens, page, True)


DEMO = pools(8192, 16_320)


def where_they_lie(target: AskedServer, num_prompts: int, length: int) -> dict[int, str]:
    """Least recently used first out: ages by tier, after all of them were asked once."""
    held = (length + NUM_NEW) // target.page_size * target.page_size
    fits = [(DEVICE, target.device_tokens), (HOST, target.host_tokens)]
    return {
        age: next((tier for tier, tokens in fits if (age + 1) * held <= tokens), NVME)
        for age in range(num_prompts)
    }


@pytest.mark.parametrize(
    "target",
    [
        DEMO,
        pools(8192, 16_384, 1),
        pools(65_536, 700_000),
        pools(1000, 5000, 128),
    ],
)
def test_every_rows_prompts_lie_in_its_tier(target: AskedServer) -> None:
    length, rows = make_plan(target)
    lie = where_they_lie(target, max(rows[NVME]) + 1, length)
    assert list(rows) == [DEVICE, HOST, NVME]
    for row, ages in rows.items():
        assert ages
        assert {lie[age] for age in ages} == {row}


def answer(source: str, tier: str, token: int = 7) -> Answer:
    tokens = {"device": 0, "host": 0, "nvme": 0, "computed": 0, tier: 1536}
    tokens["computed"] += 1
    return Answer(0.2 if source == FIRST else 0.025, [token], tokens, "")


@pytest.fixture
def rows() -> dict[str, dict[int, Answer]]:
    """All of a row's prompts from one tier, but for the last token of each."""
    return {
        source: {number: answer(source, tier) for number in range(15 if source == FIRST else 3)}
        for source, tier in EXPECTED.items()
    }


def test_one_differing_token_is_no_success(
    rows: dict[str, dict[int, Answer]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows[HOST][1] = answer(HOST, "host", token=8)
    report = document(rows, DEMO, is_here=True)
    assert report["answers_equal"] is False
    assert show(report) == 1
    assert "expected to be the same" in capsys.readouterr().err


@pytest.mark.parametrize("source", [DEVICE, HOST, NVME, KILLED])
def test_a_recomputed_row_is_no_success(
    rows: dict[str, dict[int, Answer]], source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows[source] = {number: answer(source, "computed") for number in rows[source]}
    assert show(document(rows, DEMO, is_here=True)) == 1
    assert capsys.readouterr().err.endswith(f"expected: {source}\n")


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def interruption() -> Iterator[Interruption]:
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield Interruption()
    for number, handler in before.items():
        signal.signal(number, handler)


def refusal(
    arguments: list[str], interruption: Interruption, capsys: pytest.CaptureFixture[str]
) -> str:
    assert run_program(lambda: run(arguments, interruption)) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1
    return said.err


def test_a_refusal_empties_no_existing_file(
    tmp_path: Path, interruption: Interruption, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    path.write_text("{}")
    refusal(["--json", str(path), "--url", "http://127.0.0.1:9"], interruption, capsys)
    assert path.read_text() == "{}"


class SGLang(Quiet):
    """Answers as SGLang does, in ``chunks``; to ``/server_info`` with ``status`` and ``info``."""

    status, info = 200, b""
    chunks: list[dict[str, object]] = []

    def do_GET(self) -> None:
        self.answer(self.status, self.info)

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.wfile.write(json.dumps({"tokens": list(asked["prompt"].encode())}).encode())
            return
        for chunk in self.chunks:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


STATE = {"sglang_tiered": {"tiers": {"host": {"capacity_tokens": 16_320}, "nvme": {}}}}
INFO = {"internal_states": [STATE], "page_size": 64, "max_total_num_tokens": 8192}


@contextlib.contextmanager
def sglang(**given: Any) -> Iterator[str]:
    given = {"info": json.dumps(INFO).encode(), **given}
    with serving(HTTPServer(("127.0.0.1", 0), type("Handler", (SGLang,), given))) as url:
        yield url


@pytest.mark.parametrize(
    ("status", "info", "sentence"),
    [
        (200, b"<html>", "no SGLang server answers"),
        (401, b"", "wants no key"),
        (200, {"internal_states": [STATE, STATE]}, "several replicas"),
    ],
)
def test_another_kind_of_server_is_refused(
    status: int,
    info: bytes | dict[str, object],
    sentence: str,
    interruption: Interruption,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Itself, and not a proxy, which knows no server of this machine."""
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    data = info if isinstance(info, bytes) else json.dumps({**INFO, **info}).encode()
    with sglang(status=status, info=data) as url:
        assert sentence in refusal(["--url", url], interruption, capsys)


PARTS = ["\n", "\n", "ha", "ha", "haha"]  # one begins with all before it


def answering() -> list[dict[str, object]]:
    chunks: list[dict[str, object]] = []
    tokens = [[number] for number in range(4)] + [list(range(4, NUM_NEW))]
    for end in range(1, len(PARTS) + 1):
        ids = [token for part in tokens[:end] for token in part]
        meta = {"completion_tokens": len(ids)}
        chunks.append({"text": "".join(PARTS[:end]), "output_ids": ids, "meta_info": meta})
    return chunks


def test_text_is_the_whole_answer() -> None:
    with sglang(chunks=answering()) as url:
        said = Demo(url).ask([1, 2])
    assert (said.text, said.output_ids) == ("".join(PARTS), list(range(NUM_NEW)))


@pytest.mark.parametrize(
    "chunks", [[], [{"error": "no"}], [{"text": "?"}], [{"output_ids": 3}], answering()[:2]]
)
def test_what_is_no_answer_ends_the_demo(chunks: list[dict[str, object]]) -> None:
    with sglang(chunks=chunks) as url, pytest.raises(NotServingError, match="broke off"):
        Demo(url)


def test_a_terminal_obeys_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    chunks = answering()
    chunks[-1]["text"] = "\x1b]0;owned\x07 \x1b[2J"
    with sglang(chunks=chunks) as url:
        Demo(url).ask_rows(0)
    said = capsys.readouterr().out
    assert "owned" in said and "\x1b" not in said


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_waits_until_it_is_allowed(
    interruption: Interruption, number: signal.Signals, raised: type[BaseException]
) -> None:
    os.kill(os.getpid(), number)  # while a process is started, say
    with pytest.raises(raised), interruption.allowed():
        pytest.fail("went on")

"""The demo's plan, table and document: each row asks what lies where the row says, or says why not,
and what was not as expected is never called a success."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from kit.serving import Quiet, serving
from sglang_tiered.demo.command import Interruption, run
from sglang_tiered.demo.plan import (
    ASKED,
    DEVICE,
    FIRST,
    HOST,
    KILLED,
    NUM_NEW,
    NVME,
    DemoPlan,
    Pools,
    Talk,
    glossary,
    make_plan,
)
from sglang_tiered.demo.questions import AskingError, Client, TimedAnswer
from sglang_tiered.demo.report import Phases, Row, document, make_table, one_line, verdict
from sglang_tiered.errors import ConfigError
from sglang_tiered.tools.terminal import run_program

DEMO = Pools(device_tokens=8192, host_tokens=16_320, page_size=64, has_nvme=True)
TIER_OF = {FIRST: "computed", DEVICE: "device", HOST: "host", NVME: "nvme", KILLED: "nvme"}

POOLS = [
    DEMO,
    Pools(4096, 8192, 64, has_nvme=True),
    Pools(8192, 16_384, 1, has_nvme=True),
    Pools(65_536, 700_000, 64, has_nvme=True),
    Pools(1000, 5000, 128, has_nvme=True),
]


def where_they_lie(plan: DemoPlan, pools: Pools) -> dict[int, str]:
    """Least recently used first out: prompts by tier, after all of them were asked once."""
    held = (plan.prompt_tokens + NUM_NEW) // pools.page_size * pools.page_size
    lie = {}
    for age, number in enumerate(reversed(range(plan.num_prompts))):
        behind = (age + 1) * held
        fits = [(DEVICE, pools.device_tokens), (HOST, pools.host_tokens)]
        lie[number] = next((tier for tier, tokens in fits if behind <= tokens), NVME)
    return lie


@pytest.mark.parametrize("pools", POOLS)
def test_every_rows_prompts_lie_in_its_tier(pools: Pools) -> None:
    plan = make_plan(pools)
    lie = where_they_lie(plan, pools)
    assert not plan.missing
    assert list(plan.returns) == [DEVICE, HOST, NVME]
    asked = [number for numbers in plan.returns.values() for number in numbers]
    assert len(set(asked)) == len(asked), "one is asked again twice"
    for row, numbers in plan.returns.items():
        assert numbers
        assert {lie[number] for number in numbers} == {row}


def test_the_demo_has_few_prompts_several_per_row() -> None:
    plan = make_plan(DEMO)
    assert (plan.prompt_tokens, plan.num_prompts) == (1537, 15)
    assert [len(numbers) for numbers in plan.returns.values()] == [3, 3, 3]


@pytest.mark.parametrize(
    ("max_tokens", "reached"),
    [
        (1537, {DEVICE: 1}),
        (8192, {DEVICE: 3}),
        (8 * 1537, {DEVICE: 3, HOST: 2}),
        (13 * 1537, {DEVICE: 3, HOST: 3, NVME: 1}),
        (10**9, {DEVICE: 3, HOST: 3, NVME: 3}),
    ],
)
def test_a_bound_is_kept_and_its_cut_told(max_tokens: int, reached: dict[str, int]) -> None:
    plan = make_plan(DEMO, max_tokens)
    assert {row: len(numbers) for row, numbers in plan.returns.items()} == reached
    assert plan.num_prompts * plan.prompt_tokens <= max_tokens
    assert plan.missing.keys() == {DEVICE, HOST, NVME} - reached.keys()
    for row, why in plan.missing.items():
        needed = int(why.removeprefix("would take ").removesuffix(" tokens").replace(",", ""))
        assert row in make_plan(DEMO, needed).returns
        assert row not in make_plan(DEMO, needed - 1).returns


@pytest.mark.parametrize(
    ("pools", "rows", "missing"),
    [
        (Pools(8192, 16_320, 64, False), [DEVICE, HOST], {NVME: "this server has no NVMe tier"}),
        (Pools(8192, 8192, 64, True), [DEVICE, NVME], {HOST: "no more than the device"}),
    ],
)
def test_a_tier_that_gives_nothing_has_no_row(
    pools: Pools, rows: list[str], missing: dict[str, str]
) -> None:
    plan = make_plan(pools)
    assert list(plan.returns) == rows and plan.missing.keys() == missing.keys()
    assert all(why in plan.missing[row] for row, why in missing.items())


@pytest.mark.parametrize(
    ("pools", "max_tokens", "sentence"),
    [(Pools(100, 5000, 64, has_nvme=True), None, "max-total-tokens"), (DEMO, 99, "max-tokens 99")],
)
def test_what_is_too_small_is_refused(pools: Pools, max_tokens: int | None, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_plan(pools, max_tokens)


@pytest.mark.parametrize("length", [20, 65, 577, 1537, 5000])
def test_no_two_prompts_share_a_first_page(length: int) -> None:
    talk = Talk(lambda text: list(text.encode()))
    prompts = [talk.prompt(number, length) for number in range(100)]
    assert {len(prompt) for prompt in prompts} == {length}
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 100
    assert Talk(lambda text: list(text.encode())).prompt(7, length) == prompts[7]


def test_what_is_asked_stands_in_the_text() -> None:
    meanings = glossary()
    assert len(meanings) == 29
    for number, word in enumerate(ASKED):
        prompt = bytes(Talk(lambda text: list(text.encode())).prompt(number, 4000)).decode()
        assert f"{word}: {meanings[word]}." in prompt
        assert prompt.endswith(f'What does "{word}" mean?\nAnswer: {word}:')


def row_of(source: str, numbers: tuple[int, ...], tier: str | None = None, token: int = 7) -> Row:
    """All of a row's prompts from one tier, but for the last token of each."""
    tokens = {"device": 0, "host": 0, "nvme": 0, "computed": 0, tier or TIER_OF[source]: 1536}
    tokens["computed"] += 1
    seconds = 0.2 if source == FIRST else 0.025
    return Row(source, {number: TimedAnswer(seconds, (token,), tokens, "") for number in numbers})


@pytest.fixture
def plan() -> DemoPlan:
    return make_plan(DEMO)


@pytest.fixture
def rows(plan: DemoPlan) -> list[Row]:
    everything = tuple(range(plan.num_prompts))
    returns = [row_of(source, numbers) for source, numbers in plan.returns.items()]
    return [row_of(FIRST, everything), *returns, row_of(KILLED, everything)]


def shown(rows: list[Row], plan: DemoPlan) -> str:
    console, said = console_of(is_terminal=False)
    console.print(make_table(rows, plan))
    return said.getvalue()


def test_the_table_shows_every_row_in_80_columns(rows: list[Row], plan: DemoPlan) -> None:
    text = shown(rows, plan)
    assert "…" not in text, "something was cut off"
    lines = {line.strip()[:14].strip(): line for line in text.splitlines()}
    assert lines["first time"].split()[-1] == "23,055"
    assert lines["from device"].split()[-5:] == ["4,608", "-", "-", "3", "8.0x"]
    assert lines["from host"].split()[-5:] == ["-", "4,608", "-", "3", "8.0x"]
    assert lines["from NVMe"].split()[-5:] == ["-", "-", "4,608", "3", "8.0x"]
    assert lines["after kill -9"].split()[-5:] == ["-", "-", "23,040", "15", "8.0x"]


def test_a_row_never_reached_is_not_invented(rows: list[Row]) -> None:
    short = make_plan(DEMO, 8192)
    text = shown(rows[:2], short)
    assert text.count("not asked") == 2
    assert "kill -9" not in text


def test_one_differing_token_is_no_success(rows: list[Row]) -> None:
    assert verdict(rows) is None
    rows[2] = row_of(HOST, tuple(rows[2].answers), token=8)
    assert "expected to be the same" in (verdict(rows) or "")
    assert document(rows, {}, is_here=True)["answers_equal"] is False


@pytest.mark.parametrize("source", [DEVICE, HOST, NVME, KILLED])
def test_a_recomputed_row_is_no_success(rows: list[Row], source: str) -> None:
    changed = [
        row_of(source, tuple(row.answers), "computed") if row.source == source else row
        for row in rows
    ]
    assert f"row {source!r} were expected from {TIER_OF[source]}" in (verdict(changed) or "")


def test_the_document_has_the_promised_shape(rows: list[Row]) -> None:
    report = json.loads(json.dumps(document(rows, {"model": "m"}, is_here=True)))
    assert report.keys() == {"date", "machine", "settings", "rows", "answers_equal"}
    assert [row["from"] for row in report["rows"]] == [FIRST, DEVICE, HOST, NVME, KILLED]
    ttft_s = dict.fromkeys(("median", "min", "max"), 0.025)
    tokens = {"device": 0, "host": 0, "nvme": 4608, "computed": 3}
    row = {"from": "NVMe", "num_prompts": 3, "ttft_s": ttft_s, "tokens": tokens}
    assert report["rows"][3] == row
    assert report["machine"]["cores"]
    assert document(rows, {}, is_here=False)["machine"] == {}, "another machine is not this one"


def console_of(*, is_terminal: bool) -> tuple[Console, io.StringIO]:
    said = io.StringIO()
    return Console(file=said, width=80, force_terminal=is_terminal), said


def test_without_terminal_each_phase_is_one_line() -> None:
    console = Console(file=io.StringIO(), width=80)
    phases = Phases(console)
    with phases.shown(), phases.phase("Asking", 3) as step:
        for _ in range(3):
            step.hear("so far")
            step.done()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "Asking\n"


def test_on_a_terminal_progress_is_counted() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    phases = Phases(console)
    with phases.shown(), phases.phase("Asking", 3) as step:
        for _ in range(3):
            step.hear("an answer [so far]")
            step.done()
        phases.say("[bold]what[/] stays")
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "3/3" in said
    assert "an answer [so far]" in said
    assert "stays" in said


class NotSGLang(Quiet):
    """Answers everything with what a server of another kind might."""

    body, status = b"[]", 200

    def do_GET(self) -> None:
        self.answer(self.status, self.body)


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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--what"], "--what"),
        (["--max-tokens", "many"], "invalid int value"),
        (["--max-tokens", "0"], "--max-tokens 0 must be greater than zero"),
        (["--url", "localhost:30000"], "pass http://HOST:PORT"),
        (["--url", "http://"], "pass http://HOST:PORT"),
        (["--url", "http://127.0.0.1:9"], "nothing answers at http://127.0.0.1:9"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at/all.json cannot be written"),
        (["--json", "/"], "/ cannot be written"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(
    arguments: list[str],
    sentence: str,
    interruption: Interruption,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sentence in refusal(arguments, interruption, capsys)


def test_proxy_is_not_asked_for_this_machine(
    interruption: Interruption, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # restored behind what the demo writes
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # what an earlier test made
    with serving(HTTPServer(("127.0.0.1", 0), NotSGLang)) as url:
        assert "is no SGLang server" in refusal(["--url", url], interruption, capsys)


class Streams(Quiet):
    """Answers as SGLang does, in ``chunks``."""

    chunks: list[dict[str, object]] = []

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/tokenize":
            self.wfile.write(b'{"tokens": []}')
        for chunk in self.chunks:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


PARTS = ["\n", "\n", "ha", "ha", "haha"]  # one begins with all before it


@pytest.mark.parametrize("sends", ["all so far", "what is new"])
def test_text_is_the_whole_answer(sends: str) -> None:
    chunks: list[dict[str, object]] = []
    tokens = [[number] for number in range(4)] + [list(range(4, NUM_NEW))]
    for end in range(1, len(PARTS) + 1):
        begin = 0 if sends == "all so far" else end - 1
        ids = [token for part in tokens[begin:end] for token in part]
        meta = {"completion_tokens": sum(map(len, tokens[:end]))}
        chunks.append({"text": "".join(PARTS[begin:end]), "output_ids": ids, "meta_info": meta})
    heard: list[str] = []
    with asked(chunks) as client:
        answer = client.ask([1, 2], heard.append)
    assert (answer.text, answer.output_ids) == ("".join(PARTS), tuple(range(NUM_NEW)))
    assert heard == ["".join(PARTS[:end]) for end in range(1, len(PARTS) + 1)]


@pytest.mark.parametrize("chunk", [{"error": "no"}, {"text": "?"}, {"output_ids": 3}])
def test_what_is_no_answer_ends_the_demo(chunk: dict[str, object]) -> None:
    with asked([chunk]) as client, pytest.raises(AskingError, match="broke off"):
        client.ask([1])


def test_a_text_without_tokens_ends_the_demo() -> None:
    """Or a prompt would never be long enough."""
    with asked([]) as client, pytest.raises(AskingError, match="tokenize"):
        Talk(client.tokenize).prompt(0, 100)


@contextlib.contextmanager
def asked(chunks: list[dict[str, object]]) -> Iterator[Client]:
    handler = type("Handler", (Streams,), {"chunks": chunks})
    with serving(HTTPServer(("127.0.0.1", 0), handler)) as url:
        yield Client(url, "demo")


def test_a_terminal_obeys_no_answer() -> None:
    console, said = console_of(is_terminal=True)
    phases = Phases(console)
    with phases.shown(), phases.phase("Asking", 1) as step:
        step.hear("\x1b]0;owned\x07 \x1b[2J[red]\\\\\\")
    assert "owned" in said.getvalue()
    assert "\x1b]0" not in said.getvalue() and "\x1b[2J" not in said.getvalue()
    assert one_line("a\n b\x1b") == "a b\ufffd"


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (200, b"<html>", "is no SGLang server"),
        (200, b"[]", "is no SGLang server"),
        (404, b"", r"is no SGLang server (HTTP 404)"),
        (401, b"", "asks for a key"),
        (200, {}, "without tiers"),
        (200, {"internal_states": [{}, {}]}, "2 replicas"),
    ],
)
def test_another_kind_of_server_is_refused(
    status: int,
    body: bytes | dict[str, object],
    sentence: str,
    interruption: Interruption,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stock = {"internal_states": [{}], "page_size": 64, "served_model_name": "m"}
    stock["max_total_num_tokens"] = 8192
    data = body if isinstance(body, bytes) else json.dumps({**stock, **body}).encode()
    handler = type("Handler", (NotSGLang,), {"status": status, "body": data})
    with serving(HTTPServer(("127.0.0.1", 0), handler)) as url:
        assert sentence in refusal(["--url", url], interruption, capsys)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_waits_until_it_is_allowed(
    interruption: Interruption, number: signal.Signals, raised: type[BaseException]
) -> None:
    interruption.install()
    os.kill(os.getpid(), number)  # while a process is started, say
    with pytest.raises(raised), interruption.allowed():
        pytest.fail("went on")


def test_impatience_does_not_stop_the_clean_up(interruption: Interruption) -> None:
    interruption.install()
    with pytest.raises(KeyboardInterrupt), interruption.allowed():
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_check_empties_no_existing_file(
    tmp_path: Path, interruption: Interruption, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    path.write_text("{}")
    refusal(["--json", str(path), "--url", "http://127.0.0.1:9"], interruption, capsys)
    assert path.read_text() == "{}"

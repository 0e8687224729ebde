"""The command line of ``sglang-tiered demo``: what the tiers do, seen in some two minutes.

A prompt is the project's own glossary behind a number of its own, so that no two share a first
page, and a question whose answer stands there. Every prompt goes to the device and, at the same
time, to host memory and NVMe; the least recently used leave device and host memory. So the newest
are on the device, those before them in host memory only, and the first on NVMe only. A prompt at
the edge of a tier may lie on either side, so none of those is asked again. Ctrl-C at any moment is
taken only where nothing can be left behind.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
import uuid
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.client.calls import TierClient
from sglang_tiered.demo.server import (
    NotServingError,
    ServerProcess,
    add_model_flag,
    demo_command,
    free_port,
)
from sglang_tiered.errors import ConfigError, RequestError
from sglang_tiered.loopback import is_loopback_url, opener_for
from sglang_tiered.tools.machine import describe_machine, describe_versions
from sglang_tiered.tools.terminal import Parser, note, print_table, printable, run_program

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence


FIRST, DEVICE, HOST, NVME = "first time", "device", "host", "NVMe"
KILLED = "NVMe after kill -9"
EXPECTED = {FIRST: "computed", DEVICE: "device", HOST: "host", NVME: "nvme", KILLED: "nvme"}

NUM_NEW = 12
"""Tokens of an answer: enough to say something, few enough to be quick."""
# Those that the trained demo model answers out of the text, with the row among the last ones: it is
# small.
ASKED = ("admission", "credit", "extent", "hit, miss", "namespace")

_DEADLINE_S = 300.0
_FAILURES = (OSError, ValueError, LookupError, TypeError, AttributeError, http.client.HTTPException)
_START_DEADLINE_S = 900.0  # on two cores that are idle it takes 20 s
_MOST_S = 60  # of new prompts to a server that was up
_MOST_PROMPT_TOKENS = 1536  # long enough for a load to be worth it with a model so small
_LEAST_ON_DEVICE = 5
_PROMPTS_PER_ROW = 3


@dataclass(frozen=True)
class AskedServer:
    """What the demo must know of a server; sizes in tokens."""

    model: str
    device_tokens: int
    host_tokens: int
    page_size: int
    has_nvme: bool


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    output_ids: list[int]
    tokens: dict[str, int]  # of the prompt, by where they came from
    text: str


def glossary() -> dict[str, str]:
    """Meanings by word."""
    page = resources.files(__package__ or "").joinpath("glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    return {word: re.sub(r"[`*]", "", meaning) for word, meaning in rows if word != "word"}


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except _FAILURES as error:
        raise NotServingError(f"the server broke off a request ({error})") from error


class Interruption:
    """Signals that end the demo. One that comes outside ``allowed`` waits for its next ``check``:
    a process just started is known by then, and a clean-up is over. Only the first one counts, so
    that impatience does not stop the clean-up."""

    def __init__(self) -> None:
        self._end: BaseException | None = None
        self._is_allowed = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def check(self) -> None:
        """Raise what Python raises by itself at Ctrl-C, or end with the code of a shell."""
        if self._end is not None:
            raise self._end

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Around whatever takes long: signals raise at once."""
        try:
            self._is_allowed = True
            self.check()
            yield
        finally:
            self._is_allowed = False

    def _on_signal(self, number: int, _: Any) -> None:
        if self._end is None:
            is_typed = number == signal.SIGINT
            self._end = KeyboardInterrupt() if is_typed else SystemExit(128 + number)
            if self._is_allowed:
                self.check()


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sglang-tiered demo",
        description="Asks a small server more than its device and host memory hold, asks again, "
        "kills it with kill -9 and asks again; shows where prompts came from, and how soon.",
    )
    parser.add_argument(
        "--url",
        help="ask the server that is up there instead, and end nothing: what others have in its "
        f"device and host memory moves to NVMe, as far as {_MOST_S} s of new prompts go",
    )
    add_model_flag(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser


def run(arguments: Sequence[str], interruption: Interruption) -> int:
    options = make_parser().parse_args(arguments)
    path: Path | None = options.json
    if path and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ConfigError(f"--json {path} cannot be written; name a file in a writable folder")
    try:
        if options.url is None:
            demo = _ask_our_own(options.demo_model, interruption)
        else:
            with interruption.allowed():
                demo = Demo(options.url)
                demo.ask_rows(_MOST_S)
    except (NotServingError, RequestError) as error:
        note(str(error))
        return 1
    interruption.check()
    is_here = options.url is None or is_loopback_url(options.url)
    report = document(demo.rows, demo.target, is_here=is_here)
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if missing := [row for row in demo.ages if row not in demo.rows]:
        note(f"not asked: {', '.join(missing)}; too little was computed in time, or lies there")
    return show(report)


def make_plan(target: AskedServer) -> tuple[int, dict[str, range]]:
    """The length of a prompt, and by row the ages of those asked again: how many new prompts are
    asked after one."""
    page = target.page_size
    pages = min(_MOST_PROMPT_TOKENS, target.device_tokens // _LEAST_ON_DEVICE) // page
    length = max(pages, 1) * page + 1  # the last token of a prompt is always computed
    held = (length + NUM_NEW) // page * page  # what stays of a prompt and its answer
    fit_device, fit_host = target.device_tokens // held, target.host_tokens // held
    if fit_device < 2:
        raise ConfigError(
            f"the device holds {target.device_tokens:,} tokens, fewer than two prompts of "
            f"{held:,}; the demo needs a larger --max-total-tokens"
        )
    off_device = -(-target.device_tokens // held)
    off_host = max(off_device, -(-target.host_tokens // held)) + 1
    return length, {
        DEVICE: range(min(_PROMPTS_PER_ROW, fit_device - 1)),
        HOST: range(off_device, min(off_device + _PROMPTS_PER_ROW, fit_host)),
        NVME: range(off_host, off_host + (_PROMPTS_PER_ROW if target.has_nvme else 0)),
    }


class Demo:
    """One client of one server, which is asked, and by row what it answered to which prompt. Raises
    ``ConfigError`` where the demo cannot run."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # Keeps the demo's pages apart from everybody else's, and from its own last run's.
        self._salt = f"sglang-tiered-demo-{uuid.uuid4()}"
        try:
            self._opener = opener_for(url)  # once: making one may read certificates
            with self._open("/server_info") as response:
                info = json.load(response)
            states = [state.get("sglang_tiered", {}) for state in info["internal_states"]]
            pools = [int(info[name]) for name in ("max_total_num_tokens", "page_size")]
            tiers = states[0].get("tiers") if len(states) == 1 else None
        except _FAILURES as error:
            raise ConfigError(
                f"no SGLang server answers the demo at {url} ({error}); pass http://HOST:PORT of "
                "one that is up and wants no key"
            ) from error
        if tiers is None:
            raise ConfigError(
                f"{url} has no tiers, or several replicas, where a prompt may return to another; "
                "start a server with scripts/serve"
            )
        host_tokens = int(tiers["host"]["capacity_tokens"])
        name = str(info.get("served_model_name"))
        self.target = AskedServer(name, pools[0], host_tokens, pools[1], "nvme" in tiers)
        self.length, self.ages = make_plan(self.target)
        self.prompts: list[list[int]] = []
        self.rows: dict[str, dict[int, Answer]] = {}
        self.warm_up(1)

    def warm_up(self, life: int) -> None:
        """A prompt of no row: the first one of a server's life takes seconds."""
        self.ask(self.prompt(-life, self.length))

    def ask_rows(self, most_s: float = math.inf) -> None:
        """New prompts until some lie on NVMe only, or for so long; then some of each tier."""
        wanted = max(age for ages in self.ages.values() for age in ages) + 1
        deadline = time.monotonic() + most_s
        _say(f"Asking {wanted:,} new prompts of {self.length:,} tokens")
        while len(self.prompts) < wanted and (not self.prompts or time.monotonic() < deadline):
            self.prompts.append(self.prompt(len(self.prompts), self.length))
            self._ask(FIRST, len(self.prompts) - 1)
        newest = len(self.prompts) - 1
        for source, ages in self.ages.items():
            if numbers := [newest - age for age in ages if age <= newest]:
                self.ask_again(source, numbers)

    def ask_again(self, source: str, numbers: Sequence[int]) -> None:
        _say(f"Asking {len(numbers)} again: {source}")
        for number in numbers:
            self._ask(source, number)

    def _ask(self, source: str, number: int) -> None:
        answer = self.ask(self.prompts[number])
        self.rows.setdefault(source, {})[number] = answer
        found = ", ".join(f"{tier} {tokens:,}" for tier, tokens in answer.tokens.items() if tokens)
        text = " ".join(answer.text.split())
        _say(f"  {ASKED[number % len(ASKED)]}: {text} ({answer.ttft_s:.2f} s: {found})")

    def prompt(self, number: int, length: int) -> list[int]:
        """``length`` token ids. The row that is asked for is among the last ones."""
        word = ASKED[number % len(ASKED)]
        rows = {each: f"{each}: {meaning}." for each, meaning in glossary().items()}
        # In an order of its own, so that another prompt's pages would show in the answer.
        order = random.Random(number).sample([*rows.values()], len(rows))
        order.remove(rows[word])
        order.insert(-2, rows[word])
        head = self._tokenize(f"{number}. Glossary\n\n")
        text = self._tokenize("\n".join(order))
        tail = self._tokenize(f'\n\nQuestion: What does "{word}" mean?\nAnswer: {word}:')
        room = max(length - len(head) - len(tail), 0)
        text *= -(-room // len(text))
        return (head + text[len(text) - room :] + tail)[:length]

    @_answering()
    def ask(self, prompt: list[int]) -> Answer:
        """Greedy, streamed: the first chunk is the first token."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True},
            "cache_salt": self._salt,
            "stream": True,
        }
        text, output_ids, meta, ttft_s = "", list[int](), dict[str, Any](), 0.0
        started = time.perf_counter()
        with self._open("/generate", body) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                ttft_s = ttft_s or time.perf_counter() - started
                chunk = json.loads(line[len(b"data: ") :])
                if "error" in chunk:
                    raise ValueError(chunk["error"])
                part, tokens, meta = chunk["text"], chunk["output_ids"], chunk["meta_info"]
                # All so far, or with --incremental-streaming-output what is new.
                is_new = len(tokens) < meta["completion_tokens"]
                text = text + part if is_new else part
                output_ids = output_ids + tokens if is_new else tokens
        if len(output_ids) != NUM_NEW:
            raise ValueError(f"{NUM_NEW} tokens were asked, {len(output_ids)} came")
        details = meta.get("cached_tokens_details") or {}
        names = {"device": "device", "host": "host", "nvme": "storage"}
        found = {tier: int(details.get(name) or 0) for tier, name in names.items()}
        found["computed"] = len(prompt) - sum(found.values())
        return Answer(ttft_s, output_ids, found, text)

    def wait_until_durable(self, prompt: list[int]) -> None:
        """Until every whole page of the prompt is on NVMe for good."""
        with TierClient(self._url) as client:
            where: Any = {"input_ids": prompt, "cache_salt": self._salt}
            client.checkpoint(tier="nvme", within_s=_DEADLINE_S, **where)

    @_answering()
    def _tokenize(self, text: str) -> list[int]:
        """The server's tokens of a text, without any that begin or end one."""
        body = {"model": "default", "prompt": text, "add_special_tokens": False}
        with self._open("/tokenize", body) as response:
            tokens = [int(token) for token in json.load(response)["tokens"]]
        if not tokens:
            raise ValueError("a text has no tokens")
        return tokens

    def _open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers)
        response: http.client.HTTPResponse = self._opener.open(request, timeout=_DEADLINE_S)
        return response


def document(
    rows: dict[str, dict[int, Answer]], target: AskedServer, *, is_here: bool
) -> dict[str, Any]:
    """``is_here``: whether the server runs on this machine."""
    shown = []
    for source, answers in rows.items():
        seconds = [answer.ttft_s for answer in answers.values()]
        ttft_s = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
        tokens = {
            tier: sum(answer.tokens[tier] for answer in answers.values())
            for tier in ("device", "host", "nvme", "computed")
        }
        row = {"from": source, "num_prompts": len(answers), "ttft_s": ttft_s, "tokens": tokens}
        shown.append(row)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine() if is_here else {},
        "settings": {**asdict(target), "versions": describe_versions() if is_here else {}},
        "rows": shown,
        "answers_equal": all(
            answer.output_ids == rows[FIRST][number].output_ids
            for answers in rows.values()
            for number, answer in answers.items()
        ),
    }


def show(report: dict[str, Any]) -> int:
    """A table of 80 columns at most, and whether all is as it should be: the exit code."""
    lines, wrong = [], []
    for row in report["rows"]:
        median, least, most = (f"{seconds * 1e3:.0f}" for seconds in row["ttft_s"].values())
        faster = report["rows"][0]["ttft_s"]["median"] / row["ttft_s"]["median"]
        tokens = [f"{number:,}" for number in row["tokens"].values()]
        lines.append([row["from"], f"{median} ({least} to {most})", *tokens, f"{faster:.1f}x"])
        if row["tokens"][EXPECTED[row["from"]]] * 2 <= sum(row["tokens"].values()):
            wrong.append(row["from"])
    _say("Time to the first token in ms, median (least to most), and prompt tokens by their place:")
    print_table(("asked", "TTFT", "device", "host", "NVMe", "computed", "faster"), lines)
    if not report["answers_equal"]:
        note("every answer was expected to be the same as the first time, but some differ")
    elif wrong:
        note(f"not mostly from where they were expected: {', '.join(wrong)}")
    else:
        _say("All answers were equal, token by token.")
        return 0
    return 1


def _ask_our_own(model: str, interruption: Interruption) -> Demo:
    """Whatever happens, nothing of the server is left."""
    allowed = interruption.allowed
    with allowed():
        command = demo_command(["--demo-model", model])  # which may fetch it
    # Not in /tmp, which is memory on many systems, unless TMPDIR says so.
    place = None if "TMPDIR" in os.environ or not os.access("/var/tmp", os.W_OK) else "/var/tmp"
    with tempfile.TemporaryDirectory(prefix="sglang-tiered-demo-", dir=place) as folder:
        _say("Starting the demo server")
        server = _start(command, Path(folder))
        try:
            with allowed():
                server.wait_until_it_serves(_START_DEADLINE_S)
                demo = Demo(server.url)
                if not demo.target.has_nvme:
                    raise NotServingError(f"no NVMe tier is there:\n{server.log[-4000:]}")
                demo.ask_rows()
                again = sorted({number for row in demo.ages for number in demo.rows.get(row, ())})
                _say("Waiting until all of it is durable")
                for number in again:
                    demo.wait_until_durable(demo.prompts[number])
            _say("Killing it (kill -9), starting it again")
            server.kill()
            server = _start(command, Path(folder), server.port)
            with allowed():
                server.wait_until_it_serves(_START_DEADLINE_S)
                demo.warm_up(2)
                demo.ask_again(KILLED, again)
        finally:
            server.kill()
    return demo


def _start(command: Sequence[str], folder: Path, port: int | None = None) -> ServerProcess:
    """With a place of its own, and without the index of other servers."""
    port, log = port or free_port(), folder / "server.log"
    environment = {**os.environ, "TMPDIR": str(folder)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
    environment.pop("SGLANG_TIERED_INDEX_URL", None)
    command = [*command, "--tier-dir", str(folder / "kv"), "--port", str(port)]
    return ServerProcess(port, ServerProcess.open_process(command, environment, log), log)


def _say(line: str) -> None:
    """At once, also into a pipe. What another's server says may be anything."""
    print(printable(line), flush=True)


if __name__ == "__main__":
    sys.exit(run_program(lambda: run(sys.argv[1:], Interruption())))

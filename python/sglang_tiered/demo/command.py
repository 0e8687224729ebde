"""The command line of ``sglang-tiered demo``: what the tiers do, seen in some two minutes.

Every prompt goes to the device and, at the same time, to host memory and NVMe; the least recently
used leave device and host memory. So the newest are on the device, those before them in host memory
only, and the first on NVMe only. A prompt at the edge of a tier may lie on either side, so none of
those is asked again. Ctrl-C at any moment is taken only where nothing can be left behind.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.demo.asking import ASKED, NUM_NEW, Answer, AskedServer, Client
from sglang_tiered.demo.server import (
    NotServingError,
    ServerProcess,
    add_model_flag,
    demo_command,
    free_port,
)
from sglang_tiered.errors import ConfigError, RequestError
from sglang_tiered.loopback import is_loopback_url
from sglang_tiered.tools.machine import describe_machine, describe_versions
from sglang_tiered.tools.terminal import Parser, note, print_table, printable, run_program

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence


FIRST, DEVICE, HOST, NVME = "first time", "device", "host", "NVMe"
KILLED = "NVMe after kill -9"
EXPECTED = {FIRST: "computed", DEVICE: "device", HOST: "host", NVME: "nvme", KILLED: "nvme"}

_START_DEADLINE_S = 900.0  # on two cores that are idle it takes 20 s
_MOST_S = 60  # of new prompts to a server that was up
_MOST_PROMPT_TOKENS = 1536  # long enough for a load to be worth it with a model so small
_LEAST_ON_DEVICE = 5
_PROMPTS_PER_ROW = 3


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
    report = document(demo.rows, demo.client.target, is_here=is_here)
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
    """A server that is asked, and by row what it answered to which prompt."""

    def __init__(self, url: str) -> None:
        self.client = Client(url)
        self.length, self.ages = make_plan(self.client.target)
        self.prompts: list[list[int]] = []
        self.rows: dict[str, dict[int, Answer]] = {}
        self.warm_up(1)

    def warm_up(self, life: int) -> None:
        """A prompt of no row: the first one of a server's life takes seconds."""
        self.client.ask(self.client.prompt(-life, self.length))

    def ask_rows(self, most_s: float = math.inf) -> None:
        """New prompts until some lie on NVMe only, or for so long; then some of each tier."""
        wanted = max(age for ages in self.ages.values() for age in ages) + 1
        deadline = time.monotonic() + most_s
        _say(f"Asking {wanted:,} new prompts of {self.length:,} tokens")
        while len(self.prompts) < wanted and (not self.prompts or time.monotonic() < deadline):
            self.prompts.append(self.client.prompt(len(self.prompts), self.length))
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
        answer = self.client.ask(self.prompts[number])
        self.rows.setdefault(source, {})[number] = answer
        found = ", ".join(f"{tier} {tokens:,}" for tier, tokens in answer.tokens.items() if tokens)
        text = " ".join(answer.text.split())
        _say(f"  {ASKED[number % len(ASKED)]}: {text} ({answer.ttft_s:.2f} s: {found})")


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
                if not demo.client.target.has_nvme:
                    raise NotServingError(f"no NVMe tier is there:\n{server.log[-4000:]}")
                demo.ask_rows()
                again = sorted({number for row in demo.ages for number in demo.rows.get(row, ())})
                _say("Waiting until all of it is durable")
                for number in again:
                    demo.client.wait_until_durable(demo.prompts[number])
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

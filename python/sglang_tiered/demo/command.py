"""The command line of ``sglang-tiered demo``, and its phases. Ctrl-C at any moment is taken only
where nothing can be left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape

from sglang_tiered.demo.plan import (
    DEVICE,
    FIRST,
    HOST,
    KILLED,
    NUM_NEW,
    NVME,
    DemoPlan,
    Talk,
    make_plan,
)
from sglang_tiered.demo.questions import (
    TIERS,
    AskingError,
    Client,
    DemoTarget,
    TimedAnswer,
    read_target,
)
from sglang_tiered.demo.report import (
    STYLES,
    Phases,
    Row,
    document,
    make_table,
    one_line,
    verdict,
)
from sglang_tiered.demo.server import (
    NotServingError,
    ServerProcess,
    add_model_flag,
    demo_command,
    free_port,
)
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import require_positive
from sglang_tiered.loopback import ask_loopback_directly
from sglang_tiered.tools.terminal import Parser, note

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

__all__ = ["Interruption", "make_parser", "run"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_START_DEADLINE_S = 900.0  # on two cores that are idle it takes 20 s
_MOST_S = 60
_WARM_UP = 1 << 20  # numbers of prompts that no plan reaches
_WHERE = {
    DEVICE: "on the device",
    HOST: "in host memory only",
    NVME: "on NVMe only",
}


class Interruption:
    """Signals that end the demo. One that comes outside ``allowed`` waits for its next ``check``:
    a process just started is known by then, and a clean-up is over. Only the first one counts, so
    that impatience does not stop the clean-up."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._is_allowed = False

    def install(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def check(self) -> None:
        """Raise what Python raises by itself at Ctrl-C, or end with the code of a shell."""
        if self._number is not None:
            raise (
                KeyboardInterrupt
                if self._number == signal.SIGINT
                else SystemExit(128 + self._number)
            )

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
        if self._number is None:
            self._number = number
            if self._is_allowed:
                self._is_allowed = False
                self.check()


def run(arguments: Sequence[str], interruption: Interruption) -> int:
    options = make_parser().parse_args(arguments)
    ask_loopback_directly()
    if options.max_tokens is not None:
        require_positive("--max-tokens", options.max_tokens)
    if options.json is not None:
        _check_writable(options.json)
    if options.url is None:
        client = Client(f"http://127.0.0.1:{free_port()}", "demo")
    else:
        client = Client(options.url.rstrip("/"), f"sglang-tiered-demo-{uuid.uuid4()}")
    demo = _Demo(interruption, Phases(Console()), client, Talk(client.tokenize))
    try:
        if options.url is None:
            target, plan = _ask_our_own(demo, options.demo_model, options.max_tokens)
        else:
            target, plan = _ask_another(demo, options.max_tokens)
    except (AskingError, NotServingError) as error:
        note(str(error))
        return 1
    interruption.check()
    rows = demo.rows
    console = Console()
    console.print(make_table(rows, plan))
    for row, why in plan.missing.items():
        note(f"the row {row!r} is missing: {why}")
    problem = verdict(rows)
    if problem is None:
        console.print("All answers were equal, token by token.", highlight=False)
    else:
        note(problem)
    if options.json is not None:
        settings = {
            "server": "the demo's own" if options.url is None else "one that was up (--url)",
            "model": target.model,
            "device_tokens": target.pools.device_tokens,
            "host_tokens": target.pools.host_tokens,
            "page_size": target.pools.page_size,
            "prompt_tokens": plan.prompt_tokens,
            "new_tokens": NUM_NEW,
            "missing": plan.missing,
        }
        host = "localhost" if options.url is None else urlsplit(options.url).hostname
        is_here = host in ("localhost", "127.0.0.1", "::1")
        report = document(rows, settings, is_here=is_here)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if problem is None else 1


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sglang-tiered demo",
        description="Asks a small server more than its device and host memory hold, asks again, "
        "kills it with kill -9, starts it and asks again; shows where prompts came from, and how "
        "soon.",
    )
    parser.add_argument(
        "--url",
        help="ask the server that is up there instead, which fills its device and host memory and "
        "ends nothing",
    )
    add_model_flag(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="tokens of new prompts at most; default with --url: what the server computes in about "
        "a minute",
    )
    return parser


def _check_writable(path: Path) -> None:
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json {path} cannot be written; name a file in a writable directory")


@dataclass
class _Demo:
    interruption: Interruption
    phases: Phases
    client: Client
    talk: Talk
    rows: list[Row] = field(default_factory=list)

    def warm_up(self, plan: DemoPlan, number: int) -> float:
        """Two prompts of no row: the first one of a server's life takes seconds. Returns how long
        the second took."""
        prompts = [
            self.talk.prompt(_WARM_UP + number + offset, plan.prompt_tokens) for offset in range(2)
        ]
        return [self.client.ask(prompt).ttft_s for prompt in prompts][-1]

    def ask_row(self, plan: DemoPlan, source: str, numbers: Sequence[int], title: str) -> None:
        answers = {}
        with self.phases.phase(title, len(numbers)) as step:
            for number in numbers:
                prompt = self.talk.prompt(number, plan.prompt_tokens)
                answers[number] = self.client.ask(prompt, step.hear)
                self.phases.say(_said(self.talk.question(number), answers[number]))
                step.done()
        self.rows.append(Row(source, answers))

    def ask_rows(self, plan: DemoPlan) -> None:
        everything = range(plan.num_prompts)
        title = f"Asking {plan.num_prompts} new prompts of {plan.prompt_tokens:,} tokens"
        self.ask_row(plan, FIRST, everything, title)
        for source, numbers in plan.returns.items():
            title = f"Asking again: {len(numbers)} {_WHERE[source]}"
            self.ask_row(plan, source, numbers, title)


def _said(question: str, answer: TimedAnswer) -> str:
    """Question, answer, and where the prompt's tokens came from."""
    found = {tier: answer.tokens[tier] for tier in TIERS if answer.tokens[tier]}
    sources = ", ".join(f"[{STYLES[tier]}]{tier} {number:,}[/]" for tier, number in found.items())
    text = escape(one_line(answer.text))
    return f"  {question} [bold]{text} [/][dim]({answer.ttft_s:.2f} s:[/] {sources}[dim])[/]"


def _ask_another(demo: _Demo, max_tokens: int | None) -> tuple[DemoTarget, DemoPlan]:
    with demo.interruption.allowed():
        target = read_target(demo.client.url)
        note(
            "this fills device and host memory of that server: what others have there moves to "
            "NVMe, and the prompts stay until they are evicted"
        )
        with demo.phases.shown():
            with demo.phases.phase("Warming up"):
                whole = make_plan(target.pools)
                warm_up_s = demo.warm_up(whole, 0)
            in_time = max(int(_MOST_S / warm_up_s), 1) * whole.prompt_tokens
            plan = make_plan(target.pools, in_time if max_tokens is None else max_tokens)
            demo.ask_rows(plan)
    return target, plan


def _ask_our_own(demo: _Demo, model: str, max_tokens: int | None) -> tuple[DemoTarget, DemoPlan]:
    """Whatever happens, nothing of the server is left."""
    allowed, phase = demo.interruption.allowed, demo.phases.phase
    with allowed():
        command = demo_command(["--demo-model", model])  # which may fetch it
    # Not in /tmp, which is memory on many systems, unless TMPDIR says so.
    place = None if "TMPDIR" in os.environ or not os.access("/var/tmp", os.W_OK) else "/var/tmp"
    with tempfile.TemporaryDirectory(prefix="sglang-tiered-demo-", dir=place) as name:
        folder, client = Path(name), demo.client
        port = urlsplit(client.url).port or 0
        server = _spawn(command, folder, port)
        try:
            with demo.phases.shown():
                with allowed(), phase("Starting the demo server"):
                    _wait(server)
                    target = read_target(client.url)
                    if not target.pools.has_nvme:
                        raise AskingError(
                            "the demo server has no NVMe tier: " + _last_words(server.log_path)
                        )
                    plan = make_plan(target.pools, max_tokens)
                    demo.warm_up(plan, 0)
                with allowed():
                    demo.ask_rows(plan)
                    with phase("Waiting until all of it is durable", plan.num_prompts) as step:
                        for number in range(plan.num_prompts):
                            prompt = demo.talk.prompt(number, plan.prompt_tokens)
                            client.wait_until_durable(prompt)
                            step.done()
                with phase("Killing it (kill -9), starting it again"):
                    server.kill()
                    server = _spawn(command, folder, port)
                    with allowed():
                        _wait(server)
                        demo.warm_up(plan, 2)
                with allowed():
                    again = sorted({number for row in plan.returns.values() for number in row})
                    title = f"Asking again: those {len(again)}, on NVMe only"
                    demo.ask_row(plan, KILLED, again, title)
        finally:
            server.kill()
    return target, plan


def _last_words(log: Path) -> str:
    """The last sentence that is ours in a server's log."""
    ours = [
        line for line in log.read_text(errors="replace").splitlines() if "sglang-tiered: " in line
    ]
    return ours[-1].partition("sglang-tiered: ")[2] if ours else "its log does not say why"


def _spawn(command: Sequence[str], folder: Path, port: int) -> ServerProcess:
    """With a place of its own, and without the index of other servers."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
    environment.pop("SGLANG_TIERED_INDEX_URL", None)
    command = [*command, "--tier-dir", str(folder / "kv"), "--port", str(port)]
    log_path = folder / "server.log"
    process = ServerProcess.open_process(command, environment, log_path)
    return ServerProcess(port, process, log_path)


def _wait(server: ServerProcess) -> None:
    try:
        server.wait_until_it_serves(_START_DEADLINE_S)
    except NotServingError as error:
        why = str(error).partition("\n")[0]
        last = (server.log.strip().splitlines() or ["nothing in its log"])[-1]
        raise AskingError(f"the demo {why} {last}") from error

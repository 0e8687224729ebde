"""The programs of ``examples/`` do what they say, run as by a user, on small real servers."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from redis_server import RedisServer

from conftest import ALWAYS, PAGE, ROOT
from server_process import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zygote import Zygotes

    Run = Callable[..., dict[str, list[str]]]


pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 480.0  # one program starts three engines, each of which imports SGLang twice
SIZES = (
    *("--max-total-tokens", "8192", "--tier-host-bytes", "48MiB", *ALWAYS),
    *("--tier-nvme-bytes", "256MiB"),
)


@pytest.fixture(scope="module")
def servers(
    model: Path, tmp_path_factory: pytest.TempPathFactory, zygotes: Zygotes
) -> Iterator[dict[str, Server]]:
    """Two that have an index, and two that have a bucket; the second has both."""
    folder = tmp_path_factory.mktemp("servers")
    bucket = ("--tier-object-url", str(folder / "bucket"))
    with RedisServer() as redis:
        index = {"SGLANG_TIERED_INDEX_URL": redis.url}
        started = {}
        for name, tiers, environment in (
            ("indexed", (), index),
            ("both", bucket, index),
            ("bucket", bucket, {}),
        ):
            flags = (*SIZES, *tiers, "--tier-dir", f"{folder}/{name}")
            log = folder / f"{name}.log"
            started[name] = Server.spawn(model, log, *flags, environment=environment)
        try:
            for server in started.values():
                server.wait_until_it_generates()
            yield started
        finally:
            for server in started.values():
                server.kill()


def printed(text: str) -> dict[str, list[str]]:
    """The lines of a program by their first word; what others print is left out."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        found.setdefault(word, []).append(rest)
    return found


def number(found: dict[str, list[str]], word: str) -> int:
    """The first number of the only line that begins with a word."""
    (line,) = found[word]
    match = re.search(r"\d+", line)
    assert match is not None, line
    return int(match[0])


def run(*words: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name: str, *arguments: str) -> dict[str, list[str]]:
    return printed(run(f"examples/{name}.py", *arguments))


@pytest.fixture
def fork(zygotes: Zygotes, tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    """Likewise for those that import SGLang, without the time that this takes."""

    def run(file: str, *arguments: str) -> dict[str, list[str]]:
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
        process = zygotes.fork([str(ROOT / file), *arguments], dict(os.environ), log)
        request.addfinalizer(process.kill)
        assert process.wait(DEADLINE_S) == 0, log.read_text(errors="replace")
        return printed(log.read_text(errors="replace"))

    return run


def test_python_of_the_page_runs(servers: dict[str, Server]) -> None:
    page = (ROOT / "docs" / "conversations.md").read_text()
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    told = run("-c", program.replace("http://127.0.0.1:30000", servers["both"].url))
    assert re.search(r"^404 .*; pass its text or input_ids$", told, re.MULTILINE)


def test_openai_client_pins_and_forgets(servers: dict[str, Server]) -> None:
    found = example("openai_client", "--url", servers["indexed"].url)
    assert len(found["answer"]) == 2
    pinned, bytes_left = found["pinned"]
    assert int(pinned.split()[0]) >= 2 * PAGE
    assert number(found, "forgot") >= 2 * PAGE
    assert bytes_left == "0 bytes"


def test_second_server_takes_what_the_first_computed(servers: dict[str, Server]) -> None:
    found = example("sharing", "--first", servers["indexed"].url, "--second", servers["both"].url)
    assert number(found, "loaded") == number(found, "found") >= 5 * PAGE


def test_conversation_moves_through_a_directory(servers: dict[str, Server], tmp_path: Path) -> None:
    file = ("--file", str(tmp_path / "talk.json"))
    left = example("move", "leave", "--url", servers["both"].url, *file)
    arrived = example("move", "arrive", "--url", servers["bucket"].url, *file)
    assert number(arrived, "held") == number(left, "left") == number(arrived, "loaded")
    assert number(arrived, "loaded") >= 5 * PAGE


def test_frontend_program_goes_on_after_a_restart(
    fork: Run, servers: dict[str, Server], tmp_path: Path, model: Path
) -> None:
    server, file = servers["bucket"], ("--file", str(tmp_path / "agent.txt"))
    saved = fork("examples/frontend_language.py", "save", "--url", server.url, *file)
    server.kill()
    servers["bucket"] = server = Server.start(model, server.log_path, *server.arguments)
    resumed = fork("examples/frontend_language.py", "resume", "--url", server.url, *file)
    assert number(resumed, "held") == number(saved, "pinned") == number(resumed, "loaded")
    assert number(resumed, "loaded") >= 3 * PAGE


def test_engine_answers_as_a_server_and_starts_again(
    fork: Run, servers: dict[str, Server], tmp_path: Path, model: Path
) -> None:
    program = "test/integration/engine_lifetime.py"
    found = fork(program, str(model), str(tmp_path / "kv"))
    engine = runpy.run_path(str(ROOT / "examples" / "engine.py"))
    lines = []
    for question in engine["QUESTIONS"]:
        sampling = {"temperature": 0, "max_new_tokens": 16}
        body = {"text": engine["MANUAL"] + question, "sampling_params": sampling}
        text = servers["bucket"].request("/generate", body)["text"]
        lines.append(f"{question} {text!r}")
    assert found["answer"] == lines and len(lines) == 4
    assert lines[0].endswith(found["returned"][0])
    assert number(found, "loaded") == number(found, "pinned") >= 5 * PAGE
    assert "second" not in found
    assert number(found, "durable") >= 5 * PAGE and found["costs"] == ["1 1"]
    assert found["ended"] == ["[]"] and found["down"] == ["True []"]

"""One model and one server without tiers for all; other servers shared by the tests of a module
where they can be."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platform_process
import pytest
import report

from kit.openapi import check_answer
from kit.small_model import write_small_model
from prefill_decode import ENVIRONMENT
from server_process import Answer, Server

if TYPE_CHECKING:
    from zygote import ForkedProcess, Zygotes

ROOT = Path(__file__).parents[2]
PAGE = 64

# Smaller than the prompts of a round, so that rounds outgrow device memory and host memory.
# Models this small may compute faster than they load; tests of what comes back must not depend
# on which is faster today.
ALWAYS = ("--tier-load", "always")
SMALL = ("--max-total-tokens", "4096", "--tier-host-bytes", "36MiB", *ALWAYS)
# Settings that are no flags.
SMALL_REGIONS = ("--config", str(ROOT / "test" / "kit" / "small_regions.yaml"))
SENT_ON_ONE_HOST = ("--config", str(ROOT / "test" / "kit" / "sent_on_one_host.yaml"))

Launch = Callable[..., Server]
Start = Callable[..., list[Server]]

_FORWARDS = {"scheduler", "forward"}
_COPIES = _FORWARDS | {"host-alloc", "d2h"}
ASYNCHRONOUS = {
    "test_disaggregation": _COPIES,
    "test_disaggregation_kinds": _FORWARDS | {"receive"},
    "test_families": _COPIES,
    "test_features": _COPIES,
    "test_object_tier": _COPIES,
    "test_peer_tier": _COPIES,
    "test_small_host": _COPIES | {"h2d", "store", "load"},
    "test_spilling": _COPIES,
    "test_shared_pages": _COPIES,
    "test_tensor_parallel": _COPIES,
    "test_tiers": _COPIES,
}
"""Modules whose servers are on the asynchronous platform (``test/async_platform``), each with seams
that any of its tests passes. The others stay on a CPU whose copies are done at once, as users have
it; ``test_costs`` does because it measures."""


PYTHONPATH = os.environ.get("PYTHONPATH", "")
"""Without the folders that a module puts on it."""


@pytest.fixture(scope="module", autouse=True)
def forked(zygotes: Zygotes, asynchronous: None) -> Iterator[None]:
    """Servers come from a process that has imported SGLang (``zygote``). What a user's own start
    does is seen where scripts and commands are started."""
    with from_zygotes(zygotes):
        yield


@contextlib.contextmanager
def from_zygotes(zygotes: Zygotes) -> Iterator[pytest.MonkeyPatch]:
    def open_process(
        command: list[str], environment: dict[str, str], log_path: Path
    ) -> ForkedProcess:
        assert command[1:3] == ["-m", "sglang_tiered.launch_server"]
        return zygotes.fork(command[1:], environment, log_path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "open_process", staticmethod(open_process))
        yield patch


@pytest.fixture(scope="module", autouse=True)
def asynchronous(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Nothing that the servers of a module did was wrong, and the platform was there to see it.

    ``ASYNC_PLATFORM_SEED`` of the environment is another seed, or without a number none of it;
    ``ASYNC_PLATFORM_MODE`` another mode.
    """
    seed = os.environ.get("ASYNC_PLATFORM_SEED", "1")
    seams = ASYNCHRONOUS.get(request.module.__name__.rpartition(".")[2])
    path = tmp_path_factory.mktemp("platform") / "report.jsonl"
    started: list[Server] = []
    spawn = Server.spawn

    def spawn_and_note(*arguments: Any, **named: Any) -> Server:
        started.append(spawn(*arguments, **named))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        if seams is None or not seed:
            patch.delenv("ASYNC_PLATFORM_SEED", raising=False)
            yield
            return
        for name, value in platform_process.environment(path, seed=int(seed)).items():
            patch.setenv(name, value)
        patch.setattr(Server, "spawn", spawn_and_note)
        yield
    seen = report.read(path)
    assert not seen.violations, seen.told()
    missing = seams - seen.seams if started else set()
    assert not missing, f"the platform was not there: {', '.join(sorted(missing))} never ran"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def stock(
    model: Path, tmp_path_factory: pytest.TempPathFactory, zygotes: Zygotes
) -> Iterator[Server]:
    """SGLang without tiers: what it answers, every other server of the model must."""
    with from_zygotes(zygotes) as patch:
        # It is on no asynchronous platform, whichever module is the first to ask.
        patch.delenv("ASYNC_PLATFORM_SEED", raising=False)
        patch.setenv("PYTHONPATH", PYTHONPATH)
        server = Server.spawn(
            model,
            tmp_path_factory.mktemp("stock") / "server.log",
            *("--tier-mode", "off", "--max-total-tokens", "16384", "--enable-streaming-session"),
            environment=ENVIRONMENT,
        )
    with server:
        server.wait_until_it_generates()
        yield server


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """Of a module; what still runs at its end is killed."""
    started: list[Server] = []
    yield started
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def launch(model: Path, servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Launch:
    logs = tmp_path_factory.mktemp("logs")

    def start(*arguments: str, model_path: Path | None = None) -> Server:
        log = logs / f"server-{len(servers)}.log"
        servers.append(Server.spawn(model_path or model, log, *arguments))
        servers[-1].wait_until_it_generates()
        return servers[-1]

    return start


@pytest.fixture(scope="module")
def start(model: Path, servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start servers side by side: ``start("ab", *flags, a=more_of_a)`` two, each on the directory
    of its letter."""
    folder = tmp_path_factory.mktemp("servers")

    def start(
        names: str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        **of_each: Sequence[str],
    ) -> list[Server]:
        for name in names:
            log, own = folder / f"{len(servers)}-{name}.log", of_each.get(name, ())
            flags = ("--tier-dir", str(folder / name), *arguments, *own)
            servers.append(Server.spawn(model, log, *flags, environment=environment))
        started = servers[-len(names) :]
        for server in started:
            server.wait_until_it_generates()
        return started

    return start


class Disk:
    """How the NVMe tiers of a module's servers behave, as ``slow_disk`` reads it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def order(self, **orders: Any) -> None:
        """From now on; nothing is a disk in order."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(orders))
        new.replace(self.file)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """Of servers that start from now on, which are forked from a zygote: it has ``slow_disk``."""
    made = Disk(tmp_path_factory.mktemp("disk") / "orders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW_DISK_FILE", str(made.file))
        yield made


def make_prompts(seed: int, number: int, length: int) -> list[list[int]]:
    """Prompts of printable bytes that share no first page."""
    source = random.Random(seed)
    return [[source.randrange(32, 127) for _ in range(length)] for _ in range(number)]


def aligned(length: int) -> int:
    """Prompt tokens that whole pages can hold; the last token is always computed."""
    return (length - 1) // PAGE * PAGE


def ask(server: Server, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and answer, which for the ``/tier`` calls are what ``docs/openapi.json`` describes."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, answer = int(response.status), json.loads(response.read())
    except urllib.error.HTTPError as error:
        status, answer = error.code, json.loads(error.read())
    if path.startswith("/tier/"):
        check_answer("GET" if body is None else "POST", path, status, answer)
    return status, answer


def outputs(answers: Iterable[Answer]) -> list[list[int]]:
    return [answer.output_ids for answer in answers]


def residency(server: Server, prompt: list[int], **whose: str) -> dict[str, int]:
    """Leading tokens of a prompt in each tier."""
    status, report = ask(server, "/tier/residency", {"input_ids": prompt, **whose})
    assert status == 200, report
    return dict(report)


def until(condition: Callable[[], object], what: object = "", deadline_s: float = 120.0) -> None:
    """Wait for what servers do, which are not to be asked without pause."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)

"""A prefill and a decode server, and the client that stands in for a router: it sends every
request to both, with a room of its own."""

from __future__ import annotations

import contextlib
import json
import random
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from server_process import START_DEADLINE_S, Server, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Threads of several servers that wait by spinning take each other's cores.
# A front names a pair in headers.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": "1"}
REQUEST_DEADLINE_S = 120.0
ROOMS = random.SystemRandom()


@dataclass
class Reply:
    """What one side answered: HTTP status, body, seconds it took."""

    status: int
    body: Any
    seconds: float

    @property
    def output_ids(self) -> list[int]:
        assert self.status == 200, self.body
        ids: list[int] = self.body["output_ids"]
        return ids

    @property
    def error(self) -> str:
        return str(self.body.get("message") or self.body.get("error") or self.body)


@dataclass
class PrefillDecode:
    """One instance of each role, by ``spawn``; ``prefill`` and ``decode`` may be replaced."""

    model: Path
    logs: Path
    arguments: tuple[str, ...]
    bootstrap_port: int
    prefill: Server
    decode: Server
    num_started: int = 2
    own: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def spawn(
        cls,
        model: Path,
        logs: Path,
        *arguments: str,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
    ) -> PrefillDecode:
        """Launch both; ``arguments`` go to both, the others to one. Does not wait."""
        port = free_port()
        own = {"prefill": tuple(prefill), "decode": tuple(decode)}
        servers = {
            role: spawn_role(model, logs / f"{role}-0.log", role, port, (*arguments, *own[role]))
            for role in ("prefill", "decode")
        }
        return cls(model, logs, arguments, port, servers["prefill"], servers["decode"], own=own)

    def __enter__(self) -> Self:
        """Ready; killed when left."""
        try:
            self.wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_until_ready(self) -> None:
        """Neither role generates alone, so their health says when they listen."""
        for server in (self.prefill, self.decode):
            wait_until_healthy(server)

    def restart(self, role: str) -> Server:
        """A new process of one role, on new ports but for the bootstrap's."""
        log = self.logs / f"{role}-{self.num_started}.log"
        self.num_started += 1
        arguments = (*self.arguments, *self.own[role])
        server = spawn_role(self.model, log, role, self.bootstrap_port, arguments)
        wait_until_healthy(server)
        setattr(self, role, server)
        return server

    def generate(self, prompt: list[int], num_new: int = 8, **extra: Any) -> Reply:
        """Greedy continuation, as the decode side answers it."""
        return self.both(prompt, num_new, **extra)[1]

    def both(self, prompt: list[int], num_new: int = 8, **extra: Any) -> tuple[Reply, Reply]:
        """The answers of prefill and decode."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": ROOMS.randrange(1, 1 << 62),
            **extra,
        }
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda server: post(server, body), (self.prefill, self.decode))
        return first, second

    def generate_all(
        self, prompts: list[list[int]], *, concurrency: int = 4, num_new: int = 8
    ) -> list[Reply]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, num_new), prompts))

    @property
    def handed_over_bytes(self) -> float:
        """What decode had from prefill since it is decode."""
        state = transfer_state(self.decode)
        return state["transfer_bytes:wire"] + state["transfer_bytes:same_host"]

    def kill(self) -> None:
        for server in (self.prefill, self.decode):
            server.kill()


def post(server: Server, body: Any) -> Reply:
    """One request of ``/generate``. A connection that breaks is status 0."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/generate", data, headers)
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_DEADLINE_S) as response:
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    except OSError as error:
        status, text = 0, repr(error).encode()
    took = time.monotonic() - started
    try:
        answer = json.loads(text)
    except ValueError:
        answer = {"message": text.decode(errors="replace")}
    return Reply(status, answer, took)


def transfer_state(server: Server) -> dict[str, float]:
    """The endpoint's counters, as ``/server_info`` shows them."""
    states: list[dict[str, Any]] = server.request("/server_info")["internal_states"]
    return dict(states[0]["sglang_tiered_transfer"])


def wait_until_healthy(server: Server, path: str = "/health") -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"server ended at start:\n{server.log[-4000:]}")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(server.url + path, timeout=5),
        ):
            return
        time.sleep(0.2)
    server.kill()
    raise AssertionError(f"server did not start in time:\n{server.log[-4000:]}")


def spawn_role(
    model: Path, log: Path, role: str, bootstrap_port: int, more: Sequence[str]
) -> Server:
    """Launch ``prefill`` or ``decode`` only. Does not wait."""
    return Server.spawn(
        model,
        log,
        *("--disaggregation-mode", role, "--disaggregation-bootstrap-port", str(bootstrap_port)),
        "--skip-server-warmup",
        *more,
        environment=ENVIRONMENT,
    )

"""A real server as a subprocess on a free port, with deadlines on everything."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from sglang_tiered.demo.server import NotServingError, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START_DEADLINE_S = 400.0  # 20 s where nobody else computes
REQUEST_DEADLINE_S = 120.0
STOP_DEADLINE_S = 30.0


FIRST_PORT, PORTS_EACH, NUM_PARTS, STRIDE = 20_000, 500, 4, 8


def _ports() -> Iterator[int]:
    """Those of one worker of pytest-xdist, a few apart, since some commands take their neighbours
    too."""
    worker = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    part = int(worker[1]) if worker else random.randrange(NUM_PARTS)
    first = FIRST_PORT + part % NUM_PARTS * PORTS_EACH
    for number in itertools.count(random.randrange(PORTS_EACH)):
        turn, offset = divmod(number * STRIDE, PORTS_EACH)
        yield first + (offset + turn) % PORTS_EACH


_own_ports, _ports_lock = _ports(), threading.Lock()


def free_ports(number: int) -> int:
    """The first of so many neighbours that are free, and that no other worker of these tests picks
    before they are bound, which a server does seconds later: all are below 22,000, from where on
    SGLang picks those that its children bind, below 30000, where the documented commands listen,
    and below those of outgoing connections."""
    assert number <= STRIDE
    while True:
        with _ports_lock:
            first = next(_own_ports)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + number):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def free_port() -> int:
    return free_ports(1)


@dataclass
class Answer:
    """What one generation returned: its tokens, and where its prompt came from."""

    output_ids: list[int]
    cached: dict[str, int]

    @property
    def num_cached(self) -> int:
        return sum(self.cached.values())


@dataclass
class Server(ServerProcess):
    """One launched server. ``log`` holds everything its processes printed."""

    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, model: Path, log_path: Path, *arguments: str) -> Server:
        """Launch and wait until it generates. Raises with the end of the log if it does not."""
        server = cls.spawn(model, log_path, *arguments)
        server.wait_until_it_generates()
        return server

    @classmethod
    def spawn(
        cls,
        model: Path,
        log_path: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
    ) -> Server:
        """Launch only, for those who start several side by side. ``environment`` comes on top of
        this process's own."""
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "sglang_tiered.launch_server",
            *("--model-path", str(model), "--dtype", "float32"),
            *("--host", "127.0.0.1", "--port", str(port)),
            # What SGLang picks for its children two servers may pick at the same time.
            *(() if "--dp-size" in arguments else ("--nccl-port", str(free_port()))),
            *arguments,
        ]
        process = cls.open_process(command, {**os.environ, **(environment or {})}, log_path)
        return cls(port, process, log_path, list(arguments), environment or {})

    def __enter__(self) -> Self:
        """Killed when left."""
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_until_it_generates(self, deadline_s: float = START_DEADLINE_S) -> None:
        try:
            self.wait_until_it_serves(deadline_s)
        except NotServingError as error:
            raise AssertionError(str(error)) from error

    def request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=REQUEST_DEADLINE_S) as response:
            text = response.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def generate(self, prompt: list[int], num_new: int = 8, **extra: Any) -> Answer:
        """Greedy continuation of a token prompt."""
        body = {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": num_new,
                "ignore_eos": True,
            },
            **extra,
        }
        answer = self.request("/generate", body)
        details = answer["meta_info"].get("cached_tokens_details") or {}
        cached = {tier: details.get(tier) or 0 for tier in ("device", "host", "storage")}
        return Answer(answer["output_ids"], cached)

    def generate_all(
        self, prompts: list[list[int]], *, concurrency: int = 4, **extra: Any
    ) -> list[Answer]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **extra), prompts))

    def tier_state(self) -> dict[str, float]:
        """Our counters, as ``/server_info`` shows them."""
        state: dict[str, float] = self.request("/server_info")["internal_states"][0][
            "sglang_tiered"
        ]
        return state

    def wait_for_state(self, name: str, at_least: float) -> None:
        """Until a counter reaches a value, with a deadline."""
        deadline = time.monotonic() + REQUEST_DEADLINE_S
        while (value := self.tier_state()[name]) < at_least:
            assert time.monotonic() < deadline, f"{name} is {value}, wanted {at_least}"
            time.sleep(0.05)

    def flush(self) -> None:
        """Empty the tree and with it device and host memory; the store stays. Every rank waits for
        what is under way, such as a backup of what was just generated. SGLang answers for the first
        rank alone: a refusal of another would not be seen."""
        self.request(f"/flush_cache?timeout={REQUEST_DEADLINE_S / 2}", {})

    def stop(self) -> None:
        """An ordinary stop; ``kill -9`` if it does not end in time."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_DEADLINE_S)
        self.kill()

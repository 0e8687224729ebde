"""A front as a user starts it: Envoy and its picker before some servers, with deadlines on all."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from kit.waiting import eventually
from server_process import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from route_mocks import Mock, Mocks


CHAT = "/v1/chat/completions"
BIG = json.dumps({"input_ids": list(range(1000, 500_000)), "stream": True}).encode()
BUSY_S = 50.0
ANSWER_S = 20.0
STOP_S = 20.0


@dataclass
class Answer:
    """``is_whole``: whether the body ended as HTTP says."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool = True

    @property
    def served_by(self) -> str:
        return self.headers.get("x-served-by", "")


class Front:
    """One that listens on ``port`` and follows ``file``, of a process that has it as a child or is
    it; ``start`` starts one. ``close`` it."""

    def __init__(
        self, port: int, file: Path, log_path: Path, process: subprocess.Popen[bytes]
    ) -> None:
        self.port, self.file, self.log_path, self.process = port, file, log_path, process
        self.is_alone = False

    @classmethod
    def start(cls, folder: Path, servers: Iterable[str], *flags: str) -> Front:
        """``servers``: URLs, written to a file that ``serve`` follows."""
        port, file, log_path = free_ports(3), folder / "servers.txt", folder / "front.log"
        file.write_text("".join(f"{url}\n" for url in servers))
        command = [sys.executable, "-m", "sglang_tiered", "route", "serve"]
        command += ["--servers", str(file), "--port", str(port), *flags]
        with log_path.open("wb") as log:
            made = cls(port, file, log_path, subprocess.Popen(command, stdout=log, stderr=log))
        made.is_alone = "--envoy" in flags
        return made

    @classmethod
    @contextlib.contextmanager
    def before(cls, mocks: Mocks, folder: Path, *flags: str) -> Iterator[Front]:
        """One before these servers, until the block ends."""
        made = cls.start(folder, [mock.url for mock in mocks], *flags)
        try:
            made.wait_until_ready(len(mocks.all))
            yield made
        finally:
            made.close()
        assert "Traceback" not in made.log, made.log

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def follow(self, servers: Iterable[str]) -> None:
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{url}\n" for url in servers))
        new.replace(self.file)

    def wait_until_ready(self, num_servers: int) -> None:
        """Until that many servers are ready, for the picker and for Envoy."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log
            with contextlib.suppress(OSError, http.client.HTTPException):
                if sum(row["ready"] for row in self.servers()) == num_servers:
                    return self.is_alone or self.ask("/v1/models").status == 200
            return False

        eventually(is_ready, f"{num_servers} servers behind the front")

    def well(self, mocks: Mocks) -> Front:
        """Once all of them are ready again."""
        mocks.well()
        self.wait_until_ready(len(mocks.all))
        return self

    def busy(self, mocks: Mocks, those: Iterable[Mock], queue_s: float = BUSY_S) -> None:
        """Have these say that they are busy, and no other, until the picker has heard of it."""
        busy = {mock.address for mock in those}
        for mock in mocks:
            is_busy = mock.address in busy
            mock.costs = {"queue_wait_s": queue_s, "busy": 1.0} if is_busy else {}

        def knows() -> bool:
            rows = self.servers()
            return {r["address"] for r in rows if r["replicas"][0]["queue_s"] > 0.5} == busy

        eventually(knows, "the picker hears of queues")

    def prefer(self, mocks: Mocks, wanted: Mock) -> None:
        """Have all others busy."""
        self.busy(mocks, [mock for mock in mocks if mock is not wanted])

    def picker_pid(self) -> int:
        """The picker's, once there is one: a dead one is followed by another a moment later."""
        found: list[int] = []

        def is_there() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(self.process.pid).children(recursive=True)
                found[:] = [one.pid for one in children if "--with-parent" in one.cmdline()]
            return len(found) == 1

        eventually(is_there, "one picker")
        return found[0]

    # ---- Asking ----

    def connected(self, port: int | None = None) -> contextlib.closing[http.client.HTTPConnection]:
        """A connection to the front, or another port. Who closes it has left."""
        where = "127.0.0.1", self.port if port is None else port
        return contextlib.closing(http.client.HTTPConnection(*where, timeout=ANSWER_S))

    def ask(
        self,
        path: str = CHAT,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> Answer:
        """A request to the front, or another port. A body that is no bytes goes as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        told = {"Content-Type": "application/json", **(headers or {})}
        with self.connected(port) as connection:
            connection.request("GET" if body is None else "POST", path, data, told)
            response = connection.getresponse()
            fields = {name.lower(): value for name, value in response.getheaders()}
            try:
                return Answer(response.status, fields, response.read())
            except http.client.IncompleteRead as error:
                return Answer(response.status, fields, error.partial, is_whole=False)

    def chat(self, ids: Sequence[int] = (1, 2, 3), **headers: str) -> Answer:
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask(CHAT, {"input_ids": list(ids), "stream": True}, told)

    def generate(self, ids: Sequence[int], num_new: int = 8) -> Answer:
        """Greedy, of a real server."""
        sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
        return self.ask("/generate", {"input_ids": list(ids), "sampling_params": sampling})

    def servers(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.ask("/servers", port=self.port + 2).body)[
            "servers"
        ]
        return rows

    def metric(self, line: str) -> float:
        """Of the line that begins so; 0 before it is there."""
        text = self.ask("/metrics", port=self.port + 2).body.decode()
        values = [row.rsplit(" ", 1)[1] for row in text.splitlines() if row.startswith(line)]
        return sum(map(float, values))

    def close(self) -> None:
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

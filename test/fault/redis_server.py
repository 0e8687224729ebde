"""A real Redis server in a process of its own, which a test may pause, kill and empty.

The program is the one of ``scripts/redis-server``; a test that asks for the fixture where there is
none to be had is skipped.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import redis

from kit.programs import program
from server_process import free_port

HOST = "127.0.0.1"
TIMEOUT_S = 20.0


def redis_program() -> str:
    """The path of a Redis server; skips the test where there is none."""
    return program("redis-server")


class RedisServer:
    """Nothing is saved, so a server that starts again is empty."""

    def __init__(self, *, password: str | None = None) -> None:
        self._program = redis_program()
        self.password = password
        self._directory = tempfile.mkdtemp(prefix="redis-")
        self.socket_path = f"{self._directory}/redis.sock"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[redis.Redis] = []
        self.start()

    @property
    def url(self) -> str:
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}{HOST}:{self.port}/0"

    @functools.cached_property
    def client(self) -> redis.Redis:
        """The test's own look at what is in there."""
        client = redis.Redis(HOST, self.port, password=self.password, socket_timeout=TIMEOUT_S)
        self._clients.append(client)
        return client

    def start(self) -> None:
        """At the same port as before, if it ran before; empty."""
        assert self._process is None
        for _ in range(5):  # another process may take a free port before us
            port = self.port or free_port()
            command = [
                *(self._program, "--bind", HOST, "--port", str(port)),
                *("--save", "", "--appendonly", "no", "--dir", self._directory),
                *("--unixsocket", self.socket_path, "--logfile", ""),
                *(("--requirepass", self.password) if self.password else ()),
            ]
            self._process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            if self._answers(port):
                self.port = port
                return
            self._end(signal.SIGKILL)
        raise RuntimeError("redis-server did not start")

    def _answers(self, port: int) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + TIMEOUT_S
        where = {"unix_socket_path": self.socket_path, "password": self.password}
        while time.monotonic() < deadline and self._process.poll() is None:
            with (
                contextlib.suppress(redis.RedisError),
                redis.Redis(**where, socket_timeout=1.0) as client,
            ):
                return bool(client.config_get("port")["port"] == str(port))
            time.sleep(0.01)
        return False

    def pause(self) -> None:
        """It stops answering, with its connections open, as a stalled host does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.send_signal(signal.SIGCONT)
            process.send_signal(number)
            process.wait(TIMEOUT_S)
            Path(self.socket_path).unlink(missing_ok=True)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._end(signal.SIGKILL)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""A process of its own that a test talks to by lines, and may kill at any time."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kit.waiting import eventually

if TYPE_CHECKING:
    from typing import Self

TIMEOUT_S = 60.0


class LineProcess:
    """The other end of ``python -m module arguments``. As a context manager: killed at the latest
    when left."""

    def __init__(self, module: str, *arguments: object) -> None:
        paths = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": paths},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._reports = self._process.stdin, self._process.stdout
        self._buffered = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, order: str) -> None:
        self._orders.write(order.encode() + b"\n")

    def line(self) -> str:
        """The next line it says; fails when it dies or is silent for too long."""
        while b"\n" not in self._buffered:
            ready, _, _ = select.select([self._reports], [], [], TIMEOUT_S)
            assert ready, "the process is silent"
            piece = self._reports.read(65536)
            assert piece, f"the process ended with {self._process.wait(TIMEOUT_S)}"
            self._buffered += piece
        line, _, self._buffered = self._buffered.partition(b"\n")
        return line.decode()

    def freeze(self) -> None:
        """Returns when none of its threads runs any more."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: all(state == "T" for state in self._states()))

    def _states(self) -> list[str]:
        tasks = Path(f"/proc/{self.pid}/task")
        return [
            (task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()
        ]

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def strike(self) -> None:
        """``kill -9``."""
        self._process.kill()
        self._process.wait(TIMEOUT_S)

    def kill(self) -> list[str]:
        """``kill -9``; returns what it had said until then."""
        self.strike()
        while not self._reports.closed and (piece := self._reports.read(65536)):
            self._buffered += piece
        # A report is one write to a pipe, which is whole or not there.
        lines, self._buffered = self._buffered.decode().splitlines(), b""
        return lines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.strike()
        self._orders.close()
        self._reports.close()

"""A process of its own that a test talks to by lines, and may kill at any time."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["LineProcess"]

TIMEOUT_S = 60.0


class LineProcess:
    """The other end of ``python -m module arguments``. As a context manager: killed at the latest
    when left."""

    def __init__(self, module: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
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

    def end(self) -> int:
        self.tell("exit")
        return self._process.wait(TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.strike()
        self._orders.close()
        self._reports.close()

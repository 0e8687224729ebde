"""A process of its own with an object engine, which the test talks to by lines and may kill.

``python -m object_child URL FIRST`` stores one numbered run after the other, a few at a time, and
says ``stored N`` once each is durable, without end; with ``paced`` behind it, one for every line it
is sent. ``python -m object_child URL collect`` runs the collector again and again, with no grace,
and says ``collected N``.
"""

from __future__ import annotations

import os
import random
import select
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING

from object_bucket import NAMESPACE
from object_engines import TIMEOUT_S, load, open_engine, run_of

from sglang_tiered.storage.base import Job, Reason, Run
from sglang_tiered.storage.object.client import open_client
from sglang_tiered.storage.object.collector import Collector, CollectorSettings
from sglang_tiered.storage.object.settings import ObjectSettings

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ObjectChild", "child_run"]

_MAX_RUNS_UNDER_WAY = 4


def child_run(number: int) -> Run:
    """What the child stores under that number: of one to nine pages."""
    return run_of(number, num_pages=1 + number % 9, page_bytes=500 + 37 * (number % 50))


class ObjectChild:
    """The other end of the process. As a context manager: killed at the latest when left."""

    def __init__(self, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "object_child", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._reports = self._process.stdin, self._process.stdout
        self._buffered = b""

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

    def go_on(self) -> None:
        """To one that is paced: the next run."""
        self._orders.write(b"\n")

    def kill(self) -> list[str]:
        """``kill -9``; returns what it had said until then."""
        self._process.kill()
        self._process.wait(TIMEOUT_S)
        while not self._reports.closed and (piece := self._reports.read(65536)):
            self._buffered += piece
        lines, self._buffered = self._buffered.decode().splitlines(), b""
        return lines

    def __enter__(self) -> ObjectChild:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        self._orders.close()
        self._reports.close()


def _say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def _write(url: str, number: int, *, paced: bool) -> None:
    engine = open_engine(url, object_bytes=16 << 10, refresh_s=0.05)
    engine.refresh(TIMEOUT_S)
    _say("open")
    source = random.Random(number)
    under_way: deque[tuple[int, Job]] = deque()
    first = number
    while not paced or sys.stdin.readline():
        under_way.append((number, engine.submit_store(child_run(number))))
        number += 1
        while len(under_way) > source.randrange(_MAX_RUNS_UNDER_WAY):
            done, job = under_way.popleft()
            assert job.wait(TIMEOUT_S)
            if all(reason in (Reason.OK, Reason.DUPLICATE) for reason in job.reasons):
                _say(f"stored {done}")
        if source.random() < 0.2:
            load(engine, child_run(source.randrange(first, number)))


def _collect(url: str) -> None:
    settings = CollectorSettings(capacity_bytes=100_000, grace_s=0.0)
    collector = Collector(open_client(ObjectSettings(url=url)), NAMESPACE, settings)
    _say("open")
    while True:
        report = collector.run_once()
        _say(f"collected {report.num_removed + report.num_buried}")


if __name__ == "__main__":
    if sys.argv[2] == "collect":
        _collect(sys.argv[1])
    else:
        _write(sys.argv[1], int(sys.argv[2]), paced="paced" in sys.argv)

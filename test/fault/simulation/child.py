"""A process of its own with a region engine on a real directory, which the test talks to by lines
and may kill.

``python -m simulation.child DIRECTORY SEED FIRST`` opens the store and, once it is told a line,
stores one run after the other, a few at a time, and reports each once it is acknowledged, until it
is killed.
"""

from __future__ import annotations

import os
import random
import sys
from collections import deque
from pathlib import Path

from line_process import LineProcess
from simulation.ledger import Ledger, keys

from kit.runs import NAMESPACE, soft_encoding
from sglang_tiered.storage.base import Job, Reason
from sglang_tiered.storage.region import RegionEngine

REGION = 256 * 1024
CAPACITY = 1024 * REGION
PAGES_PER_RUN = 3
_MAX_RUNS_UNDER_WAY = 4


def open_directory(directory: Path) -> RegionEngine:
    return RegionEngine(
        directory,
        namespace=NAMESPACE,
        capacity_bytes=CAPACITY,
        region_bytes=REGION,
        num_threads=3,
        encoding=soft_encoding(),
    )


def run_keys(number: int) -> list[bytes]:
    return keys(range(PAGES_PER_RUN * number, PAGES_PER_RUN * (number + 1)))


class Child(LineProcess):
    """The other end of the process."""

    def __init__(self, directory: Path, *, seed: int = 0, first: int = 0) -> None:
        super().__init__("simulation.child", directory, seed, first)


def _say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def _write(engine: RegionEngine, source: random.Random, number: int) -> None:
    """Store without end; now and then pass a barrier, load, or cancel."""
    ledger = Ledger()
    under_way: deque[tuple[int, Job]] = deque()
    first = number
    while True:
        under_way.append((number, ledger.submit(engine, run_keys(number))))
        number += 1
        while len(under_way) > source.randrange(_MAX_RUNS_UNDER_WAY):
            done, job = under_way.popleft()
            if all(reason is Reason.OK for reason in ledger.settle(job)):
                _say(f"stored {done}")
        what = source.random()
        if what < 0.1:
            ledger.sync(engine)
        elif what < 0.3:
            ledger.load(engine, run_keys(source.randrange(first, number)))
        elif what < 0.4 and under_way:
            under_way[-1][1].cancel()


def main(directory: str, seed: str, first: str) -> None:
    _say("opening")
    engine = open_directory(Path(directory))
    _say("open")
    if sys.stdin.readline():
        _write(engine, random.Random(int(seed)), int(first))


if __name__ == "__main__":
    main(*sys.argv[1:])

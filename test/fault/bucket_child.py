"""A process of its own with a bucket engine, which the test talks to by lines and may kill.

``python -m bucket_child URL FIRST`` stores one numbered run after the other, a few at a time, and
says ``stored N`` once each is durable, without end; with ``paced`` behind it, one for every line it
is sent. ``python -m bucket_child URL collect`` runs the collector again and again, and
says ``collected N``.
"""

from __future__ import annotations

import os
import random
import sys
from collections import deque

from bucket_engines import TIMEOUT_S, load, open_engine, run_of
from line_process import LineProcess

from kit.runs import NAMESPACE
from sglang_tiered.storage.base import Job, Reason, Run
from sglang_tiered.storage.bucket.collect import Collector, CollectorSettings
from sglang_tiered.storage.bucket.requests import Requests

_MAX_RUNS_UNDER_WAY = 4


def child_run(number: int) -> Run:
    """What the child stores under that number: of one to nine pages."""
    return run_of(number, num_pages=1 + number % 9, page_bytes=500 + 37 * (number % 50))


class BucketChild(LineProcess):
    """The other end of the process."""

    def __init__(self, *arguments: object) -> None:
        super().__init__("bucket_child", *arguments)

    def go_on(self) -> None:
        """To one that is paced: the next run."""
        self.tell("")


def _say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def _write(url: str, number: int, *, paced: bool) -> None:
    engine = open_engine(url, refresh_s=0.05)
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
    settings = CollectorSettings(capacity_bytes=100_000)
    collector = Collector(Requests(url), settings)
    _say("open")
    while True:
        report = collector.run_once(NAMESPACE)
        _say(f"collected {report.num_removed}")


if __name__ == "__main__":
    if sys.argv[2] == "collect":
        _collect(sys.argv[1])
    else:
        _write(sys.argv[1], int(sys.argv[2]), paced="paced" in sys.argv)

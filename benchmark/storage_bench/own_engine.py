"""Driving the store under test: opened as the server opens it, every outcome checked."""

from __future__ import annotations

import collections
import contextlib
import inspect
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Erasure, JobKind, Run
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import reader
from sglang_tiered.storage.region.engine import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from sglang_tiered.storage.base import Job
    from storage_bench.host_memory import HostPages


NUM_READERS = 8
NUM_WRITERS = 8
PAGES_PER_RUN = 64
_NAMESPACE = bytes(range(32))
_TIMEOUT_S = 120.0


def open_engine(
    directory: Path, capacity_bytes: int, region_bytes: int = 256 << 20
) -> RegionEngine:
    """The depths of the queues are given, since the raw device is measured at the same."""
    return RegionEngine(
        directory,
        namespace=_NAMESPACE,
        capacity_bytes=capacity_bytes,
        region_bytes=region_bytes,
        num_threads=NUM_READERS,
    )


def make_runs(keys: Sequence[tuple[bytes, ...]], memory: HostPages) -> list[Run]:
    """One run per tuple of keys, on the memory's pages in turn, from the first again."""
    runs = []
    position = 0
    for chain in keys:
        if position + len(chain) > memory.num_pages:
            position = 0
        runs.append(Run(chain, memory.pages[position : position + len(chain)]))
        position += len(chain)
    return runs


def move_runs(engine: RegionEngine, kind: JobKind, runs: Sequence[Run], num_in_flight: int) -> None:
    """Store or load all of them, so many at a time. Raises unless every page is served."""
    submit = engine.submit_store if kind is JobKind.STORE else engine.submit_load
    jobs: collections.deque[Job] = collections.deque()
    for run in runs:
        if len(jobs) == num_in_flight:
            wait(jobs.popleft())
        jobs.append(submit(run))
    for job in jobs:
        wait(job)


def wait(job: Job) -> None:
    """Until the job is done. Raises ``RuntimeError`` unless it served every page."""
    if not job.wait(_TIMEOUT_S):
        raise RuntimeError(f"a {job.kind.value} job took more than {_TIMEOUT_S:.0f} s")
    if not all(job.ok):
        reasons = sorted({reason.value for reason in job.reasons})
        raise RuntimeError(f"a {job.kind.value} job ended with {', '.join(reasons)}")


def empty(engine: RegionEngine) -> None:
    if not is_true(engine.erase(Erasure()), _TIMEOUT_S):
        raise RuntimeError("the engine could not be emptied")


def make_durable(engine: RegionEngine) -> None:
    if not engine.flush(_TIMEOUT_S):
        raise RuntimeError("the engine could not make its pages durable")


@contextlib.contextmanager
def unverified_loads(wanted: bool) -> Iterator[None]:
    """Loads that believe every byte, to see what the checksums cost. Never outside a benchmark."""
    if not wanted:
        yield
        return
    names = [
        name
        for name, value in vars(reader).items()
        if inspect.isfunction(value) and value.__module__ == reader.__name__ and "verif" in name
    ]
    if len(names) != 1:
        raise RuntimeError(
            f"{reader.__name__} has {len(names)} functions named for verifying, expected one; "
            f"adapt {__name__}."
        )
    verifies = getattr(reader, names[0])
    setattr(reader, names[0], lambda *_, **__: True)
    try:
        yield
    finally:
        setattr(reader, names[0], verifies)

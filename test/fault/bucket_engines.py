"""Bucket engines under test: small settings, numbered runs, and loads that check every byte.

``load`` fails the test when a page that is reported OK holds anything but what was stored under its
key; that is the promise every test here rests on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kit.runs import NAMESPACE
from kit.waiting import eventually
from sglang_tiered.remote_config import ObjectConfig
from sglang_tiered.storage.base import NO_TENANT, Reason, Run
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.bucket.collect import Collector, CollectorReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_tiered.storage.base import Job


TIMEOUT_S = 20.0
PAGES_PER_RUN = 4
PAGE_BYTES = 3000
_FILL = 0xA5


def open_engine(
    url: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    **changes: Any,
) -> BucketEngine:
    """One that looks for others' pages only when it is told to."""
    settings: dict[str, Any] = {
        "refresh_s": 1000.0,
        "request_timeout_s": TIMEOUT_S,
        "num_connections": 4,
        "staging_bytes": 8 << 20,
    }
    namespace = changes.pop("namespace", NAMESPACE)
    return BucketEngine(
        ObjectConfig(url=url, **{**settings, **changes}),
        namespace=namespace,
        clock=clock,
        wall_clock=wall_clock,
    )


@contextlib.contextmanager
def opened(url: str, **changes: Any) -> Iterator[BucketEngine]:
    """An engine that has looked into the bucket once, if it could."""
    engine = open_engine(url, **changes)
    try:
        engine.refresh(TIMEOUT_S)
        yield engine
    finally:
        engine.close()
    eventually(  # one that waits for a bucket that hangs ends with its request
        lambda: not any(thread.is_alive() for thread in engine._workers._threads),
        "threads outlive the engine",
    )


@lru_cache(4096)
def _page(number: int, position: int, nbytes: int) -> tuple[bytes, bytes]:
    key = hashlib.sha256(f"{number}/{position}/{nbytes}".encode()).digest()
    return key, random.Random(key).randbytes(nbytes)


def run_of(
    number: int,
    *,
    num_pages: int = PAGES_PER_RUN,
    page_bytes: int = PAGE_BYTES,
    tenant: bytes = NO_TENANT,
) -> Run:
    """The run of that number: always the same keys and bytes."""
    pages = [_page(number, position, page_bytes) for position in range(num_pages)]
    return Run(
        tuple(key for key, _ in pages), tuple((memoryview(data),) for _, data in pages), tenant
    )


def store(engine: BucketEngine, *runs: Run) -> set[Reason]:
    """Store and flush; what became of the pages."""
    jobs = [engine.submit_store(run) for run in runs]
    engine.flush(TIMEOUT_S)
    assert all(job.wait(TIMEOUT_S) for job in jobs), "a store did not finish"
    return {reason for job in jobs for reason in job.reasons}


def start_load(
    engine: BucketEngine, run: Run, *, deadline_s: float | None = None
) -> tuple[Job, list[bytearray]]:
    """A load and its buffers."""
    buffers = [bytearray([_FILL]) * page[0].nbytes for page in run.pages]
    target = Run(run.keys, tuple((memoryview(buffer),) for buffer in buffers))
    return engine.submit_load(target, deadline_s=deadline_s), buffers


def load(engine: BucketEngine, run: Run, *, deadline_s: float | None = None) -> set[Reason]:
    job, buffers = start_load(engine, run, deadline_s=deadline_s)
    assert job.wait(TIMEOUT_S), "a load did not finish"
    for reason, buffer, page in zip(job.reasons, buffers, run.pages, strict=True):
        assert reason is not Reason.OK or buffer == page[0], "wrong bytes were served"
    return set(job.reasons)


def paths(engine: BucketEngine, folder: str = "pages") -> list[str]:
    """Everything in a folder of the engine's namespace."""
    listing = engine._requests.listing(f"{engine._state.layout.folder}/{folder}")
    return [listed.path for chunk in listing for listed in chunk]


def collect(
    engine: BucketEngine, after_s: float = 0.0, *, delete: bool = True, **changes: float
) -> CollectorReport:
    """One run of a collector, as if it were so much later by the store's clock."""
    later = Collector(engine._requests, **changes, clock=lambda: time.time() + after_s)
    return later.run_once(engine._state.namespace, delete=delete)


def is_held(engine: BucketEngine, run: Run) -> bool:
    """Whether a lookup finds all of it."""
    return engine.lookup(run.keys).num_hits == run.num_pages


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))

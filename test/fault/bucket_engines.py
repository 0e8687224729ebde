"""Bucket engines under test: small settings, numbered runs, and loads that check every byte.

``load`` fails the test when a page that is reported OK holds anything but what was stored under its
key; that is the promise every test here rests on.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from kit.request_hooks import listed
from kit.runs import NAMESPACE, blank, make_run, of, page_data
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.remote_config import ObjectConfig
from sglang_tiered.storage.base import NO_TENANT, Reason, Run
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.bucket.collect import Collector, CollectorReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_tiered.storage.encoding import PageEncoding


def open_engine(
    url: str,
    *,
    namespace: bytes = NAMESPACE,
    encoding: PageEncoding | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    **changes: Any,
) -> BucketEngine:
    """One that looks for others' pages only when it is told to."""
    settings: dict[str, Any] = {
        "refresh_s": 3600.0,
        "request_timeout_s": TIMEOUT_S,
        "num_connections": 4,
        "staging_bytes": 8 << 20,
    }
    wanted = ObjectConfig(url=url, **(settings | changes))
    options: Any = {"encoding": encoding, "clock": clock, "wall_clock": wall_clock}
    return BucketEngine(wanted, namespace=namespace, **options)


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


def run_of(
    number: int, *, num_pages: int = 4, page_bytes: int = 3000, tenant: bytes = NO_TENANT
) -> Run:
    """The run of that number: always the same keys and bytes."""
    return of(tenant, make_run(number, [page_bytes] * num_pages))


def store(engine: BucketEngine, *runs: Run) -> set[Reason]:
    """Store and flush; what became of the pages."""
    jobs = [engine.submit_store(run) for run in runs]
    engine.flush(TIMEOUT_S)
    return {reason for job in jobs for reason in finished(job)}


def load(engine: BucketEngine, run: Run) -> set[Reason]:
    target = blank(run)
    reasons = finished(engine.submit_load(target))
    for reason, got, wanted in zip(reasons, page_data(target), page_data(run), strict=True):
        assert reason is not Reason.OK or got == wanted, "wrong bytes were served"
    return set(reasons)


def paths(engine: BucketEngine, folder: str = "pages") -> list[str]:
    """Everything in a folder of the engine's namespace."""
    return listed(engine, f"{engine._state.layout.folder}/{folder}")


def collect(
    engine: BucketEngine, after_s: float = 0.0, *, delete: bool = True, **changes: float
) -> CollectorReport:
    """One run of a collector, as if it were so much later by the store's clock."""
    later = Collector(engine._requests, **changes, clock=lambda: time.time() + after_s)
    return later.run_once(engine._state.namespace, delete=delete)


def is_held(engine: BucketEngine, run: Run) -> bool:
    """Whether a lookup finds all of it."""
    return engine.lookup(run.keys).num_hits == run.num_pages

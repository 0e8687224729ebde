"""The two sides: the engine, and plain ``obstore`` with as many requests under way."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import obstore

from sglang_tiered.remote_config import ObjectConfig
from sglang_tiered.storage.base import KEY_BYTES, Reason, Run
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.bucket.names import Layout, parse_page
from storage_bench.figures import DifferentBytesError

if TYPE_CHECKING:
    from pathlib import Path

    from obstore.store import ObjectStore

    from sglang_tiered.storage.base import Page


NAMESPACE = b"\x11" * 32
NUM_CONNECTIONS = 8
TIMEOUT_S = 120.0


@dataclass
class Samples:
    """Of one side, round by round."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of this process
    requests: list[int] = field(default_factory=list)

    def add(self, seconds: float, cpu_s: float, requests: int) -> None:
        self.seconds.append(seconds)
        self.cpu_s.append(cpu_s)
        self.requests.append(requests)


class Span(NamedTuple):
    path: str
    start: int
    end: int
    pages: list[tuple[bytes, int]]  # key, and offset within the span


def open_engine(url: str) -> BucketEngine:
    settings = ObjectConfig(
        url=url,
        refresh_s=600.0,
        num_connections=NUM_CONNECTIONS,
        request_timeout_s=60.0,
        staging_bytes=1 << 30,
    )
    engine = BucketEngine(settings, namespace=NAMESPACE)
    if not engine.refresh(TIMEOUT_S):
        raise RuntimeError(f"{url} cannot be used: {engine.stats().health_reason}")
    return engine


def make_run(seed: int, page_bytes: int, num_bytes: int) -> Run:
    """New keys, and bytes that no store can compress, in one buffer."""
    source = random.Random(seed)
    buffer = memoryview(bytearray(os.urandom(num_bytes)))
    count = num_bytes // page_bytes
    pages = tuple((buffer[i * page_bytes : (i + 1) * page_bytes],) for i in range(count))
    return Run(tuple(source.randbytes(KEY_BYTES) for _ in pages), pages)


# -- the engine ---------------------------------------------------------------------------------


def engine_store(engine: BucketEngine, run: Run, samples: Samples | None) -> None:
    """From the first call until everything is durable and announced."""
    before = sum(engine.object_stats().requests.values())
    begun, cpu = time.perf_counter(), time.process_time()
    job = engine.submit_store(run)
    engine.flush(TIMEOUT_S)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    if set(job.reasons) != {Reason.OK}:
        raise RuntimeError(f"a store ended as {set(job.reasons)}: {engine.object_stats()}")
    requests = sum(engine.object_stats().requests.values()) - before
    if samples is not None:
        samples.add(seconds, cpu, requests)


def engine_load(engine: BucketEngine, source: Run, target: Run, samples: Samples | None) -> None:
    before = sum(engine.object_stats().requests.values())
    begun, cpu = time.perf_counter(), time.process_time()
    job = engine.submit_load(target)
    job.wait(TIMEOUT_S)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    if set(job.reasons) != {Reason.OK}:
        raise RuntimeError(f"a load ended as {set(job.reasons)}: {engine.object_stats()}")
    if any(a[0] != b[0] for a, b in zip(source.pages, target.pages, strict=True)):
        raise DifferentBytesError("the engine loaded other bytes than were stored")
    if samples is not None:
        samples.add(seconds, cpu, sum(engine.object_stats().requests.values()) - before)


def object_spans(store: ObjectStore) -> list[Span]:
    """What the engine reads: every page, by its name."""
    spans = []
    for chunk in store.list(Layout(NAMESPACE).pages):
        for entry in chunk:
            name = parse_page(entry["path"])
            assert name is not None
            spans.append(Span(entry["path"], 0, entry["size"], [(name.key, 0)]))
    return spans


# -- plain obstore ------------------------------------------------------------------------------


class Plain:
    """Gets and puts from as many threads as the engine has, and nothing else: no verification."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._readers = ThreadPoolExecutor(NUM_CONNECTIONS)
        self._writers = ThreadPoolExecutor(max(NUM_CONNECTIONS // 2, 1))

    def load(
        self, spans: list[Span], num_bytes: int, target: Run | None, samples: Samples | None
    ) -> None:
        """Into memory of obstore's own, or with ``target`` on from there into its pages."""
        pages = {} if target is None else dict(zip(target.keys, target.pages, strict=True))
        begun, cpu = time.perf_counter(), time.process_time()
        total = sum(self._readers.map(self._get, spans, [pages] * len(spans)))
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        if total != num_bytes:
            raise DifferentBytesError(f"obstore read {total} bytes of {num_bytes}")
        if samples is not None:
            samples.add(seconds, cpu, len(spans))

    def _get(self, span: Span, pages: dict[bytes, Page]) -> int:
        data = obstore.get_range(self._store, span.path, start=span.start, end=span.end)
        if pages:
            found = memoryview(data)
            for key, offset in span.pages:
                (page,) = pages[key]
                page[:] = found[offset : offset + page.nbytes]
        return len(data)

    def store(self, run: Run, directory: Path | None, samples: Samples | None) -> None:
        """The same objects; in a directory synced, as the engine's are."""
        roots = [directory] * run.num_pages
        begun, cpu = time.perf_counter(), time.process_time()
        list(self._writers.map(self._put, range(run.num_pages), run.pages, roots))
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        if samples is not None:
            samples.add(seconds, cpu, run.num_pages)

    def _put(self, number: int, page: Page, root: Path | None) -> None:
        path = f"plain/{number}"
        # A copy, which any user of obstore pays: it may read on after a timeout.
        obstore.put(self._store, path, b"".join(page), use_multipart=False)
        if root is not None:
            for place in (root / path, (root / path).parent):
                fd = os.open(place, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

    def close(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()

"""The two sides: the engine, and plain ``obstore`` with as many requests under way."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import obstore

from sglang_tiered.storage.base import KEY_BYTES, Reason, Run
from sglang_tiered.storage.object.client import open_client
from sglang_tiered.storage.object.engine import ObjectEngine
from sglang_tiered.storage.object.format import TAIL_BYTES, manifest_bytes, unpack_manifest
from sglang_tiered.storage.object.index import HeldObject, Place
from sglang_tiered.storage.object.loading import plan_spans
from sglang_tiered.storage.object.names import Layout
from sglang_tiered.storage.object.settings import ObjectSettings
from storage_bench.figures import DifferentBytesError

if TYPE_CHECKING:
    from pathlib import Path

    from obstore.store import ObjectStore

    from sglang_tiered.storage.base import Page


__all__ = ["NAMESPACE", "Samples", "Span", "make_run", "object_spans", "open_engine"]

NAMESPACE = b"\x11" * 32
NUM_CONNECTIONS = 8
OBJECT_BYTES = 32 << 20
TIMEOUT_S = 120.0
_PART_BYTES = 16 << 20


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


def open_engine(url: str) -> ObjectEngine:
    settings = ObjectSettings(
        url=url,
        object_bytes=OBJECT_BYTES,
        linger_s=60.0,
        refresh_s=600.0,
        num_connections=NUM_CONNECTIONS,
        request_timeout_s=60.0,
        staging_bytes=1 << 30,
    )
    engine = ObjectEngine(settings, namespace=NAMESPACE)
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


def engine_store(engine: ObjectEngine, run: Run, samples: Samples | None) -> None:
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


def engine_load(engine: ObjectEngine, source: Run, target: Run, samples: Samples | None) -> None:
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


def object_spans(url: str, store: ObjectStore) -> list[Span]:
    """The byte ranges that the engine reads for all pages there are: by its own plan."""
    layout = Layout(NAMESPACE)
    places: list[Place] = []
    keys: list[bytes] = []
    for chunk in store.list(layout.manifests):
        for entry in chunk:
            manifest = unpack_manifest(bytes(store.get(entry["path"]).bytes()))
            assert manifest is not None
            held = HeldObject(str(manifest.object_id), 0, manifest.tenant, 0, 0)
            for row in manifest.pages:
                places.append(Place(len(keys), held, int(row["offset"]), int(row["stored"]), 0))
                keys.append(bytes(row["key"]))
    spans = plan_spans(
        places,
        gap_bytes=0,
        max_span_bytes=open_client(ObjectSettings(url=url)).max_span_bytes,
        num_connections=NUM_CONNECTIONS,
    )
    return [
        Span(
            layout.object(group[0].held.name),
            start,
            end,
            [(keys[place.position], place.offset - start) for place in group],
        )
        for start, end, group in spans
    ]


# -- plain obstore ------------------------------------------------------------------------------


class Plain:
    """Gets and puts from as many threads as the engine has, and nothing else: no verification and
    no manifest."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._readers = ThreadPoolExecutor(NUM_CONNECTIONS)
        self._writers = ThreadPoolExecutor(max(NUM_CONNECTIONS // 4, 1))

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
        """The same objects without manifests; in a directory synced, as the engine's are."""
        pages = OBJECT_BYTES // run.pages[0][0].nbytes
        groups = [run.pages[i : i + pages] for i in range(0, run.num_pages, pages)]
        begun, cpu = time.perf_counter(), time.process_time()
        list(self._writers.map(self._put, range(len(groups)), groups, [directory] * len(groups)))
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        if samples is not None:
            # As the engine counts: over HTTP the parts of an object, begin and complete.
            per_object = 1 if directory is not None else -(-OBJECT_BYTES // _PART_BYTES) + 2
            samples.add(seconds, cpu, per_object * len(groups))

    def _put(
        self, number: int, pages: tuple[tuple[memoryview, ...], ...], root: Path | None
    ) -> None:
        # The pages lie side by side in memory: this copy is what any user of obstore pays as well.
        data = b"".join(page[0] for page in pages) + bytes(manifest_bytes(len(pages)) + TAIL_BYTES)
        path = f"plain/{number}"
        obstore.put(self._store, path, data, chunk_size=_PART_BYTES)
        if root is not None:
            for place in (root / path, (root / path).parent):
                fd = os.open(place, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

    def close(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()

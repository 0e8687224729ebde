"""The smallest legal engine: pages copied into memory, evicted one by one, least recent first.

Template for new engines and double for tests. Jobs finish inside ``submit_*``.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from sglang_tiered.storage.base import (
    EngineStats,
    Health,
    Job,
    JobKind,
    LookupResult,
    Reason,
    Stop,
    TierEngine,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.base import Page, Run

__all__ = ["MemoryEngine"]

_MAX_UNREPORTED = 4096


class _Stored(NamedTuple):
    data: bytearray
    checksum: int


class MemoryEngine(TierEngine):
    """At most ``capacity_bytes`` of payload. Thread-safe by one lock held throughout a call."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._pages: OrderedDict[bytes, _Stored] = OrderedDict()
        self._unreported: deque[Job] = deque(maxlen=_MAX_UNREPORTED)
        self._outcomes: Counter[tuple[JobKind, Reason]] = Counter()
        self._stored_bytes = 0
        self._num_evicted = 0
        self._bytes_in = 0
        self._bytes_out = 0
        self._closed = False

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        with self._lock:
            if self._closed:
                return LookupResult(0, Stop.UNHEALTHY)
            for num_hits, key in enumerate(keys):
                if key not in self._pages:
                    return LookupResult(num_hits, Stop.MISS)
            return LookupResult(len(keys), Stop.END)

    def some_keys(self, limit: int) -> list[bytes]:
        with self._lock:
            return [] if self._closed else list(itertools.islice(self._pages, limit))

    def submit_store(self, run: Run) -> Job:
        return self._serve(Job(JobKind.STORE, run))

    def submit_load(self, run: Run) -> Job:
        return self._serve(Job(JobKind.LOAD, run))

    def _serve(self, job: Job) -> Job:
        serve = self._store if job.kind is JobKind.STORE else self._load
        with self._lock:
            if not self._closed:
                pages = zip(job.run.keys, job.run.pages, strict=True)
                job.reasons = [serve(key, page) for key, page in pages]
            self._outcomes.update((job.kind, reason) for reason in job.reasons)
            self._unreported.append(job)
            job.finish()
        return job

    def _store(self, key: bytes, page: Page) -> Reason:
        if key in self._pages:
            return Reason.DUPLICATE
        data = bytearray().join(page)
        if len(data) > self._capacity_bytes:
            return Reason.NO_SPACE
        while self._stored_bytes + len(data) > self._capacity_bytes:
            _, victim = self._pages.popitem(last=False)
            self._stored_bytes -= len(victim.data)
            self._num_evicted += 1
        self._pages[key] = _Stored(data, xxhash.xxh3_64_intdigest(key + data))
        self._stored_bytes += len(data)
        self._bytes_in += len(data)
        return Reason.OK

    def _load(self, key: bytes, page: Page) -> Reason:
        stored = self._pages.get(key)
        if stored is None or len(stored.data) != sum(segment.nbytes for segment in page):
            return Reason.MISS
        if xxhash.xxh3_64_intdigest(key + stored.data) != stored.checksum:
            del self._pages[key]
            self._stored_bytes -= len(stored.data)
            return Reason.CORRUPT
        self._pages.move_to_end(key)
        position = 0
        for segment in page:
            segment[:] = stored.data[position : position + segment.nbytes]
            position += segment.nbytes
        self._bytes_out += position
        return Reason.OK

    def poll(self) -> list[Job]:
        with self._lock:
            finished = list(self._unreported)
            self._unreported.clear()
            return finished

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(
                health=Health.FAILED if self._closed else Health.RUNNING,
                health_reason="closed" if self._closed else "",
                num_pages=len(self._pages),
                stored_bytes=self._stored_bytes,
                physical_bytes=self._stored_bytes,
                capacity_bytes=self._capacity_bytes,
                num_pages_stored=self._outcomes[JobKind.STORE, Reason.OK],
                num_pages_loaded=self._outcomes[JobKind.LOAD, Reason.OK],
                num_pages_evicted=self._num_evicted,
                bytes_stored=self._bytes_in,
                bytes_written=self._bytes_in,
                bytes_loaded=self._bytes_out,
                num_pages_reinserted=0,
                bytes_reinserted=0,
                num_inflight_jobs=0,
                queued_store_bytes=0,
                reasons=dict(self._outcomes),
            )

    def clear(self) -> None:
        with self._lock:
            self._pages.clear()
            self._stored_bytes = 0

    def drain(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self.clear()
        with self._lock:
            self._closed = True

    def check_integrity(self) -> None:
        with self._lock:
            held = sum(len(stored.data) for stored in self._pages.values())
            assert held == self._stored_bytes, f"pages hold {held}, counted {self._stored_bytes}"
            assert held <= self._capacity_bytes, f"{held} bytes > cap {self._capacity_bytes}"

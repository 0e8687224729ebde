"""The smallest legal tier: pages copied into memory, evicted one by one, least recent first.

Template for new tiers, and a double. Jobs finish inside ``submit_*``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import xxhash

from sglang_tiered.storage.base import (
    NO_TENANT,
    Erasure,
    Health,
    Job,
    JobKind,
    Page,
    Reason,
    Run,
    TenantUsage,
    TierEngine,
    TierStats,
)
from sglang_tiered.storage.jobs import JobBook
from sglang_tiered.storage.promises import ended


class _Stored(NamedTuple):
    data: bytearray
    checksum: int
    tenant: bytes


class MemoryEngine(TierEngine):
    """Keeps at most ``capacity_bytes`` of payload, and ``max_tenant_bytes`` of one tenant, whose
    own pages go for it. Thread-safe by one lock held throughout a call."""

    def __init__(self, capacity_bytes: int, *, max_tenant_bytes: int | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._lock = threading.Lock()
        self._pages: OrderedDict[bytes, _Stored] = OrderedDict()
        self._jobs = JobBook()
        self._num_evicted = self._num_erased = self._bytes_in = self._bytes_out = 0
        self._closed = False

    @property
    def _stored_bytes(self) -> int:
        return sum(len(each.data) for each in self._pages.values())

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [not self._closed and key in self._pages for key in keys]

    def submit_store(self, run: Run) -> Job:
        return self._serve(self._open(JobKind.STORE, run))

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        return self._serve(self._open(JobKind.LOAD, run))

    def _open(self, kind: JobKind, run: Run) -> Job:
        with self._lock:
            return self._jobs.open(kind, run)

    def _serve(self, job: Job) -> Job:
        with self._lock:
            if not self._closed:
                pages = zip(job.run.keys, job.run.pages, strict=True)
                if job.kind is JobKind.STORE:
                    job.reasons = [self._store(key, page, job.run.tenant) for key, page in pages]
                else:
                    job.reasons = [self._load(key, page) for key, page in pages]
            self._jobs.finish(job)
        return job

    def _store(self, key: bytes, page: Page, tenant: bytes) -> Reason:
        if key in self._pages:
            return Reason.DUPLICATE
        data, limit = bytearray().join(page), self._max_tenant_bytes
        if len(data) > self._capacity_bytes:
            return Reason.NO_SPACE
        if limit is not None and tenant != NO_TENANT:
            if len(data) > limit:
                return Reason.OVER_SHARE
            own = [each for each, stored in self._pages.items() if stored.tenant == tenant]
            while sum(len(self._pages[each].data) for each in own) + len(data) > limit:
                self._evict(own.pop(0))
        while self._stored_bytes + len(data) > self._capacity_bytes:
            self._evict(next(iter(self._pages)))
        self._pages[key] = _Stored(data, xxhash.xxh3_64_intdigest(key + data), tenant)
        self._bytes_in += len(data)
        return Reason.OK

    def _evict(self, key: bytes) -> None:
        del self._pages[key]
        self._num_evicted += 1

    def _load(self, key: bytes, page: Page) -> Reason:
        stored = self._pages.get(key)
        if stored is None or len(stored.data) != sum(segment.nbytes for segment in page):
            return Reason.MISS
        if xxhash.xxh3_64_intdigest(key + stored.data) != stored.checksum:
            del self._pages[key]
            return Reason.CORRUPT
        self._pages.move_to_end(key)
        position = 0
        for segment in page:
            segment[:] = stored.data[position : position + segment.nbytes]
            position += segment.nbytes
        self._bytes_out += position
        return Reason.OK

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                health=Health.FAILED if self._closed else Health.RUNNING,
                health_reason="closed" if self._closed else "",
                num_pages=len(self._pages),
                stored_bytes=self._stored_bytes,
                physical_bytes=self._stored_bytes,
                capacity_bytes=self._capacity_bytes,
                num_pages_stored=self._jobs.outcomes[JobKind.STORE, Reason.OK],
                num_pages_loaded=self._jobs.outcomes[JobKind.LOAD, Reason.OK],
                num_pages_evicted=self._num_evicted,
                bytes_stored=self._bytes_in,
                bytes_written=self._bytes_in,
                bytes_loaded=self._bytes_out,
                num_inflight_jobs=self._jobs.num_inflight,
                num_tenants=len({each.tenant for each in self._pages.values()}),
                num_pages_erased=self._num_erased,
                reasons=dict(self._jobs.outcomes),
                store_durations=self._jobs.store_durations.take(),
            )

    def tenants(self, limit: int) -> list[TenantUsage]:
        sizes: dict[bytes, list[int]] = {}
        with self._lock:
            for each in self._pages.values():
                sizes.setdefault(each.tenant, []).append(len(each.data))
        usage = [TenantUsage(t, len(own), sum(own), sum(own)) for t, own in sizes.items()]
        return sorted(usage, key=lambda each: -each.physical_bytes)[:limit]

    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        with self._lock:
            if what.keys is None:
                pages = self._pages.items()
                gone = [key for key, each in pages if what.tenant in (None, each.tenant)]
            else:
                gone = [key for key in what.keys if key in self._pages]
            for key in gone:
                del self._pages[key]
            self._num_erased += len(gone)
            return ended(not self._closed)

    def set_namespace(self, namespace: bytes, *, keep: bool = True) -> None:
        with self._lock:
            self._pages.clear()

    def close(self) -> None:
        self._closed = True
        MemoryEngine.set_namespace(self, b"")

    def check_integrity(self) -> None:
        with self._lock:
            assert self._stored_bytes <= self._capacity_bytes

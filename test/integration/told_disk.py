"""A storage for SGLang's threads, whose jobs end when they are told to, and not before; and the
threads' controller."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext, suppress
from queue import Queue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from sglang_tiered.integration.storage.backend import BegunStore, TieredStorage
from sglang_tiered.integration.storage.workers import MIN_PART_BYTES
from sglang_tiered.storage.base import Job, JobKind, Reason, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

PAGE, PAGE_BYTES = 4, 1 << 20
PART = MIN_PART_BYTES // PAGE_BYTES
DEADLINE_S = 30.0


class Disk(TieredStorage):
    """Of stores, or of loads in parts of ``part_pages``. Its pages go by numbers, which say what
    slots they have."""

    part_bytes: Any = None  # no property here

    def __init__(self, kind: JobKind, part_pages: float = PART) -> None:
        self.kind = kind
        self.failure = Reason.IO_ERROR if kind is JobKind.STORE else Reason.MISS
        self.part_bytes = part_pages * PAGE_BYTES
        self.asked: list[tuple[str, ...]] = []  # pages of each job, in the order of begins
        self.jobs: list[Job] = []
        self._to_finish: deque[Job] = deque()  # who takes one out finishes it: two threads do
        self.failing: set[tuple[str, str]] = set()  # pool and page
        self.refused: str | None = None  # a page of which no job can begin
        self.bytes_of_page = PAGE_BYTES
        self.is_open = False
        self.told: list[Any] = []  # parts of KV, in the order of ends
        self.dropped: set[str] = set()  # not admitted, and what follows
        self._gate: Any = SimpleNamespace(
            queue_store=lambda *given, **named: given, store_ended=lambda store: None
        )
        self.noted: dict[str, int] = {}  # the first slots of pages that were loaded
        self.begins: Callable[[], object] = lambda: None
        self.meter_of = lambda handle: None

    def page_bytes(self, pool: PoolName = PoolName.KV) -> int:
        return self.bytes_of_page

    def check(self, pool: PoolName, hashes: Sequence[str], host_indices: torch.Tensor) -> None:
        if self.refused in hashes:
            raise ValueError("no such pages")
        if pool == PoolName.KV:  # the pages that belong to these hashes
            assert len(host_indices) == len(hashes) * PAGE
            assert host_indices[0] == int(hashes[0]) * PAGE

    def begin(self, pool: PoolName, hashes: Sequence[str]) -> Job | None:
        job = None
        if hashes:
            keys = tuple(f"{pool.value} {text}".encode().ljust(32) for text in hashes)
            pages = ((memoryview(bytes(self.bytes_of_page)),),) * len(hashes)
            job = Job(self.kind, Run(keys, pages))
            self.jobs.append(job)
            self._to_finish.append(job)
        self.asked.append(tuple(hashes) if pool == PoolName.KV else (pool.value, *hashes))
        if self.is_open:
            self.finish()
        return job

    def finish_one(self, job: Job) -> None:
        if not job.cancelled:
            names = (tuple(key.decode().split()) for key in job.run.keys)
            job.reasons = [self.failure if each in self.failing else Reason.OK for each in names]
        job.finish()

    def finish(self) -> None:
        self.is_open = True
        with suppress(IndexError):
            while True:
                job = self._to_finish.popleft()
                if not job.done:
                    self.finish_one(job)

    @property
    def num_under_way(self) -> int:
        return sum(not job.done for job in list(self.jobs))

    def begin_store(
        self, pool: PoolName, hashes: Sequence[str], host_indices: torch.Tensor, store: Any
    ) -> BegunStore:
        self.check(pool, hashes, host_indices)
        num_pages = len(hashes)
        hashes = hashes[: next((i for i, h in enumerate(hashes) if h in self.dropped), None)]
        job = self.begin(pool, hashes)
        return BegunStore(job, host_indices, num_pages, len(hashes), None, pool == PoolName.KV)

    def end_store(self, begun: BegunStore) -> list[bool]:
        self.told.append(begun)
        stored = []
        if begun.job is not None:
            assert begun.job.wait(DEADLINE_S)
            stored = begun.job.ok
        return stored + [False] * (begun.num_pages - begun.num_admitted)

    def begin_load(
        self, pool: PoolName, hashes: Sequence[str], host_indices: torch.Tensor, **_: Any
    ) -> Any:
        self.begins()
        self.check(pool, hashes, host_indices)
        return self.begin(pool, hashes)

    def note_loaded(self, job: Job, host_indices: torch.Tensor) -> None:
        self.told.append(job)
        assert len(host_indices) == job.run.num_pages * PAGE
        for key, is_ok, first in zip(job.run.keys, job.ok, host_indices[::PAGE], strict=True):
            if is_ok:
                self.noted[key.decode().split()[1]] = int(first)

    # What SGLang's own controller asks for.

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, *_: Any) -> list[bool]:
        return self.end_store(self.begin_store(PoolName.KV, keys, host_indices, None))

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            each.name: self.end_store(self.begin_store(each.name, each.keys, each.host_indices, 0))
            for each in transfers
        }

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, *_: Any) -> list[bool]:
        return self._get(PoolName.KV, keys, host_indices)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._get(each.name, each.keys, each.host_indices) for each in transfers}

    def _get(self, pool: Any, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        job = self.begin_load(pool, keys, host_indices)
        assert job.wait(DEADLINE_S)
        ok: list[bool] = job.ok
        return ok


def pools_of(names: Sequence[str], keys: Sequence[str], slots: torch.Tensor) -> list[PoolTransfer]:
    """A draft model's pages, a window's last two, the state behind the last."""
    last = {"hit_policy": PoolHitPolicy.TRAILING_PAGES}
    transfers = {
        "draft": PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV),
        "window": PoolTransfer(PoolName.SWA, slots[-2 * PAGE :], keys=keys[-2:], **last),
        "state": PoolTransfer(PoolName.MAMBA, slots[-1:], keys=keys[-1:], **last),
    }
    return [transfers[name] for name in names]


def controller_of(kind: type[HybridCacheController], disk: Disk, **more: Any) -> Any:
    """``more``: what its thread has beside what all have."""
    controller: Any = kind.__new__(kind)
    controller.__dict__.update(
        page_size=PAGE,
        storage_backend=disk,
        mem_pool_host=SimpleNamespace(layout_lease=nullcontext, entry_map={}),
        storage_stop_event=threading.Event(),
        **{name: Queue() for name in QUEUES},
        page_get_func=controller._page_get_zero_copy,
        page_set_func=controller._page_set_zero_copy,
        **more,
    )
    return controller


QUEUES = (
    *("backup_queue", "ack_backup_queue"),
    *("prefetch_buffer", "prefetch_sync_queue", "ack_prefetch_queue"),
)

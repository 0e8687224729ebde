"""Several loads under way on a thread of SGLang's, and acks as from its own controller."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
    PrefetchOperation,
)

from kit.waiting import eventually
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.integration.storage.controller import TieredController
from sglang_tiered.integration.storage.load_worker import NUM_PARTS, LoadOperation
from sglang_tiered.storage.base import Job, JobKind, Reason, Run

PAGE, PAGE_BYTES = 4, 1 << 20
DEADLINE_S = 30.0


class Disk(TieredStorage):
    """Begins reads; they end when told, and not before."""

    def __init__(self, part_pages: float = 2) -> None:
        self.asked: list[tuple[str, ...]] = []  # pages of each read, in the order of begins
        self.jobs: list[Job] = []
        self._to_finish: deque[Job] = deque()  # who takes one out finishes it: two threads do
        self.missing: set[tuple[str, str]] = set()  # pool and page
        self.refused: str | None = None  # a page of which no read can begin
        self.noted: dict[str, int] = {}  # the first slots of pages that were loaded
        self.is_open = False
        self.begins: Callable[[], object] = lambda: None
        self.meter_of = lambda handle: None
        self.transfers: Any = SimpleNamespace(part_bytes=part_pages * PAGE_BYTES)

    def page_bytes(self, pool: PoolName = PoolName.KV) -> int:
        return PAGE_BYTES

    def begin_load(
        self, pool: PoolName, hashes: Sequence[str], host_indices: torch.Tensor, **_: Any
    ) -> Job:
        if self.refused in hashes:
            raise ValueError("no such pages")
        self.begins()
        if pool == PoolName.KV:  # the pages that belong to these hashes
            assert len(host_indices) == len(hashes) * PAGE
            assert host_indices[0] == int(hashes[0]) * PAGE
        keys = tuple(f"{pool.value} {text}".encode().ljust(32) for text in hashes)
        job = Job(JobKind.LOAD, Run(keys, tuple((memoryview(b"x"),) for _ in hashes)))
        job.reasons = [
            Reason.MISS if (pool.value, each) in self.missing else Reason.OK for each in hashes
        ]
        self.asked.append(tuple(hashes) if pool == PoolName.KV else (pool.value, *hashes))
        self.jobs.append(job)
        self._to_finish.append(job)
        if self.is_open:
            self.finish()
        return job

    def note_loaded(self, job: Job, host_indices: torch.Tensor) -> None:
        assert len(host_indices) == job.run.num_pages * PAGE
        for key, is_ok, first in zip(job.run.keys, job.ok, host_indices[::PAGE], strict=True):
            if is_ok:
                self.noted[key.decode().split()[1]] = int(first)

    # What SGLang's own controller asks for.

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, *_: Any) -> list[bool]:
        return self._get(PoolName.KV, keys, host_indices)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._get(each.name, each.keys, each.host_indices) for each in transfers}

    def _get(self, pool: Any, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        job = self.begin_load(pool, keys, host_indices)
        assert job.wait(DEADLINE_S)
        return job.ok

    def finish(self) -> None:
        self.is_open = True
        with suppress(IndexError):
            while True:
                job = self._to_finish.popleft()
                if not job.done:
                    job.finish()

    @property
    def num_under_way(self) -> int:
        return sum(not job.done for job in list(self.jobs))


def make_load(
    first: int,
    num_pages: int,
    pools: Sequence[str] = (),
    of: type[PrefetchOperation] = LoadOperation,
) -> Any:
    """A load that the scheduler has allocated, after it was answered."""
    slots = torch.arange(first * PAGE, (first + num_pages) * PAGE)
    keys = [str(number) for number in range(first, first + num_pages)]
    trailing = PoolHitPolicy.TRAILING_PAGES
    transfers = {
        "draft": PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV),
        "window": PoolTransfer(
            PoolName.SWA, slots[-2 * PAGE :], keys=keys[-2:], hit_policy=trailing
        ),
        "state": PoolTransfer(PoolName.MAMBA, slots[-1:], keys=keys[-1:], hit_policy=trailing),
    }
    load = of(
        CacheRequestHandle(f"r{first}", 0),
        [],
        pool_transfers=[transfers[name] for name in pools] or None,
    )
    load.hash_value, load.host_indices = keys, slots
    return load


class Loads:
    """A controller whose I/O thread runs, and the loads that it was given."""

    def __init__(
        self,
        disk: Disk,
        *loads: Any,
        of: type[HybridCacheController] = TieredController,
        is_alone: bool = True,
    ) -> None:
        self.disk = disk
        self.controller: Any = of.__new__(of)
        self.controller.__dict__.update(
            page_size=PAGE,
            storage_backend=disk,
            mem_pool_host=SimpleNamespace(layout_lease=nullcontext, entry_map={}),
            page_get_func=self.controller._page_get_zero_copy,
            storage_stop_event=threading.Event(),
            prefetch_completion_sync_groups=[] if is_alone else ["a group"],
            prefetch_buffer=Queue(),
            prefetch_sync_queue=Queue(),
            ack_prefetch_queue=Queue(),
        )
        self.loads = list(loads)
        self.acks: list[Any] = []
        for load in loads:
            self.controller.prefetch_buffer.put(load)
        target = self.controller.prefetch_io_aux_func
        self.thread = threading.Thread(target=target, daemon=True)
        self.thread.start()

    def told(self) -> list[Any]:
        """What SGLang's scheduler, or the thread that compares ranks, is told of."""
        for queue in (self.controller.prefetch_sync_queue, self.controller.ack_prefetch_queue):
            while not queue.empty():
                self.acks.append(queue.get())
        return self.acks

    def over(self) -> list[Any]:
        return [ack.operation for ack in self.told() if ack.completed_req]

    def num_arrived(self, load: Any) -> list[int]:
        """Pages of which SGLang hears, one number for each time."""
        acks = [ack for ack in self.told() if ack.operation is load]
        return [each.completed_tokens // PAGE for each in acks if each.completed_tokens is not None]

    def stop(self) -> None:
        """As SGLang tells its threads."""
        self.controller.storage_stop_event.set()
        self.controller.prefetch_buffer.put(None)

    def end(self) -> None:
        """Let all loads end, and then the thread."""
        self.disk.finish()
        eventually(lambda: len(self.over()) == len(self.loads), timeout_s=DEADLINE_S)
        self.stop()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive() and self.over() == self.loads
        for load in self.loads:
            assert self.num_arrived(load) == sorted(self.num_arrived(load)), "it ends over less"


SIZES = [1, 2, 7, 127, 128, 129, 255, 256, 257, 300]


@pytest.mark.parametrize("pools", [(), ("draft",), ("window",), ("draft", "window", "state")])
@pytest.mark.parametrize("num_pages", SIZES)
@pytest.mark.parametrize("part_pages", [3, math.inf])
def test_acks_are_those_of_sglangs_controller(
    num_pages: int, pools: tuple[str, ...], part_pages: float
) -> None:
    """Ranks compare them one by one: one that sends more or fewer would hang the others."""
    faults = {None, ("kv", 0), ("kv", num_pages // 2), ("kv", num_pages - 1)}
    faults |= {("draft", num_pages // 2)} & {(name, num_pages // 2) for name in pools}
    faults |= {("swa", num_pages - 1)} if "window" in pools else set()
    for fault in faults:
        seen = []
        for of in (HybridCacheController, TieredController):
            disk = Disk(part_pages)
            disk.is_open = True
            disk.missing = set() if fault is None else {(fault[0], str(fault[1]))}
            kind = LoadOperation if of is TieredController else PrefetchOperation
            given = [make_load(first, num_pages, pools, kind) for first in (1000, 0, 2000)]
            loads = Loads(disk, *given, of=of, is_alone=False)
            loads.end()
            seen.append(
                [
                    (ack.rid, ack.completed_tokens, ack.pool_hits, ack.completed_req)
                    for ack in loads.acks
                ]
            )
        assert seen[0] == seen[1], fault


@pytest.mark.parametrize("num_pages", SIZES)
@pytest.mark.parametrize("pools", [(), ("draft", "window", "state")])
def test_aborted_load_has_the_acks_of_whole(num_pages: int, pools: tuple[str, ...]) -> None:
    """Wherever the abort finds them: the other ranks may be further."""
    whole = Loads(Disk(), make_load(0, num_pages, pools), is_alone=False)
    whole.end()
    kinds = [[ack.completed_tokens is None, ack.pool_hits is None] for ack in whole.acks]
    for number in range(0, len(whole.disk.asked) + 1, 1 + num_pages // 20):
        load, disk = make_load(0, num_pages, pools), Disk()
        disk.begins = lambda disk=disk, load=load, number=number: (  # type: ignore[misc]
            load.mark_terminate() if len(disk.asked) >= number else None
        )
        if number == 0:
            load.mark_terminate()
        loads = Loads(disk, load, is_alone=False)
        loads.end()
        found = [[ack.completed_tokens is None, ack.pool_hits is None] for ack in loads.acks]
        assert found == kinds, number


@pytest.mark.parametrize("num_pages", [1, 2, 5, STORAGE_BATCH_SIZE + 3, 3 * STORAGE_BATCH_SIZE])
@pytest.mark.parametrize("part_pages", [1, 3, 2 * STORAGE_BATCH_SIZE])
def test_each_page_is_read_once_in_order(num_pages: int, part_pages: int) -> None:
    disk = Disk(part_pages)
    disk.is_open = True
    given = [make_load(0, num_pages), make_load(1000, num_pages), make_load(2000, 1)]
    loads = Loads(disk, *given)
    loads.end()
    assert [loads.num_arrived(load)[-1] for load in given] == [num_pages, num_pages, 1]
    asked = [page for pages in disk.asked for page in pages]
    assert disk.noted == {page: int(page) * PAGE for page in asked}
    assert asked == [page for load in given for page in load.hash_value]
    assert all(len(pages) <= min(part_pages, STORAGE_BATCH_SIZE) for pages in disk.asked)


def test_reads_of_queued_loads_begin_before_one_ends() -> None:
    disk = Disk(part_pages=4)
    loads = Loads(disk, make_load(0, 1), make_load(10, 1), make_load(20, 9), make_load(40, 1))
    eventually(lambda: len(disk.asked) == 4)
    assert disk.asked == [("0",), ("10",), ("20", "21", "22", "23"), ("24", "25", "26", "27")]
    for job in reversed(disk.jobs[1:]):
        job.finish()
    eventually(lambda: len(disk.asked) > 4)
    assert not loads.told(), "SGLang hears of one load after the other"
    loads.end()


def test_no_more_is_under_way_than_its_share() -> None:
    disk = Disk()
    loads = Loads(disk, make_load(0, 50), make_load(100, 50))
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    for _ in range(20):
        next(job for job in disk.jobs if not job.done).finish()
        eventually(lambda: disk.num_under_way == NUM_PARTS)
    loads.end()


def test_memory_of_aborted_load_waits_for_its_reads() -> None:
    """SGLang gives the pages back as soon as it hears of the load's end."""
    disk = Disk(part_pages=1)
    first, second = make_load(0, 1), make_load(10, 5)
    loads = Loads(disk, first, second)
    eventually(lambda: len(disk.asked) == 2)
    assert disk.asked[1] == ("10",)
    second.mark_terminate()
    disk.jobs[0].finish()
    eventually(lambda: loads.over() == [first])
    loads.controller.prefetch_buffer.put(None)
    eventually(loads.controller.prefetch_buffer.empty)
    assert loads.over() == [first]
    disk.jobs[1].finish()
    eventually(lambda: loads.over() == [first, second])
    assert len(disk.asked) == 2 and loads.num_arrived(second) == [0]
    loads.end()


def test_thread_that_ends_waits_for_all_it_began() -> None:
    """SGLang joins it, and empties memory then."""
    disk = Disk(part_pages=1)
    loads = Loads(disk, make_load(0, 1), make_load(10, 5))
    eventually(lambda: len(disk.asked) == 2)
    loads.controller.storage_stop_event.set()
    disk.jobs[0].finish()
    eventually(loads.controller.prefetch_buffer.empty)
    loads.thread.join(0.2)  # one that does not wait is over by then
    assert loads.thread.is_alive() and disk.num_under_way == 1
    disk.finish()
    loads.thread.join(DEADLINE_S)
    assert not loads.thread.is_alive() and disk.num_under_way == 0


def test_load_that_cannot_begin_fails_alone() -> None:
    disk = Disk()
    disk.refused = "12"
    first, bad, last = make_load(0, 3), make_load(10, 6), make_load(20, 3)
    loads = Loads(disk, first, bad, last)
    loads.end()
    assert [loads.num_arrived(load)[-1] for load in (first, bad, last)] == [3, 2, 3]


def test_unknown_page_size_ends_no_thread() -> None:
    """A load that SGLang hears nothing of keeps its memory for good."""
    disk = Disk()
    disk.page_bytes = lambda *_: 1 // 0  # type: ignore[method-assign]
    given = [make_load(0, 3, ("draft",)), make_load(10, 300)]
    loads = Loads(disk, *given)
    loads.end()
    assert not disk.asked and [loads.num_arrived(load)[-1] for load in given] == [0, 0]


def test_queued_load_that_failed_reads_no_more() -> None:
    """While the one before it waits for a slow tier."""
    disk = Disk(part_pages=2)
    disk.missing = {("kv", "10")}
    loads = Loads(disk, make_load(0, 2), make_load(10, 20))
    eventually(lambda: len(disk.asked) == 2)
    disk.jobs[1].finish()
    eventually(loads.controller.prefetch_buffer.empty)
    disk.jobs[0].finish()
    eventually(lambda: len(loads.over()) == 2)
    assert disk.asked == [("0", "1"), ("10", "11")]
    loads.end()


def test_abort_ends_a_load_between_two_parts() -> None:
    disk, load = Disk(part_pages=1), make_load(0, 100)
    disk.is_open = True
    disk.begins = lambda: load.mark_terminate() if len(disk.asked) == 3 else None
    loads = Loads(disk, load)
    loads.end()
    assert len(disk.asked) <= 3 + NUM_PARTS and loads.num_arrived(load)[-1] <= 3


MANY = STORAGE_BATCH_SIZE + 9


@pytest.mark.parametrize(
    ("num_pages", "pools", "is_alone", "missing", "expected"),
    [
        (10, (), True, None, [4, 8, 10]),
        (MANY, (), True, None, [*range(4, MANY, 4), MANY]),
        (20, (), True, "5", [4, 5]),
        (20, (), False, None, [20]),  # other ranks send another number of acks
        (20, ("draft",), True, None, [20]),  # of which fewer pages may be there
    ],
)
def test_parts_count_at_once_where_they_may(
    num_pages: int, pools: tuple[str, ...], is_alone: bool, missing: str | None, expected: list[int]
) -> None:
    disk, load = Disk(part_pages=4), make_load(0, num_pages, pools)
    disk.missing = set() if missing is None else {("kv", missing)}
    loads = Loads(disk, load, is_alone=is_alone)
    loads.end()
    assert loads.num_arrived(load) == expected
    assert missing is None or len(disk.asked) <= 2 + NUM_PARTS


def test_lone_rank_hears_without_another_thread() -> None:
    for is_alone in (True, False):
        loads = Loads(Disk(), make_load(0, 1), is_alone=is_alone)
        loads.disk.finish()
        queues = loads.controller.ack_prefetch_queue, loads.controller.prefetch_sync_queue
        eventually(lambda: queues[not is_alone].qsize() == 2)  # noqa: B023
        assert queues[is_alone].empty()
        loads.end()

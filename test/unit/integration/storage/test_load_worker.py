"""Several loads under way on a thread of SGLang's, and acks as from its own controller."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    PoolName,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
    PrefetchOperation,
)
from told_disk import DEADLINE_S, PAGE, PAGE_BYTES, ToldDisk, controller_of, pools_of

from kit.waiting import eventually
from sglang_tiered.integration.storage.controller import TieredController
from sglang_tiered.integration.storage.workers import NUM_PARTS, LoadOperation
from sglang_tiered.storage.base import Job, JobKind, Reason


class Disk(ToldDisk):
    """Of reads."""

    kind, failure = JobKind.LOAD, Reason.MISS

    def __init__(self, part_pages: float = 2) -> None:
        super().__init__()
        self.noted: dict[str, int] = {}  # the first slots of pages that were loaded
        self.begins: Callable[[], object] = lambda: None
        self.meter_of = lambda handle: None
        self._part_bytes = part_pages * PAGE_BYTES

    @property
    def part_bytes(self) -> float:
        return self._part_bytes

    def begin_load(
        self, pool: PoolName, hashes: Sequence[str], host_indices: torch.Tensor, **_: Any
    ) -> Any:
        self.begins()
        self.check(pool, hashes, host_indices)
        return self.begin(pool, hashes)

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
        ok: list[bool] = job.ok
        return ok


def make_load(
    first: int,
    num_pages: int,
    pools: Sequence[str] = (),
    of: type[PrefetchOperation] = LoadOperation,
) -> Any:
    """A load that the scheduler has allocated, after it was answered."""
    slots = torch.arange(first * PAGE, (first + num_pages) * PAGE)
    keys = [str(number) for number in range(first, first + num_pages)]
    transfers = pools_of(pools, keys, slots) or None
    load = of(CacheRequestHandle(f"r{first}", 0), [], pool_transfers=transfers)
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
        groups = [] if is_alone else ["a group"]
        self.controller = controller_of(of, disk, prefetch_completion_sync_groups=groups)
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

    def end(self) -> None:
        """Let all loads end, and then the thread."""
        self.disk.finish()
        eventually(lambda: len(self.over()) == len(self.loads), timeout_s=DEADLINE_S)
        self.controller.storage_stop_event.set()  # as SGLang tells its threads
        self.controller.prefetch_buffer.put(None)
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
            disk.failing = set() if fault is None else {(fault[0], str(fault[1]))}
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
        disk.finish_one(job)
    eventually(lambda: len(disk.asked) > 4)
    assert not loads.told(), "SGLang hears of one load after the other"
    loads.end()


def test_no_more_is_under_way_than_its_share() -> None:
    disk = Disk()
    loads = Loads(disk, make_load(0, 50), make_load(100, 50))
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    for _ in range(20):
        disk.finish_one(next(job for job in disk.jobs if not job.done))
        eventually(lambda: disk.num_under_way == NUM_PARTS)
    loads.end()


def test_load_that_cannot_begin_fails_alone() -> None:
    disk = Disk()
    disk.refused = "12"
    first, bad, last = make_load(0, 3), make_load(10, 6), make_load(20, 3)
    loads = Loads(disk, first, bad, last)
    loads.end()
    assert [loads.num_arrived(load)[-1] for load in (first, bad, last)] == [3, 2, 3]


def test_memory_of_aborted_load_waits_for_its_reads() -> None:
    """SGLang gives the pages back as soon as it hears of the load's end."""
    disk = Disk(part_pages=1)
    first, second = make_load(0, 1), make_load(10, 5)
    loads = Loads(disk, first, second)
    eventually(lambda: len(disk.asked) == 2)
    assert disk.asked[1] == ("10",)
    second.mark_terminate()
    disk.finish_one(disk.jobs[0])
    eventually(lambda: loads.over() == [first])
    loads.controller.prefetch_buffer.put(None)
    eventually(loads.controller.prefetch_buffer.empty)
    assert loads.over() == [first]
    disk.finish_one(disk.jobs[1])
    eventually(lambda: loads.over() == [first, second])
    assert len(disk.asked) == 2 and loads.num_arrived(second) == [0]
    loads.end()


def test_thread_that_ends_waits_for_all_it_began() -> None:
    """SGLang joins it, and empties memory then."""
    disk = Disk(part_pages=1)
    loads = Loads(disk, make_load(0, 1), make_load(10, 5))
    eventually(lambda: len(disk.asked) == 2)
    loads.controller.storage_stop_event.set()
    disk.finish_one(disk.jobs[0])
    eventually(loads.controller.prefetch_buffer.empty)
    loads.thread.join(0.2)  # one that does not wait is over by then
    assert loads.thread.is_alive() and disk.num_under_way == 1
    disk.finish()
    loads.thread.join(DEADLINE_S)
    assert not loads.thread.is_alive() and disk.num_under_way == 0


@pytest.mark.parametrize(
    ("num_pages", "pools", "is_alone", "expected"),
    [
        (10, (), True, [4, 8, 10]),
        (20, (), False, [20]),  # other ranks send another number of acks
        (20, ("draft",), True, [20]),  # of which fewer pages may be there
    ],
)
def test_parts_count_at_once_where_they_may(
    num_pages: int, pools: tuple[str, ...], is_alone: bool, expected: list[int]
) -> None:
    load = make_load(0, num_pages, pools)
    loads = Loads(Disk(part_pages=4), load, is_alone=is_alone)
    loads.end()
    assert loads.num_arrived(load) == expected


def test_unknown_page_size_ends_no_thread() -> None:
    """A load that SGLang hears nothing of keeps its memory for good."""
    disk = Disk()
    disk.page_bytes = lambda *_: 1 // 0  # type: ignore[method-assign]
    loads = Loads(disk, make_load(0, 3, ("draft",)), make_load(10, 300))
    loads.end()
    assert not disk.asked


def test_abort_ends_a_load_between_two_parts() -> None:
    disk, load = Disk(part_pages=1), make_load(0, 100)
    disk.is_open = True
    disk.begins = lambda: load.mark_terminate() if len(disk.asked) == 3 else None
    Loads(disk, load).end()
    assert len(disk.asked) <= 3 + NUM_PARTS

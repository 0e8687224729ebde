"""Several stores and several loads under way on SGLang's threads, and acks as from its own."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from page_calls import queue_store
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    PoolName,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
    PrefetchOperation,
)
from small_cache import PAGE as SMALL_PAGE
from small_cache import keys_of
from told_disk import DEADLINE_S, PAGE, PART, Disk, controller_of, pools_of

from kit.waiting import eventually
from sglang_tiered.integration.storage.backend import BegunStore
from sglang_tiered.integration.storage.controller import TieredController
from sglang_tiered.integration.storage.workers import (
    NUM_PARTS,
    BackupWorker,
    LoadOperation,
)
from sglang_tiered.storage.base import JobKind, Reason
from sglang_tiered.storage.region.device import FileDevice

SIZES = [1, 2, 7, 127, 128, 129, 255, 256, 257, 300]


class Work:
    """A controller one of whose threads runs, and what it was given."""

    controller: Any
    thread: threading.Thread
    over: Any  # returns what has ended

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.given: list[Any] = []
        self.acks: list[Any] = []

    def start(self, target: Callable[[], object]) -> None:
        self.thread = threading.Thread(target=target, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """As SGLang tells its threads."""
        self.controller.storage_stop_event.set()
        for queue in (self.controller.backup_queue, self.controller.prefetch_buffer):
            queue.put(None)

    def end(self) -> None:
        """Let all end, and then the thread."""
        self.disk.finish()
        eventually(lambda: len(self.over()) == len(self.given), timeout_s=DEADLINE_S)
        self.stop()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive() and self.over() == self.given


class Node:
    """What the cache hands to the controller of a node."""

    def __init__(self, first: int, num_pages: int) -> None:
        self.hashes = [str(number) for number in range(first, first + num_pages)]
        self.host_indices = torch.arange(first * PAGE, (first + num_pages) * PAGE)
        self.pool_transfers: list[Any] | None = None


class Stores(Work):
    """Of nodes."""

    def __init__(
        self, disk: Disk, *nodes: Node, of: type[HybridCacheController] = TieredController
    ) -> None:
        super().__init__(disk)
        writes = SimpleNamespace(is_storage_writer=True)
        self.controller = controller_of(of, disk, storage_config=writes)
        self._nodes: dict[int, Node] = {}
        for node in nodes:
            self.add(node)
        target = self.controller.backup_thread_func
        if of is TieredController:
            target = BackupWorker(self.controller, disk, clock=lambda: 0.0).run
        self.start(target)

    def add(self, node: Node) -> None:
        operation = self.controller.write_storage(
            node.host_indices, [], node.hashes, None, node.pool_transfers
        )
        self._nodes[operation] = node
        self.given.append(node)

    def told(self) -> list[Any]:
        while not self.controller.ack_backup_queue.empty():
            self.acks.append(self.controller.ack_backup_queue.get())
        return self.acks

    def over(self) -> list[Any]:
        return [self._nodes[ack.id] for ack in self.told()]

    def num_done(self) -> list[int]:
        return [ack.completed_tokens // PAGE for ack in self.told()]


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


class Loads(Work):
    """Of loads."""

    def __init__(
        self,
        disk: Disk,
        *loads: Any,
        of: type[HybridCacheController] = TieredController,
        is_alone: bool = True,
    ) -> None:
        super().__init__(disk)
        groups = [] if is_alone else ["a group"]
        self.controller = controller_of(of, disk, prefetch_completion_sync_groups=groups)
        self.given += loads
        for load in loads:
            self.controller.prefetch_buffer.put(load)
        self.start(self.controller.prefetch_io_aux_func)

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

    def num_done(self) -> list[int]:
        return [self.num_arrived(load)[-1] for load in self.given]

    def end(self) -> None:
        super().end()
        for load in self.given:
            assert self.num_arrived(load) == sorted(self.num_arrived(load)), "it ends over less"


# ---- Of both ----


Make = Callable[..., Any]


@pytest.fixture(params=[JobKind.STORE, JobKind.LOAD])
def make(request: pytest.FixtureRequest) -> Make:
    """Work of so many pages from these on, and another thread's disk."""

    def make(*pages: tuple[int, int], **of_disk: Any) -> Any:
        disk = Disk(request.param)
        vars(disk).update(of_disk)
        if request.param is JobKind.STORE:
            return Stores(disk, *(Node(*each) for each in pages))
        return Loads(disk, *(make_load(*each) for each in pages))

    return make


def test_what_waits_is_told_in_order(make: Make) -> None:
    """Before the first has ended, also where the last one ends first."""
    work = make((0, 1), (10, 2), (20, PART + 2), (40, 1))
    disk, large = work.disk, [str(number) for number in range(20, 22 + PART)]
    eventually(lambda: len(disk.asked) == 5)
    assert disk.asked == [("0",), ("10", "11"), (*large[:PART],), (*large[PART:],), ("40",)]
    for job in reversed(disk.jobs[1:]):
        disk.finish_one(job)
    eventually(lambda: len(disk.told) == 4)
    assert not work.told(), "SGLang hears of one after the other"
    work.end()


def test_no_more_is_under_way_than_its_share(make: Make) -> None:
    work = make((0, 6 * PART), (100, 6 * PART))
    disk = work.disk
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    assert [len(pages) for pages in disk.asked] == [PART] * NUM_PARTS
    for _ in range(8):
        disk.finish_one(next(job for job in reversed(disk.jobs) if not job.done))
        eventually(lambda: disk.num_under_way == NUM_PARTS)
    work.end()


def test_what_cannot_begin_fails_alone(make: Make) -> None:
    work = make((0, PART + 5), (200, PART + 3), (300, 3), refused=str(200 + PART))
    work.end()
    # SGLang counts whole batches of a store.
    assert work.num_done() == [PART + 5, PART if isinstance(work, Loads) else 0, 3]
    asked = [int(page) for pages in work.disk.asked for page in pages]
    assert asked == [*range(PART + 5), *range(200, 200 + PART), *range(300, 303)]


def test_thread_that_ends_waits_for_all_it_began(make: Make) -> None:
    """SGLang joins it, and empties memory then."""
    work = make((0, PART), (20, 2), (40, PART), (60, 1))
    disk, stores = work.disk, isinstance(work, Stores)
    eventually(lambda: len(disk.jobs) == 3)
    work.controller.storage_stop_event.set()
    disk.finish_one(disk.jobs[0])  # it wakes the thread, and makes room for the last
    left = disk.jobs[1:]
    eventually(lambda: [job.cancelled for job in left] == [stores] * 2)
    work.thread.join(0.2)  # one that does not wait is over by then
    for job in left:
        assert work.thread.is_alive()
        disk.finish_one(job)
    work.thread.join(DEADLINE_S)
    assert not work.thread.is_alive() and disk.num_under_way == 0
    assert len(disk.asked) == 3, "more is begun"
    assert len(disk.told) == 3 or not stores


# ---- Stores ----


@pytest.fixture
def disk() -> Disk:
    return Disk(JobKind.STORE)


@pytest.mark.parametrize("pools", [(), ("draft",), ("window",), ("state",)])
@pytest.mark.parametrize("num_pages", [1, 2, 7, 127, 128, 129, 255, 256, 257, 300])
def test_stores_have_the_acks_of_sglangs_controller(num_pages: int, pools: tuple[str, ...]) -> None:
    """Ranks take equal numbers of them: one that sends more or fewer would hang the others."""
    for failing in {None, 0, num_pages // 2, num_pages - 1}:
        seen = []
        for of in (HybridCacheController, TieredController):
            disk = Disk(JobKind.STORE)
            disk.bytes_of_page = 64
            disk.failing = {(pool.value, str(failing)) for pool in PoolName}
            stores = Stores(disk, of=of)
            for first in (1000, 0, 2000):
                node = Node(first, num_pages)
                node.pool_transfers = pools_of(pools, node.hashes, node.host_indices) or None
                stores.add(node)
            stores.end()
            seen.append(stores.num_done())
        assert seen[0] == seen[1], f"page {failing} fails"


def test_failed_part_ends_its_node_alone(disk: Disk) -> None:
    disk.failing = {("kv", "3")}
    stores = Stores(disk, Node(0, 5 * PART), Node(100, 2))
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    disk.finish_one(disk.jobs[0])
    eventually(lambda: disk.jobs[1].cancelled)  # of no use behind the gap
    assert stores.over() == []  # its pages are still being read
    stores.end()
    assert stores.num_done() == [0, 2]
    assert len(disk.asked) == NUM_PARTS + 1


def test_node_cut_by_one_page_ends_alone(disk: Disk) -> None:
    """Which admission drops."""
    disk.is_open, disk.dropped = True, {str(PART + 2), "200"}
    cut, none, whole = Node(0, PART + 5), Node(200, 3), Node(300, 3)
    stores = Stores(disk, cut, none, whole)
    stores.end()
    assert stores.num_done() == [0, 0, 3]
    asked = [page for pages in disk.asked for page in pages]
    assert asked == [*cut.hashes[: PART + 2], *whole.hashes]


def test_error_at_an_end_leaves_no_part_unwaited(disk: Disk) -> None:
    """SGLang then gives away memory that is still being read."""
    end = disk.end_store

    def end_and_fail(begun: BegunStore) -> list[bool]:
        end(begun)
        raise ValueError("the books do not balance")

    disk.end_store = end_and_fail  # type: ignore[method-assign]
    stores = Stores(disk, Node(0, 3 * PART))
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    disk.finish_one(disk.jobs[0])
    eventually(lambda: disk.told)
    assert not stores.over() and disk.num_under_way == 1
    stores.end()


# ---- SGLang's own thread, over the real store ----


def test_same_pages_twice_fail_with_the_first(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second store finds its pages on their way, and they do not arrive."""
    goes_on, writev = threading.Event(), FileDevice.writev

    def fail_behind_header(device: FileDevice, fd: int, segments: Any, offset: int) -> int:
        if offset == 0:
            return writev(device, fd, segments, offset)
        assert goes_on.wait(DEADLINE_S)
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(FileDevice, "writev", fail_behind_header)
    keys, slots = keys_of(list(range(2 * SMALL_PAGE))), torch.arange(2 * SMALL_PAGE)
    first, second = (
        cache.storage.begin_store(PoolName.KV, keys, slots, queue_store(cache.storage, keys))
        for _ in range(2)
    )
    assert second.job.reasons == [Reason.DUPLICATE] * 2
    goes_on.set()
    assert cache.storage.end_store(first) == cache.storage.end_store(second) == [False, False]


# ---- Loads ----


@pytest.mark.parametrize("pools", [(), ("draft",), ("window",), ("draft", "window", "state")])
@pytest.mark.parametrize("num_pages", SIZES)
@pytest.mark.parametrize("part_pages", [3, math.inf])
def test_loads_have_the_acks_of_sglangs_controller(
    num_pages: int, pools: tuple[str, ...], part_pages: float
) -> None:
    """Ranks compare them one by one: one that sends more or fewer would hang the others."""
    faults = {None, ("kv", 0), ("kv", num_pages // 2), ("kv", num_pages - 1)}
    faults |= {("draft", num_pages // 2)} & {(name, num_pages // 2) for name in pools}
    faults |= {("swa", num_pages - 1)} if "window" in pools else set()
    for fault in faults:
        seen = []
        for of in (HybridCacheController, TieredController):
            disk = Disk(JobKind.LOAD, part_pages)
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
    whole = Loads(Disk(JobKind.LOAD, 2), make_load(0, num_pages, pools), is_alone=False)
    whole.end()
    kinds = [[ack.completed_tokens is None, ack.pool_hits is None] for ack in whole.acks]
    for number in range(0, len(whole.disk.asked) + 1, 1 + num_pages // 20):
        load, disk = make_load(0, num_pages, pools), Disk(JobKind.LOAD, 2)
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
    disk = Disk(JobKind.LOAD, part_pages)
    disk.is_open = True
    given = [make_load(0, num_pages), make_load(1000, num_pages), make_load(2000, 1)]
    loads = Loads(disk, *given)
    loads.end()
    assert loads.num_done() == [num_pages, num_pages, 1]
    asked = [page for pages in disk.asked for page in pages]
    assert disk.noted == {page: int(page) * PAGE for page in asked}
    assert asked == [page for load in given for page in load.hash_value]
    assert all(len(pages) <= min(part_pages, STORAGE_BATCH_SIZE) for pages in disk.asked)


def test_memory_of_aborted_load_waits_for_its_reads() -> None:
    """SGLang gives the pages back as soon as it hears of the load's end."""
    disk = Disk(JobKind.LOAD, 1)
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
    loads = Loads(Disk(JobKind.LOAD, 4), load, is_alone=is_alone)
    loads.end()
    assert loads.num_arrived(load) == expected


def test_unknown_page_size_ends_no_thread() -> None:
    """A load that SGLang hears nothing of keeps its memory for good."""
    disk = Disk(JobKind.LOAD, 2)
    disk.page_bytes = lambda *_: 1 // 0  # type: ignore[method-assign]
    loads = Loads(disk, make_load(0, 3, ("draft",)), make_load(10, 300))
    loads.end()
    assert not disk.asked


def test_abort_ends_a_load_between_two_parts() -> None:
    disk, load = Disk(JobKind.LOAD, 1), make_load(0, 100)
    disk.is_open = True
    disk.begins = lambda: load.mark_terminate() if len(disk.asked) == 3 else None
    Loads(disk, load).end()
    assert len(disk.asked) <= 3 + NUM_PARTS

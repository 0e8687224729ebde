"""Several reads under way for a thread of SGLang's that does one load at a time."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE

from sglang_tiered.integration.storage.transfers import NUM_PARTS, ReadAhead
from sglang_tiered.storage.base import Job, JobKind, Reason, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAGE, PAGE_BYTES = 4, 1 << 20
DEADLINE_S = 30.0


class Disk:
    """Begins reads; they end when told, and not before."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []  # pages of each read, in the order of begins
        self.jobs: list[Job] = []
        self.missing: set[str] = set()
        self.refused: str | None = None  # a page of which no read can begin
        self.is_open = False

    def begin(self, hashes: Sequence[str], host_indices: torch.Tensor) -> Job:
        if self.refused in hashes:
            raise ValueError("no such pages")
        assert len(host_indices) == len(hashes) * PAGE
        assert host_indices[0] == int(hashes[0]) * PAGE  # the pages that belong to these hashes
        keys = tuple(text.encode().ljust(32) for text in hashes)
        job = Job(JobKind.LOAD, Run(keys, tuple((memoryview(b"x"),) for _ in hashes)))
        job.reasons = [Reason.MISS if each in self.missing else Reason.OK for each in hashes]
        self.asked.append(tuple(hashes))
        self.jobs.append(job)
        if self.is_open:
            job.finish()
        return job

    def finish(self) -> None:
        self.is_open = True
        for job in self.jobs:
            if not job.done:
                job.finish()

    @property
    def num_under_way(self) -> int:
        return sum(not job.done for job in self.jobs)


class Load:
    """As much of SGLang's ``PrefetchOperation`` as its thread reads."""

    def __init__(self, first: int, num_pages: int) -> None:
        self.hash_value = [str(number) for number in range(first, first + num_pages)]
        self.host_indices = torch.arange(first * PAGE, (first + num_pages) * PAGE)
        self.request_id = f"r{first}"
        self.pool_transfers: list[Any] = []
        self.aborted = False

    def is_terminated(self) -> bool:
        return self.aborted


def make(
    disk: Disk, *, part_pages: int = 2, reads_queued: bool = True, tells_parts: bool = True
) -> ReadAhead:
    return ReadAhead(
        disk.begin,
        lambda: part_pages * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        page_size=PAGE,
        reads_queued=reads_queued,
        tells_parts=tells_parts,
    )


def transfer(
    reads: ReadAhead,
    load: Load,
    queue: Sequence[Load | None] = (),
    *,
    acks: Queue[Any] | None = None,
    sync_groups: Sequence[Any] = (),
) -> list[bool]:
    """What SGLang's ``_page_transfer`` does with a load, with these queued behind it."""
    waiting: Queue[Any] = Queue()
    for each in queue:
        waiting.put(each)
    served: list[bool] = []

    def in_batches(_: Any, operation: Load) -> None:
        for start in range(0, len(operation.hash_value), STORAGE_BATCH_SIZE):
            if operation.is_terminated() or not all(served):
                return
            hashes = operation.hash_value[start : start + STORAGE_BATCH_SIZE]
            slots = operation.host_indices[start * PAGE : (start + len(hashes)) * PAGE]
            served.extend(reads.read(hashes, slots))

    controller = SimpleNamespace(
        prefetch_buffer=waiting,
        prefetch_sync_queue=acks or Queue(),
        prefetch_completion_sync_groups=list(sync_groups),
        mem_pool_host=SimpleNamespace(layout_lease=nullcontext),
    )
    reads.carry_out(in_batches, controller, load)
    return served


@pytest.mark.parametrize("num_pages", [1, 2, 5, STORAGE_BATCH_SIZE + 3, 3 * STORAGE_BATCH_SIZE])
@pytest.mark.parametrize("part_pages", [1, 3, 2 * STORAGE_BATCH_SIZE])
def test_each_page_is_read_once_in_order(num_pages: int, part_pages: int) -> None:
    disk = Disk()
    disk.finish()
    reads = make(disk, part_pages=part_pages)
    loads = [Load(0, num_pages), Load(1000, num_pages), Load(2000, 1)]
    for at, load in enumerate(loads):
        assert transfer(reads, load, [None, *loads[at + 1 :]]) == [True] * len(load.hash_value)
    asked = [page for pages in disk.asked for page in pages]
    assert sorted(asked) == sorted(page for load in loads for page in load.hash_value)
    for load in loads:
        assert [page for page in asked if page in load.hash_value] == load.hash_value
    assert all(len(pages) <= min(part_pages, STORAGE_BATCH_SIZE) for pages in disk.asked)


def test_reads_of_queued_loads_begin_before_one_ends() -> None:
    disk = Disk()
    reads = make(disk, part_pages=4)
    loads = [Load(0, 1), Load(10, 1), Load(20, 9), Load(40, 1)]
    thread = threading.Thread(target=transfer, args=(reads, loads[0], loads[1:]))
    thread.start()
    wait_until(lambda: len(disk.asked) == 4)
    assert disk.asked == [("0",), ("10",), ("20", "21", "22", "23"), ("24", "25", "26", "27")]
    disk.finish()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_no_more_is_under_way_than_its_share() -> None:
    disk = Disk()
    reads = make(disk, part_pages=2)
    thread = threading.Thread(target=transfer, args=(reads, Load(0, 50), [Load(100, 50)]))
    thread.start()
    wait_until(lambda: disk.num_under_way == NUM_PARTS)
    for _ in range(20):
        next(job for job in disk.jobs if not job.done).finish()
        wait_until(lambda: disk.num_under_way == NUM_PARTS)
    disk.finish()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_memory_of_aborted_load_waits_for_its_reads() -> None:
    """SGLang gives the pages back as soon as its thread is through with the load."""
    disk = Disk()
    reads = make(disk, part_pages=1)
    first, second = Load(0, 1), Load(10, 5)
    through = threading.Event()

    def carry_out() -> None:
        transfer(reads, first, [second])
        transfer(reads, second)
        through.set()

    thread = threading.Thread(target=carry_out)
    thread.start()
    wait_until(lambda: len(disk.asked) == 2)
    assert disk.asked[1] == ("10",)
    second.aborted = True
    disk.jobs[0].finish()
    thread.join(0.2)
    assert not through.is_set()
    disk.jobs[1].finish()
    thread.join(DEADLINE_S)
    assert through.is_set() and len(disk.asked) == 2


def test_a_pipelines_stage_reads_no_queued_load() -> None:
    """It may empty its memory while an aborted load is still queued."""
    disk = Disk()
    reads = make(disk, part_pages=1, reads_queued=False)
    thread = threading.Thread(target=transfer, args=(reads, Load(0, 2), [Load(10, 2)]))
    thread.start()
    wait_until(lambda: disk.num_under_way == 2)
    disk.finish()
    thread.join(DEADLINE_S)
    assert disk.asked == [("0",), ("1",)]


def test_queued_load_that_cannot_begin_fails_alone() -> None:
    disk = Disk()
    disk.finish()
    disk.refused = "10"
    reads, bad = make(disk), Load(10, 2)
    assert transfer(reads, Load(0, 3), [bad]) == [True] * 3
    with pytest.raises(ValueError, match="no such pages"):
        transfer(reads, bad)
    assert transfer(reads, Load(20, 3)) == [True] * 3


def test_abort_ends_a_load_between_two_parts() -> None:
    disk = Disk()
    disk.finish()
    load = Load(0, 100)
    begin = disk.begin

    def begin_and_abort(hashes: Sequence[str], host_indices: torch.Tensor) -> Job:
        load.aborted = len(disk.asked) >= 3
        return begin(hashes, host_indices)

    disk.begin = begin_and_abort  # type: ignore[method-assign]
    served = transfer(make(disk, part_pages=1), load)
    assert served == [True] * (len(disk.asked) - NUM_PARTS + 1) + [False] * (
        100 - len(disk.asked) + NUM_PARTS - 1
    )
    assert len(disk.asked) <= 3 + NUM_PARTS


def told(
    load: Load,
    *,
    missing: Sequence[str] = (),
    sync_groups: Sequence[Any] = (),
    reads_queued: bool = True,
    tells_parts: bool = True,
) -> list[int]:
    """Tokens that SGLang hears of before its thread's own acks."""
    disk, acks = Disk(), Queue[Any]()
    disk.finish()
    disk.missing = set(missing)
    reads = make(disk, part_pages=4, reads_queued=reads_queued, tells_parts=tells_parts)
    transfer(reads, load, acks=acks, sync_groups=sync_groups)
    found = []
    while not acks.empty():
        ack = acks.get()
        assert ack.operation is load and ack.rid == load.request_id and not ack.completed_req
        found.append(ack.completed_tokens)
    return found


def test_each_part_that_arrived_counts_at_once() -> None:
    assert told(Load(0, 10)) == [4 * PAGE, 8 * PAGE]
    batch = STORAGE_BATCH_SIZE
    assert told(Load(0, batch + 9)) == [
        *range(4 * PAGE, batch * PAGE, 4 * PAGE),
        (batch + 4) * PAGE,
        (batch + 8) * PAGE,
    ]


def test_parts_count_where_pages_move_too() -> None:
    """Queued loads are not read there; a pipeline's stage tells of none."""
    assert told(Load(0, 10), reads_queued=False) == [4 * PAGE, 8 * PAGE]
    assert told(Load(0, 10), reads_queued=False, tells_parts=False) == []


def test_no_part_counts_behind_a_missing_page() -> None:
    assert told(Load(0, 20), missing=["5"]) == [4 * PAGE]


def test_pages_that_were_told_of_stay_served() -> None:
    """SGLang's scheduler ends over an ack of fewer tokens than before."""
    disk, acks, load = Disk(), Queue[Any](), Load(0, 20)
    disk.finish()
    disk.refused = "8"
    served = transfer(make(disk, part_pages=4), load, acks=acks)
    assert acks.get().completed_tokens == 4 * PAGE and acks.empty()
    assert served == [True] * 4 + [False] * 16


def test_parts_count_only_where_ranks_and_pools_agree() -> None:
    """Other ranks send another number of acks; of another pool fewer pages may be there."""
    assert told(Load(0, 20), sync_groups=["a group"]) == []
    load = Load(0, 20)
    load.pool_transfers = ["another pool"]
    assert told(load) == []


def test_what_follows_a_missing_page_is_not_served() -> None:
    disk = Disk()
    disk.finish()
    disk.missing = {"5"}
    load = Load(0, 20)
    served = transfer(make(disk, part_pages=4), load)
    assert served[:8] == [True] * 5 + [False] + [True] * 2 and not any(served[8:])
    assert len(disk.asked) <= 2 + NUM_PARTS
    assert transfer(make(disk), Load(100, 3)) == [True] * 3


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = threading.Event()
    for _ in range(int(DEADLINE_S / 0.002)):
        if condition():
            return
        deadline.wait(0.002)
    raise AssertionError("nothing happened in time")

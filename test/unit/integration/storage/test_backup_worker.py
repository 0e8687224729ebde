"""Several stores under way on a thread of SGLang's, and acks as from its own controller."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from page_calls import queue_store
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from small_cache import PAGE as SMALL_PAGE
from small_cache import compute, flush, keys_of, step

from kit.waiting import eventually
from sglang_tiered.integration.storage.backend import BegunStore, TieredStorage
from sglang_tiered.integration.storage.backup_worker import (
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    NUM_PARTS,
    BackupWorker,
    StoreOperation,
)
from sglang_tiered.integration.storage.controller import TieredController
from sglang_tiered.storage.base import Job, JobKind, Reason, Run
from sglang_tiered.storage.region.device import FileDevice

PAGE, PAGE_BYTES = 4, 1 << 20
PART = MIN_PART_BYTES // PAGE_BYTES
DEADLINE_S = 30.0


class Disk(TieredStorage):
    """Begins stores; they end when told, and not before."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []  # pages of each store, in the order of begins
        self.told: list[BegunStore] = []  # in the order of ends
        self.jobs: list[Job] = []
        self._to_finish: deque[Job] = deque()  # who takes one out finishes it: two threads do
        self.failing: set[str] = set()
        self.dropped: set[str] = set()  # not admitted, and what follows
        self.refused: str | None = None  # a page of which no store can begin
        self.bytes_of_page = PAGE_BYTES
        self.is_open = False
        self.seconds = 0.0  # that each store takes
        self.now = 0.0
        self._gate: Any = SimpleNamespace(
            queue_store=lambda *given, **named: given, store_ended=lambda store: None
        )

    def page_bytes(self, pool: PoolName = PoolName.KV) -> int:
        return self.bytes_of_page

    def begin_store(
        self, pool: PoolName, hashes: Sequence[str], host_indices: torch.Tensor, store: Any
    ) -> BegunStore:
        if self.refused in hashes:
            raise ValueError("no such pages")
        if pool == PoolName.KV:  # the pages that belong to these hashes
            assert len(host_indices) == len(hashes) * PAGE
            assert host_indices[0] == int(hashes[0]) * PAGE
        num_pages = len(hashes)
        hashes = hashes[: next((i for i, h in enumerate(hashes) if h in self.dropped), None)]
        job = None
        if hashes:
            keys = tuple(f"{pool.value} {text}".encode().ljust(32) for text in hashes)
            pages = ((memoryview(bytes(self.bytes_of_page)),),) * len(hashes)
            job = Job(JobKind.STORE, Run(keys, pages))
        self.asked.append(tuple(hashes) if pool == PoolName.KV else (pool.value, *hashes))
        if job is not None:
            self.jobs.append(job)
            self._to_finish.append(job)
        if self.is_open:
            self.finish()
        return BegunStore(job, host_indices, num_pages, len(hashes), None, pool == PoolName.KV)

    def end_store(self, begun: BegunStore) -> list[bool]:
        self.told.append(begun)
        stored = []
        if begun.job is not None:
            assert begun.job.wait(DEADLINE_S)
            stored = begun.job.ok
        return stored + [False] * (begun.num_pages - begun.num_admitted)

    # What SGLang's own controller asks for.

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, *_: Any) -> list[bool]:
        return self.end_store(self.begin_store(PoolName.KV, keys, host_indices, None))

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            each.name: self.end_store(self.begin_store(each.name, each.keys, each.host_indices, 0))
            for each in transfers
        }

    def finish_one(self, job: Job) -> None:
        if not job.cancelled:
            job.reasons = [
                Reason.IO_ERROR if each in self.failing else Reason.OK for each in names(job)
            ]
        self.now += self.seconds
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
        return sum(not job.done for job in self.jobs)


@pytest.fixture
def disk() -> Disk:
    return Disk()


def names(job: Job) -> tuple[str, ...]:
    return tuple(key.decode().split()[1] for key in job.run.keys)


class Node:
    """What the cache hands to the controller of a node."""

    def __init__(self, first: int, num_pages: int, *pool_transfers: PoolTransfer) -> None:
        self.hashes = [str(number) for number in range(first, first + num_pages)]
        self.host_indices = torch.arange(first * PAGE, (first + num_pages) * PAGE)
        self.pool_transfers = list(pool_transfers) or None


class Stores:
    """A controller whose backup thread runs, and the nodes that it was given."""

    def __init__(
        self, disk: Disk, *nodes: Node, of: type[HybridCacheController] = TieredController
    ) -> None:
        self.disk = disk
        self.controller: Any = of.__new__(of)
        self.controller.__dict__.update(
            page_size=PAGE,
            storage_backend=disk,
            storage_config=SimpleNamespace(is_storage_writer=True),
            mem_pool_host=SimpleNamespace(layout_lease=nullcontext),
            page_set_func=self.controller._page_set_zero_copy,
            storage_stop_event=threading.Event(),
            backup_queue=Queue(),
            ack_backup_queue=Queue(),
        )
        self.nodes: dict[int, Node] = {}
        self.acks: list[tuple[Node, int]] = []  # and how many tokens count as stored
        for node in nodes:
            self.add(node)
        target = self.controller.backup_thread_func
        if of is TieredController:
            target = BackupWorker(self.controller, disk, clock=lambda: disk.now).run
        self.thread = threading.Thread(target=target, daemon=True)
        self.thread.start()

    def add(self, node: Node) -> None:
        operation = self.controller.write_storage(
            node.host_indices, [], node.hashes, None, node.pool_transfers
        )
        self.nodes[operation] = node

    def acked(self) -> list[Node]:
        acks = self.controller.ack_backup_queue
        while not acks.empty():
            operation = acks.get()
            self.acks.append((self.nodes[operation.id], operation.completed_tokens))
        return [node for node, _ in self.acks]

    def num_stored(self) -> list[int]:
        return [num_tokens // PAGE for _, num_tokens in self.acks]

    def stop(self) -> None:
        """As SGLang tells its threads."""
        self.controller.storage_stop_event.set()
        self.controller.backup_queue.put(None)

    def end(self) -> None:
        """Let all nodes be stored, and the thread end."""
        self.disk.finish()
        eventually(lambda: len(self.acked()) == len(self.nodes), timeout_s=DEADLINE_S)
        self.stop()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive() and self.acked() == list(self.nodes.values())


def other_pools(name: str, first: int, num_pages: int) -> list[PoolTransfer]:
    """A draft model's pages, a window's last two, the state behind the last."""
    keys = [str(number) for number in range(first, first + num_pages)]
    slots = torch.arange(first * PAGE, (first + num_pages) * PAGE)
    of = {
        "draft": [PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV)],
        "window": [PoolTransfer(PoolName.SWA, host_indices=slots[-2 * PAGE :], keys=keys[-2:])],
        "state": [PoolTransfer(PoolName.MAMBA, host_indices=slots[-1:], keys=keys[-1:])],
    }
    return of.get(name, [])


@pytest.mark.parametrize("pool", ["", "draft", "window", "state"])
@pytest.mark.parametrize("num_pages", [1, 2, 7, 127, 128, 129, 255, 256, 257, 300])
def test_acks_are_those_of_sglangs_controller(num_pages: int, pool: str) -> None:
    """Ranks take equal numbers of them: one that sends more or fewer would hang the others."""
    for failing in {None, 0, num_pages // 2, num_pages - 1}:
        seen = []
        for of in (HybridCacheController, TieredController):
            disk = Disk()
            disk.bytes_of_page = 64
            disk.failing = set() if failing is None else {str(failing)}
            stores = Stores(disk, of=of)
            for first in (1000, 0, 2000):
                stores.add(Node(first, num_pages, *other_pools(pool, first, num_pages)))
            stores.end()
            seen.append([(node.hashes, num_tokens) for node, num_tokens in stores.acks])
        assert seen[0] == seen[1], f"page {failing} fails"


def test_queued_nodes_are_begun_and_acked_in_order(disk: Disk) -> None:
    """Also where the last one ends first."""
    stores = Stores(disk, Node(0, 1), Node(10, 2), Node(20, 1), Node(30, 1))
    eventually(lambda: len(disk.asked) == 4)
    assert disk.asked == [("0",), ("10", "11"), ("20",), ("30",)]
    for job in reversed(disk.jobs[1:]):
        disk.finish_one(job)
    eventually(lambda: len(disk.told) == 3)
    assert not stores.acked()
    stores.end()


def test_no_more_is_under_way_than_its_share(disk: Disk) -> None:
    stores = Stores(disk, Node(0, 6 * PART), Node(100, 6 * PART))
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    assert [len(pages) for pages in disk.asked] == [PART] * NUM_PARTS
    for _ in range(8):
        disk.finish_one(next(job for job in disk.jobs if not job.done))
        eventually(lambda: disk.num_under_way == NUM_PARTS)
    stores.end()


def test_two_large_pages_are_under_way(disk: Disk) -> None:
    disk.bytes_of_page = 2 * MIN_PART_BYTES
    stores = Stores(disk, Node(0, 6))
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    stores.end()
    assert disk.asked == [(str(page),) for page in range(6)]


def worker_of(disk: Disk) -> BackupWorker:
    controller = SimpleNamespace(
        backup_queue=Queue(), ack_backup_queue=Queue(), storage_stop_event=threading.Event()
    )
    controller.page_size = PAGE
    return BackupWorker(controller, disk, clock=lambda: disk.now)


def carry_out(worker: BackupWorker, *nodes: Node) -> None:
    for node in nodes:
        worker._take(StoreOperation(None, node.host_indices, [], node.hashes))  # type: ignore[arg-type]
        worker._begin_more()
        while not worker._queue.empty():
            worker._take(worker._queue.get())
            worker._begin_more()


@pytest.mark.parametrize(
    ("bytes_per_s", "part_bytes"),
    [(1 << 20, MIN_PART_BYTES), (1 << 30, 0.02 * (1 << 30)), (1 << 40, MAX_PART_BYTES)],
)
def test_a_part_is_what_takes_20_ms(disk: Disk, bytes_per_s: float, part_bytes: float) -> None:
    disk.is_open = True
    worker = worker_of(disk)
    assert worker.part_bytes == MIN_PART_BYTES
    disk.seconds = PAGE_BYTES / bytes_per_s
    carry_out(worker, *(Node(number, 1) for number in range(20)))
    assert worker.part_bytes == pytest.approx(part_bytes)


def test_speed_counts_only_what_was_written(disk: Disk) -> None:
    """What is held already, or was refused, ends at once and says nothing of the disk."""
    disk.is_open = True
    worker = worker_of(disk)
    disk.seconds = PAGE_BYTES / (1 << 30)
    carry_out(worker, *(Node(number, 1) for number in range(20)))
    before, disk.seconds = worker.part_bytes, 1e-9
    disk.failing = {"20"}
    carry_out(worker, Node(20, 1))
    assert worker.part_bytes == before


def test_failed_part_ends_its_node_alone(disk: Disk) -> None:
    disk.failing = {"3"}
    stores = Stores(disk, Node(0, 5 * PART), Node(100, 2))
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    disk.finish_one(disk.jobs[0])
    eventually(lambda: disk.jobs[1].cancelled)  # of no use behind the gap
    assert stores.acked() == []  # its pages are still being read
    stores.end()
    assert stores.num_stored() == [0, 2]
    assert len(disk.asked) == NUM_PARTS + 1


def test_what_admission_drops_ends_its_node_alone(disk: Disk) -> None:
    disk.is_open = True
    disk.dropped = {str(PART + 2), "200"}
    cut, none, whole = Node(0, 5 * PART), Node(200, 3), Node(300, 3)
    stores = Stores(disk, cut, none, whole)
    stores.end()
    assert stores.num_stored() == [0, 0, 3]
    asked = [page for pages in disk.asked for page in pages]
    assert asked == [*cut.hashes[: PART + 2], *whole.hashes]


def test_pages_behind_what_admission_drops_count_alike(disk: Disk) -> None:
    """They are not lost for the disk's sake, though no part of them ever begins."""
    disk.dropped = {"0"}
    Stores(disk, Node(0, 3 * PART)).end()
    pages = [int(slot) // PAGE for begun in disk.told for slot in begun.host_indices[::PAGE]]
    assert pages == list(range(3 * PART)) and not any(begun.num_admitted for begun in disk.told)


def test_node_that_cannot_begin_fails_alone(disk: Disk) -> None:
    disk.refused = "10"
    stores = Stores(disk, Node(0, 1), Node(10, 2), Node(20, 2))
    stores.end()
    assert stores.num_stored() == [1, 0, 2]
    assert disk.asked == [("0",), ("20", "21")]


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
    assert not stores.acked() and disk.num_under_way == 1
    stores.end()


def test_nothing_is_begun_after_the_stop(disk: Disk) -> None:
    stores = Stores(disk, Node(0, 4 * PART))
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    stores.controller.storage_stop_event.set()
    stores.add(Node(1000, 4))
    eventually(lambda: all(job.cancelled for job in disk.jobs))
    disk.finish()
    stores.thread.join(DEADLINE_S)
    assert not stores.thread.is_alive() and len(disk.asked) == NUM_PARTS


def test_thread_that_ends_waits_for_all_it_began(disk: Disk) -> None:
    """SGLang joins it, and empties memory then."""
    stores = Stores(disk, Node(0, 1), Node(10, 1), Node(20, 1))
    eventually(lambda: len(disk.asked) == 3)
    stores.stop()
    eventually(lambda: all(job.cancelled for job in disk.jobs))
    for job in disk.jobs:
        assert stores.thread.is_alive()
        disk.finish_one(job)
    stores.thread.join(DEADLINE_S)
    assert not stores.thread.is_alive() and len(disk.told) == 3


def test_states_of_queued_nodes_go_before_their_pages(disk: Disk) -> None:
    """A page of KV that is held makes a prefix that none can use without its state."""

    def state(page: int) -> PoolTransfer:
        return PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([page]), keys=[str(page)])

    window = PoolTransfer(PoolName.SWA, indices_from_pool=PoolName.KV)
    stores = Stores(disk, Node(0, 2, state(1)), Node(10, 2, state(11), window))
    eventually(lambda: len(disk.asked) == 5)
    mamba, swa = PoolName.MAMBA.value, PoolName.SWA.value
    assert disk.asked == [(mamba, "1"), ("0", "1"), (mamba, "11"), (swa, "10", "11"), ("10", "11")]
    stores.end()
    assert stores.num_stored() == [2, 2] and len(disk.asked) == 5


def test_other_pools_are_stored_in_parts_too(disk: Disk) -> None:
    """Of one piece the engine would take what has room behind the stores that wait."""
    disk.is_open = True
    draft = PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV)
    node = Node(0, 5 * PART, draft)
    Stores(disk, Node(1000, 1), node).end()
    drafts = [pages[1:] for pages in disk.asked if pages[0] == PoolName.DRAFT.value]
    assert [page for pages in drafts for page in pages] == node.hashes
    assert all(len(pages) <= PART for pages in drafts)


# ---- SGLang's own thread, over the real store ----


class HeldDisk:
    """A region store whose writes wait until it is told to go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.goes_on, writev = threading.Event(), FileDevice.writev

        def wait_and_write(*given: Any) -> int:
            assert self.goes_on.wait(DEADLINE_S)
            return writev(*given)

        patch.setattr(FileDevice, "writev", wait_and_write)


@pytest.fixture
def held_disk(cache: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDisk]:
    held = HeldDisk(monkeypatch)
    yield held
    held.goes_on.set()


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + 2 * SMALL_PAGE))


PROMPTS = [prompt(number) for number in range(1, 5)]


def begin_stores(cache: Any, num_prompts: int = len(PROMPTS)) -> None:
    """The stores of the first two prompts are under way at once; the spiller holds the others."""
    for tokens in PROMPTS[:num_prompts]:
        compute(cache, tokens)
        step(cache, lambda: not cache.ongoing_write_through)
    step(cache, lambda: len(cache.ongoing_backup) > 1)
    step(cache, lambda: cache.storage.region_engine.stats().num_inflight_jobs > 1)


def held_pages(cache: Any) -> list[int]:
    return [cache.storage.num_kept(keys_of(tokens)) for tokens in PROMPTS]


def test_waiting_nodes_are_stored_together(cache: Any, held_disk: HeldDisk) -> None:
    begin_stores(cache)
    operations = list(cache.ongoing_backup)
    acked: list[int] = []
    put = cache.cache_controller.ack_backup_queue.put
    cache.cache_controller.ack_backup_queue.put = lambda each: (acked.append(each.id), put(each))
    held_disk.goes_on.set()
    step(cache, lambda: not cache.ongoing_backup and held_pages(cache) == [2] * len(PROMPTS))
    assert acked[: len(operations)] == operations and acked == sorted(acked)
    assert not cache.storage._storing
    cache.storage.accounting.check_integrity()
    assert cache.storage.accounting.num_dirty == 0


def test_flush_ends_stores_under_way(cache: Any, held_disk: HeldDisk) -> None:
    begin_stores(cache)
    drop = cache.storage.drop_stores

    def drop_and_go_on(dropping: bool) -> None:
        drop(dropping)
        held_disk.goes_on.set()

    cache.storage.drop_stores = drop_and_go_on
    assert cache.quiesce()
    assert not cache.is_under_way() and not cache.storage._storing
    flush(cache)
    cache.storage.region_engine.check_integrity()
    compute(cache, PROMPTS[0])
    step(cache, lambda: held_pages(cache)[0] == 2)


def test_same_pages_twice_fail_with_the_first(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second store finds its pages on their way, and they do not arrive."""
    goes_on, writev = threading.Event(), FileDevice.writev

    def fail_behind_header(device: FileDevice, fd: int, segments: Any, offset: int) -> int:
        if offset == 0:
            return writev(device, fd, segments, offset)
        assert goes_on.wait(DEADLINE_S)
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(FileDevice, "writev", fail_behind_header)
    keys, slots = keys_of(PROMPTS[0]), torch.arange(2 * SMALL_PAGE)
    first, second = (
        cache.storage.begin_store(PoolName.KV, keys, slots, queue_store(cache.storage, keys))
        for _ in range(2)
    )
    assert second.job.reasons == [Reason.DUPLICATE] * 2
    goes_on.set()
    assert cache.storage.end_store(first) == cache.storage.end_store(second) == [False, False]

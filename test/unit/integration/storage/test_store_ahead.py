"""Several stores under way for a thread of SGLang's that does one node at a time."""

from __future__ import annotations

import errno
import threading
from contextlib import contextmanager
from queue import Queue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, PoolName, PoolTransfer
from small_cache import PAGE as SMALL_PAGE
from small_cache import compute, flush, keys_of, step

from kit.waiting import eventually
from sglang_tiered.integration.storage.store_ahead import (
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    NUM_PARTS,
    BegunStore,
    StoreAhead,
)
from sglang_tiered.storage.base import Erasure, Job, JobKind, Reason, Run
from sglang_tiered.storage.region.device import FileDevice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAGE, PAGE_BYTES = 4, 1 << 20
PART = MIN_PART_BYTES // PAGE_BYTES
DEADLINE_S = 30.0


class Disk:
    """Begins stores; they end when told, and not before."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []  # pages of each store, in the order of begins
        self.ended: list[tuple[str, ...]] = []
        self.jobs: list[Job] = []
        self.failing: set[str] = set()
        self.dropped: set[str] = set()  # not admitted, and what follows
        self.refused: str | None = None  # a page of which no store can begin
        self.num_refused = 0
        self.page_bytes = PAGE_BYTES
        self.is_open = False
        self.seconds = 0.0  # that each store takes
        self.now = 0.0

    def begin(
        self,
        pool: PoolName,
        hashes: Sequence[str],
        host_indices: torch.Tensor,
        operation: int | None,
    ) -> BegunStore:
        if self.refused in hashes:
            self.num_refused += 1
            raise ValueError("no such pages")
        if pool == PoolName.KV:  # the pages that belong to these hashes
            assert len(host_indices) == len(hashes) * PAGE
            assert host_indices[0] == int(hashes[0]) * PAGE
        num_pages = len(hashes)
        hashes = hashes[: next((i for i, h in enumerate(hashes) if h in self.dropped), None)]
        job = None
        if hashes:
            keys = tuple(f"{pool.value} {text}".encode().ljust(32) for text in hashes)
            pages = tuple((memoryview(bytes(self.page_bytes)),) for _ in hashes)
            job = Job(JobKind.STORE, Run(keys, pages))
            self.jobs.append(job)
        self.asked.append(tuple(hashes) if pool == PoolName.KV else (pool.value, *hashes))
        if self.is_open and job is not None:
            self.finish_one(job)
        return BegunStore(job, host_indices, num_pages, len(hashes), None, pool == PoolName.KV)

    def end(self, begun: BegunStore) -> list[bool]:
        stored = []
        if begun.job is not None:
            assert begun.job.wait(DEADLINE_S)
            stored = begun.job.ok
            self.ended.append(names(begun.job))
        return stored + [False] * (begun.num_pages - begun.num_admitted)

    def finish_one(self, job: Job) -> None:
        if not job.cancelled:
            job.reasons = [
                Reason.IO_ERROR if each in self.failing else Reason.OK for each in names(job)
            ]
        self.now += self.seconds
        job.finish()

    def finish(self) -> None:
        self.is_open = True
        for job in self.jobs:
            if not job.done:
                self.finish_one(job)

    @property
    def num_under_way(self) -> int:
        return sum(not job.done for job in self.jobs)


def names(job: Job) -> tuple[str, ...]:
    return tuple(key.decode().split()[1] for key in job.run.keys)


class Node:
    """As much of SGLang's ``StorageOperation`` as its thread reads."""

    def __init__(self, first: int, num_pages: int, *pool_transfers: PoolTransfer) -> None:
        self.hash_value = [str(number) for number in range(first, first + num_pages)]
        self.host_indices = torch.arange(first * PAGE, (first + num_pages) * PAGE)
        self.pool_transfers = list(pool_transfers) or None
        self.stored: list[bool] = []
        self.id = first


class Controller:
    """SGLang's backup thread with its queue, and what it does with a node."""

    def __init__(self, stores: StoreAhead, *nodes: Node | None) -> None:
        self.stores = stores
        self.backup_skip = False
        self.storage_stop_event = threading.Event()
        self.mem_pool_host = SimpleNamespace(layout_lease=self._lease)
        self.backup_queue: Queue[Any] = Queue()
        self.acks: list[Node] = []
        self.num_leases = 0
        self.ends_after: int | None = None
        for node in nodes:
            self.backup_queue.put(node)
        self.thread = threading.Thread(target=self._run, daemon=True)

    @contextmanager
    def _lease(self) -> Iterator[None]:
        self.num_leases += 1
        yield
        self.num_leases -= 1

    def _run(self) -> None:
        while not self.backup_queue.empty() and len(self.acks) != self.ends_after:
            node = self.backup_queue.get()
            if node is not None:
                self.stores.carry_out(Controller._page_backup, self, node)
                self.acks.append(node)
        self.stores.finish()

    def _page_backup(self, node: Node) -> None:
        try:
            for transfer in node.pool_transfers or ():
                assert transfer.keys and transfer.host_indices is not None
                self.stores.store(transfer.name, transfer.keys, transfer.host_indices)
            for start in range(0, len(node.hash_value), STORAGE_BATCH_SIZE):
                hashes = node.hash_value[start : start + STORAGE_BATCH_SIZE]
                slots = node.host_indices[start * PAGE : (start + len(hashes)) * PAGE]
                node.stored += self.stores.store(PoolName.KV, hashes, slots)
                if not all(node.stored):
                    return
        except ValueError:
            pass  # SGLang logs it and goes on

    def _resolve_sidecar_kv_derived_pool_transfers(self, node: Node) -> None:
        for transfer in node.pool_transfers or ():
            if transfer.indices_from_pool == PoolName.KV:
                transfer.keys, transfer.host_indices = node.hash_value, node.host_indices

    def _resolve_sidecar_nonkv_derived_pool_transfers(self, node: Node) -> None:
        """There is none."""

    def begin(self) -> Controller:
        self.thread.start()
        return self

    def run(self) -> None:
        if self.thread.ident is None:
            self.thread.start()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        assert not self.stores._under_way and not self.stores._num_bytes
        assert not self.num_leases


def make(disk: Disk, *, stores_queued: bool = True) -> StoreAhead:
    return StoreAhead(
        disk.begin,
        disk.end,
        page_bytes=lambda pool: disk.page_bytes,
        page_size=PAGE,
        stores_queued=stores_queued,
        clock=lambda: disk.now,
    )


@pytest.mark.parametrize("num_pages", [1, PART, STORAGE_BATCH_SIZE + 3, 3 * STORAGE_BATCH_SIZE])
def test_each_page_is_stored_once_in_order(num_pages: int) -> None:
    disk = Disk()
    disk.finish()
    nodes = [Node(0, num_pages), Node(1000, num_pages), Node(2000, 1)]
    controller = Controller(make(disk), nodes[0], None, *nodes[1:])
    controller.run()
    assert controller.acks == nodes
    assert all(node.stored == [True] * len(node.hash_value) for node in nodes)
    asked = [page for pages in disk.asked for page in pages]
    assert asked == [page for node in nodes for page in node.hash_value]
    assert all(len(pages) <= STORAGE_BATCH_SIZE for pages in disk.asked)


def test_queued_nodes_are_begun_and_acked_in_order() -> None:
    """Also where the last one ends first."""
    disk = Disk()
    nodes = [Node(0, 1), Node(10, 2), Node(20, 1), Node(30, 1)]
    controller = Controller(make(disk), *nodes).begin()
    eventually(lambda: len(disk.asked) == 4)
    assert disk.asked == [("0",), ("10", "11"), ("20",), ("30",)]
    for job in reversed(disk.jobs[1:]):
        disk.finish_one(job)
    assert not controller.acks
    disk.finish()
    controller.run()
    assert controller.acks == nodes and disk.ended == disk.asked


def test_no_more_is_under_way_than_its_share() -> None:
    disk = Disk()
    controller = Controller(make(disk), Node(0, 6 * PART), Node(100, 6 * PART)).begin()
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    assert [len(pages) for pages in disk.asked] == [PART] * NUM_PARTS
    for _ in range(8):
        disk.finish_one(next(job for job in disk.jobs if not job.done))
        eventually(lambda: disk.num_under_way == NUM_PARTS)
    disk.finish()
    controller.run()


def test_two_large_pages_are_under_way() -> None:
    disk = Disk()
    disk.page_bytes = 2 * MIN_PART_BYTES
    controller = Controller(make(disk), Node(0, 6)).begin()
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    disk.finish()
    controller.run()
    assert disk.asked == [(str(page),) for page in range(6)]


@pytest.mark.parametrize(
    ("bytes_per_s", "part_bytes"),
    [(1 << 20, MIN_PART_BYTES), (1 << 30, 0.02 * (1 << 30)), (1 << 40, MAX_PART_BYTES)],
)
def test_a_part_is_what_takes_20_ms(bytes_per_s: float, part_bytes: float) -> None:
    disk = Disk()
    disk.finish()
    stores = make(disk)
    assert stores.part_bytes == MIN_PART_BYTES
    disk.seconds = PAGE_BYTES / bytes_per_s
    Controller(stores, *(Node(number, 1) for number in range(20))).run()
    assert stores.part_bytes == pytest.approx(part_bytes)


def test_speed_counts_only_what_was_written() -> None:
    """What is held already, or was refused, ends at once and says nothing of the disk."""
    disk = Disk()
    disk.finish()
    stores = make(disk)
    disk.seconds = PAGE_BYTES / (1 << 30)
    Controller(stores, *(Node(number, 1) for number in range(20))).run()
    before, disk.seconds = stores.part_bytes, 1e-9
    disk.failing = {"20"}
    Controller(stores, Node(20, 1)).run()
    assert stores.part_bytes == before


def test_failed_part_ends_its_node_alone() -> None:
    disk = Disk()
    disk.failing = {"3"}
    bad, good = Node(0, 5 * PART), Node(100, 2)
    controller = Controller(make(disk), bad, good).begin()
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    disk.finish_one(disk.jobs[0])
    eventually(lambda: disk.jobs[1].cancelled)  # of no use behind the gap
    assert controller.acks == []  # its pages are still being read
    disk.finish()
    controller.run()
    assert controller.acks == [bad, good] and good.stored == [True] * 2
    assert bad.stored == [page != 3 and page < PART for page in range(5 * PART)]
    assert len(disk.asked) == NUM_PARTS + 1


def test_what_admission_drops_ends_its_node_alone() -> None:
    disk = Disk()
    disk.finish()
    disk.dropped = {str(PART + 2), "200"}
    cut, none, whole = Node(0, 5 * PART), Node(200, 3), Node(300, 3)
    Controller(make(disk), cut, none, whole).run()
    assert cut.stored == [page < PART + 2 for page in range(5 * PART)]
    assert none.stored == [False] * 3 and whole.stored == [True] * 3
    asked = [page for pages in disk.asked for page in pages]
    assert asked == [*cut.hash_value[: PART + 2], *whole.hash_value]


def test_pages_behind_what_admission_drops_count_alike() -> None:
    """They are not lost for the disk's sake, though no part of them ever begins."""
    disk = Disk()
    disk.dropped = {"0"}
    disk.is_open = True
    told: list[BegunStore] = []
    stores = make(disk)
    stores._end_store = lambda begun: told.append(begun) or disk.end(begun)
    node = Node(0, 3 * PART)
    Controller(stores, node).run()
    pages = [int(slot) // PAGE for begun in told for slot in begun.host_indices[::PAGE]]
    assert pages == list(range(3 * PART)) and not any(begun.num_admitted for begun in told)


def test_node_that_cannot_begin_fails_alone() -> None:
    """And in its turn: admission takes one node after the other."""
    disk = Disk()
    disk.refused = "10"
    first, bad, last = Node(0, 1), Node(10, 2), Node(20, 2)
    controller = Controller(make(disk), first, bad, last).begin()
    eventually(lambda: disk.asked)
    disk.finish()
    controller.run()
    assert controller.acks == [first, bad, last]
    assert first.stored == [True] and not bad.stored and last.stored == [True] * 2


def test_node_that_failed_ahead_is_not_retried() -> None:
    """The gate has forgotten whose pages these are, and no purge of a tenant would find them."""
    disk = Disk()
    disk.refused = "10"
    first, bad, last = Node(0, 1), Node(10, 2), Node(20, 2)
    controller = Controller(make(disk), first, bad, last).begin()
    eventually(lambda: disk.num_refused)
    disk.refused = None
    disk.finish()
    controller.run()
    assert controller.acks == [first, bad, last]
    assert not bad.stored and last.stored == [True] * 2


def test_error_at_an_end_leaves_no_part_unwaited() -> None:
    """SGLang then gives away memory that is still being read."""
    disk, node = Disk(), Node(0, 3 * PART)
    stores = make(disk)
    end = stores._end_store

    def end_and_fail(begun: BegunStore) -> list[bool]:
        end(begun)
        raise ValueError("the books do not balance")

    stores._end_store = end_and_fail
    controller = Controller(stores, node).begin()
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    last, is_waited_for = disk.jobs[1], threading.Event()
    wait = last.wait
    last.wait = lambda *given: (is_waited_for.set(), wait(*given))[1]  # type: ignore[method-assign]
    disk.finish_one(disk.jobs[0])
    eventually(lambda: is_waited_for.is_set() or not controller.thread.is_alive())
    assert is_waited_for.is_set() and not controller.acks
    disk.finish()
    controller.run()
    assert controller.acks == [node]


def test_nothing_is_begun_after_the_stop() -> None:
    disk = Disk()
    controller = Controller(make(disk), Node(0, 2 * PART)).begin()
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    controller.storage_stop_event.set()
    controller.backup_queue.put(Node(1000, 4))
    controller.ends_after = 1
    disk.finish()
    controller.run()
    assert len(disk.asked) == NUM_PARTS


def test_thread_that_ends_waits_for_queued_nodes() -> None:
    """SGLang joins it, and empties memory then."""
    disk = Disk()
    nodes = [Node(0, 1), Node(10, 1), Node(20, 1)]
    controller = Controller(make(disk), *nodes)
    controller.ends_after = 1
    controller.begin()
    eventually(lambda: len(disk.asked) == 3)
    disk.finish_one(disk.jobs[0])
    eventually(lambda: all(job.cancelled for job in disk.jobs[1:]))
    assert controller.acks and controller.thread.is_alive()
    disk.finish()
    controller.run()
    assert controller.acks == nodes[:1] and disk.ended == disk.asked


def test_pages_that_move_are_read_under_lease() -> None:
    disk = Disk()
    controller = Controller(make(disk, stores_queued=False), Node(0, 1), Node(10, 1)).begin()
    eventually(lambda: disk.asked)
    assert disk.asked == [("0",)] and controller.num_leases == 1
    disk.finish()
    controller.run()
    assert disk.asked == [("0",), ("10",)]


def test_states_of_queued_nodes_go_before_their_pages() -> None:
    """As SGLang asks for them: admission decides over a node by its first call."""
    disk = Disk()

    def state(page: int) -> PoolTransfer:
        return PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([page]), keys=[str(page)])

    window = PoolTransfer(PoolName.SWA, indices_from_pool=PoolName.KV)
    nodes = [Node(0, 2, state(1)), Node(10, 2, state(11), window)]
    controller = Controller(make(disk), *nodes).begin()
    eventually(lambda: len(disk.asked) == 5)
    mamba, swa = PoolName.MAMBA.value, PoolName.SWA.value
    assert disk.asked == [(mamba, "1"), ("0", "1"), (mamba, "11"), (swa, "10", "11"), ("10", "11")]
    disk.finish()
    controller.run()
    assert controller.acks == nodes and all(node.stored == [True] * 2 for node in nodes)
    assert len(disk.asked) == 5


def test_other_pools_are_stored_in_parts_too() -> None:
    """Of one piece the engine would take what has room behind the stores that wait."""
    disk = Disk()
    disk.finish()
    draft = PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV)
    node = Node(0, 5 * PART, draft)
    Controller(make(disk), Node(1000, 1), node).run()
    drafts = [pages[1:] for pages in disk.asked if pages[0] == PoolName.DRAFT.value]
    assert [page for pages in drafts for page in pages] == node.hash_value
    assert all(len(pages) <= PART for pages in drafts) and all(node.stored)


def test_window_of_last_pages_is_stored_at_once() -> None:
    """Admission knows the node by its first or its last page."""
    disk = Disk()
    disk.finish()
    node = Node(0, 5 * PART)
    window = PoolTransfer(
        PoolName.SWA, host_indices=node.host_indices[PAGE:], keys=node.hash_value[1:]
    )
    node.pool_transfers = [window]
    Controller(make(disk), node).run()
    assert disk.asked[0] == (PoolName.SWA.value, *node.hash_value[1:])


def test_pages_of_another_rank_are_left_to_sglang() -> None:
    disk = Disk()
    disk.finish()
    controller = Controller(make(disk), Node(0, 1))
    controller.backup_skip = True
    seen: list[Any] = []
    assert controller.stores.carry_out(lambda *given: seen.append(given), controller, "n") is None
    assert seen == [(controller, "n")] and not disk.asked


# ---- SGLang's own thread, over the real store ----


class HeldDisk:
    """A region store whose writes wait until it is told to go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.goes_on, writev = threading.Event(), FileDevice.writev

        def wait_and_write(*given: Any) -> int:
            assert self.goes_on.wait(DEADLINE_S)
            return writev(*given)

        patch.setattr(FileDevice, "writev", wait_and_write)

    def goes_on_at_stop(self, cache: Any) -> None:
        """Go on once SGLang's threads were told to stop."""
        event = cache.cache_controller.storage_stop_event
        stop = event.set

        def stop_and_go_on() -> None:
            stop()
            self.goes_on.set()

        event.set = stop_and_go_on


@pytest.fixture
def disk(cache: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDisk]:
    held = HeldDisk(monkeypatch)
    yield held
    held.goes_on.set()


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + 2 * SMALL_PAGE))


PROMPTS = [prompt(number) for number in range(1, 5)]


def begin_stores(cache: Any, num_prompts: int = len(PROMPTS)) -> None:
    """The stores of the first two prompts are under way at once; the spiller holds the others."""
    are_queued, stores = threading.Event(), cache.storage.stores
    carry_out = stores.carry_out

    def wait_and_carry_out(*given: Any) -> Any:
        assert are_queued.wait(DEADLINE_S)
        return carry_out(*given)

    stores.carry_out = wait_and_carry_out
    for tokens in PROMPTS[:num_prompts]:
        compute(cache, tokens)
        step(cache, lambda: not cache.ongoing_write_through)
    step(cache, lambda: len(cache.ongoing_backup) > 1)
    are_queued.set()
    step(cache, lambda: cache.storage.region_engine.stats().num_inflight_jobs > 1)


def held_pages(cache: Any) -> list[int]:
    return [cache.storage.num_kept(keys_of(tokens)) for tokens in PROMPTS]


def test_waiting_nodes_are_stored_together(cache: Any, disk: HeldDisk) -> None:
    begin_stores(cache)
    operations = list(cache.ongoing_backup)
    acked: list[int] = []
    put = cache.cache_controller.ack_backup_queue.put
    cache.cache_controller.ack_backup_queue.put = lambda each: (acked.append(each.id), put(each))
    disk.goes_on.set()
    step(cache, lambda: not cache.ongoing_backup and held_pages(cache) == [2] * len(PROMPTS))
    assert acked[: len(operations)] == operations and acked == sorted(acked)
    assert not cache.storage._storing and not cache.storage.stores._under_way
    cache.storage.accounting.check_integrity()
    assert cache.storage.accounting.num_dirty == 0


def test_flush_ends_stores_under_way(cache: Any, disk: HeldDisk) -> None:
    begin_stores(cache)
    drop = cache.storage.drop_stores

    def drop_and_go_on(dropping: bool) -> None:
        drop(dropping)
        disk.goes_on.set()

    cache.storage.drop_stores = drop_and_go_on
    assert cache.quiesce()
    assert not cache.is_under_way() and not cache.storage._storing
    flush(cache)
    cache.storage.region_engine.check_integrity()
    compute(cache, PROMPTS[0])
    step(cache, lambda: held_pages(cache)[0] == 2)


def test_reset_waits_for_stores_of_its_thread(cache: Any, disk: HeldDisk) -> None:
    """Without rest before it, as in a pipeline: the thread ends after what it has begun."""
    begin_stores(cache)
    disk.goes_on_at_stop(cache)
    flush(cache)
    assert cache.storage.region_engine.stats().num_inflight_jobs == 0
    assert not cache.storage._storing and not cache.storage.stores._under_way


def test_purge_finds_every_store_under_way(cache: Any, disk: HeldDisk) -> None:
    begin_stores(cache, 2)
    purged = cache.storage.erase(Erasure())
    disk.goes_on.set()
    step(cache, purged.done)
    assert purged.result()
    step(cache, lambda: not cache.ongoing_backup)
    assert held_pages(cache) == [0] * len(PROMPTS)


def test_detached_tiers_have_ended_every_store(cache: Any, disk: HeldDisk) -> None:
    begin_stores(cache)
    engine = cache.storage.region_engine
    disk.goes_on_at_stop(cache)
    detached, why = cache.detach_storage_backend()
    assert detached, why
    assert engine.stats().num_inflight_jobs == 0


def test_same_pages_twice_fail_with_the_first(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second store finds its pages on their way, and they do not arrive."""
    goes_on, writev = threading.Event(), FileDevice.writev

    def fail_behind_header(device: FileDevice, fd: int, segments: Any, offset: int) -> int:
        if offset == 0:
            return writev(device, fd, segments, offset)
        assert goes_on.wait(DEADLINE_S)
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(FileDevice, "writev", fail_behind_header)
    given = PoolName.KV, keys_of(PROMPTS[0]), torch.arange(2 * SMALL_PAGE), None
    first, second = (cache.storage._begin_store(*given) for _ in range(2))
    assert second.job.reasons == [Reason.DUPLICATE] * 2
    goes_on.set()
    assert cache.storage._end_store(first) == cache.storage._end_store(second) == [False, False]

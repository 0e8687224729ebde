"""Several stores under way on a thread of SGLang's, and acks as from its own controller."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from page_calls import queue_store
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from small_cache import PAGE as SMALL_PAGE
from small_cache import keys_of
from told_disk import DEADLINE_S, PAGE, PAGE_BYTES, ToldDisk, controller_of, pools_of

from kit.waiting import eventually
from sglang_tiered.integration.storage.backend import BegunStore
from sglang_tiered.integration.storage.controller import TieredController
from sglang_tiered.integration.storage.workers import (
    MIN_PART_BYTES,
    NUM_PARTS,
    BackupWorker,
)
from sglang_tiered.storage.base import JobKind, Reason
from sglang_tiered.storage.region.device import FileDevice

PART = MIN_PART_BYTES // PAGE_BYTES


class Disk(ToldDisk):
    """Of stores."""

    kind, failure = JobKind.STORE, Reason.IO_ERROR

    def __init__(self) -> None:
        super().__init__()
        self.told: list[BegunStore] = []  # in the order of ends
        self.dropped: set[str] = set()  # not admitted, and what follows
        self._gate: Any = SimpleNamespace(
            queue_store=lambda *given, **named: given, store_ended=lambda store: None
        )

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

    # What SGLang's own controller asks for.

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, *_: Any) -> list[bool]:
        return self.end_store(self.begin_store(PoolName.KV, keys, host_indices, None))

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            each.name: self.end_store(self.begin_store(each.name, each.keys, each.host_indices, 0))
            for each in transfers
        }


@pytest.fixture
def disk() -> Disk:
    return Disk()


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
        writes = SimpleNamespace(is_storage_writer=True)
        self.controller = controller_of(of, disk, storage_config=writes)
        self.nodes: dict[int, Node] = {}
        self.acks: list[tuple[Node, int]] = []  # and how many tokens count as stored
        for node in nodes:
            self.add(node)
        target = self.controller.backup_thread_func
        if of is TieredController:
            target = BackupWorker(self.controller, disk, clock=lambda: 0.0).run
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


@pytest.mark.parametrize("pools", [(), ("draft",), ("window",), ("state",)])
@pytest.mark.parametrize("num_pages", [1, 2, 7, 127, 128, 129, 255, 256, 257, 300])
def test_acks_are_those_of_sglangs_controller(num_pages: int, pools: tuple[str, ...]) -> None:
    """Ranks take equal numbers of them: one that sends more or fewer would hang the others."""
    for failing in {None, 0, num_pages // 2, num_pages - 1}:
        seen = []
        for of in (HybridCacheController, TieredController):
            disk = Disk()
            disk.bytes_of_page = 64
            disk.failing = {(pool.value, str(failing)) for pool in PoolName}
            stores = Stores(disk, of=of)
            for first in (1000, 0, 2000):
                node = Node(first, num_pages)
                node.pool_transfers = pools_of(pools, node.hashes, node.host_indices) or None
                stores.add(node)
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


def test_failed_part_ends_its_node_alone(disk: Disk) -> None:
    disk.failing = {("kv", "3")}
    stores = Stores(disk, Node(0, 5 * PART), Node(100, 2))
    eventually(lambda: disk.num_under_way == NUM_PARTS)
    disk.finish_one(disk.jobs[0])
    eventually(lambda: disk.jobs[1].cancelled)  # of no use behind the gap
    assert stores.acked() == []  # its pages are still being read
    stores.end()
    assert stores.num_stored() == [0, 2]
    assert len(disk.asked) == NUM_PARTS + 1


@pytest.mark.parametrize("why", ["dropped", "refused"])
def test_node_cut_by_one_page_ends_alone(disk: Disk, why: str) -> None:
    """Which admission drops, or of which no store can begin."""
    disk.is_open = True
    if why == "dropped":
        disk.dropped = {str(PART + 2), "200"}
    else:
        disk.refused = "200"
    cut, none, whole = Node(0, PART + 5), Node(200, 3), Node(300, 3)
    stores = Stores(disk, cut, none, whole)
    stores.end()
    is_cut = why == "dropped"
    assert stores.num_stored() == [0 if is_cut else PART + 5, 0, 3]
    asked = [page for pages in disk.asked for page in pages]
    assert asked == [*cut.hashes[: PART + 2 if is_cut else None], *whole.hashes]


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


# ---- SGLang's own thread, over the real store ----


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + 2 * SMALL_PAGE))


PROMPTS = [prompt(number) for number in range(1, 5)]


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

"""The spiller over SGLang's own tree and a real store."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, hashes_of, prompt
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kit.books import check_spill_queue
from kit.clock import Clock
from sglang_tiered.integration.cache import small_host
from sglang_tiered.integration.cache.spiller import MAX_RETRIES, RETRY_S, STORES_S_PER_STEP
from sglang_tiered.policy.admission import EvictionOutcome as Left
from sglang_tiered.policy.spill import MAX_HOLD_S
from sglang_tiered.storage.base import Erasure, Reason
from sglang_tiered.storage.promises import ended


class Spilling:
    """A world whose disk takes stores only while it is healthy, and the nodes that were queued."""

    def __init__(self, world: CacheWorld, patch: pytest.MonkeyPatch) -> None:
        self.world, self.cache, self.stores = world, world.cache, world.cache.tiering.stores
        self.clock = self.stores._clock = self.stores.queue._clock = Clock()
        self.is_healthy, self.store_s = True, 0.0
        self.begun: list[int] = []
        begin = self.cache.begin_store

        def note_and_begin(node_id: int, *given: Any) -> Any:
            self.clock.now += self.store_s
            self.begun.append(node_id)
            return begin(node_id, *given)

        patch.setattr(self.cache, "begin_store", note_and_begin)
        takes = property(lambda _: self.is_healthy)
        patch.setattr(type(self.cache.storage), "takes_stores", takes)

    def compute(self, tokens: array[int]) -> int:
        """Returns the node that ends the prompt."""
        if (short := len(tokens) - self.world.allocator.available_size()) > 0:
            self.cache.evict(EvictParams(num_tokens=short))
        self.world.compute(tokens)
        return int(self.world.match(tokens).best_match_node)

    def compute_sick(self, *prompts: array[int]) -> list[int]:
        """Prompts that wait for a disk which then takes stores again."""
        self.is_healthy = False
        nodes = [self.compute(tokens) for tokens in prompts]
        assert not self.begun
        self.is_healthy = True
        return nodes

    def settle(self) -> None:
        """All that can be stored now is."""
        stores, cache = self.stores, self.cache
        self.world.until(lambda: not stores.queue and not cache.ongoing_backup)
        self.world.until(lambda: not stores.queue.has_flights)

    def num_stored(self, tokens: array[int]) -> int:
        return int(self.cache.storage.num_kept(hashes_of(tokens)))

    def evict(self) -> dict[Left, int]:
        """Evict all that may go; why pages have left host memory so far."""
        self.cache.evict(EvictParams(num_tokens=self.world.allocator.size_full))
        while self.cache.tiering.residents.dismiss_one():
            pass
        # SGLang's own eviction, which stops where something is pinned.
        super(type(self.cache), self.cache).evict_host(self.world.num_host_tokens)
        return {why: num for why, num in self.cache.storage.accounting.left.items() if num}


@pytest.fixture
def spilling(world: CacheWorld, monkeypatch: pytest.MonkeyPatch) -> Spilling:
    return Spilling(world, monkeypatch)


def chain(number: int, num_pages: int, shared: int = 0) -> array[int]:
    """Tokens of a prompt whose first ``shared`` pages are the same for all."""
    return prompt(1, shared) + prompt(100 + number, num_pages - shared)


def test_several_ranks_queue_stores_at_once_unpinned(
    spilling: Spilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilling.world.has_ranks(monkeypatch)
    spilling.is_healthy = False
    nodes = [spilling.compute(chain(number, 2)) for number in range(8)]
    assert spilling.begun == nodes
    spilling.settle()
    assert spilling.evict() == {Left.CLEAN: 16}


@pytest.mark.parametrize(("share", "num_begun"), [(1 / 2, 2), (3, 1)])
def test_step_hands_over_no_more_than_its_share(
    spilling: Spilling, share: float, num_begun: int
) -> None:
    """Nor less than one: a store may take longer than a step may."""
    spilling.compute_sick(*(chain(number, 1) for number in range(6)))
    spilling.store_s = share * STORES_S_PER_STEP
    spilling.cache.check_hicache_events()
    assert len(spilling.begun) == num_begun
    spilling.settle()
    assert len(spilling.begun) == 6


def test_node_split_while_waiting_is_stored_whole(spilling: Spilling) -> None:
    prompts = chain(1, 8, shared=4), chain(2, 8, shared=4), chain(3, 3, shared=2)
    spilling.compute_sick(*prompts)
    spilling.settle()
    assert [spilling.num_stored(tokens) for tokens in prompts] == [8, 8, 3]
    assert spilling.evict() == {Left.CLEAN: 8 + 4 + 1}


def test_waiting_node_outlives_clean_ones(spilling: Spilling) -> None:
    spilling.compute(chain(1, 4))
    spilling.settle()
    spilling.is_healthy = False
    spilling.compute(chain(2, 3))
    assert spilling.evict() == {Left.CLEAN: 4}
    while spilling.stores.release_pin():
        pass
    assert spilling.evict() == {Left.CLEAN: 4, Left.LOST_WAITING: 3}
    spilling.is_healthy = True
    spilling.compute(chain(2, 3))  # the same content, another node
    spilling.settle()
    assert spilling.num_stored(chain(2, 3)) == 3


def test_too_many_dirty_nodes_leave_room_to_evict(spilling: Spilling) -> None:
    spilling.is_healthy = False
    for number in range(14):
        spilling.compute(chain(number, 16))
    pinned = spilling.stores._locks.num_tokens
    assert 0 < pinned <= spilling.world.num_host_tokens * 2 / 3
    assert spilling.evict() == {Left.LOST_WAITING: 14 * 16 - pinned // PAGE}
    spilling.is_healthy = True
    spilling.settle()
    assert spilling.evict()[Left.CLEAN] == pinned // PAGE


def test_content_that_comes_back_overtakes_what_never_did(spilling: Spilling) -> None:
    first, second, third, longer = spilling.compute_sick(
        *(chain(number, 2) for number in range(3)),
        chain(1, 2) + prompt(900, 1),  # a next turn
    )
    spilling.settle()
    assert spilling.begun == [second, first, third, longer]


def test_loads_go_first(spilling: Spilling, disk: threading.Event) -> None:
    spilling.world.store(loaded := chain(1, 4))
    spilling.begun.clear()
    disk.clear()
    spilling.world.asks("r", loaded)
    node = spilling.compute(chain(2, 2))
    for _ in range(5):
        spilling.cache.check_hicache_events()
    assert not spilling.begun
    spilling.clock.now += MAX_HOLD_S
    spilling.cache.check_hicache_events()
    assert spilling.begun == [node]


def test_dropped_node_is_offered_to_an_idle_disk(
    spilling: Spilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, tokens = spilling.cache.storage.gate, chain(1, 4)
    with monkeypatch.context() as full:
        full.setattr(gate, "num_admitted", lambda *_: 0)
        full.setattr(type(gate), "takes_everything", False)
        node = spilling.compute(tokens)
        spilling.settle()
        spilling.clock.now += RETRY_S
        spilling.settle()
        assert spilling.begun == [node], "it would be dropped again"
    spilling.world.until(lambda: spilling.num_stored(tokens) == 4)
    assert spilling.begun == [node, node]
    spilling.settle()
    assert spilling.evict() == {Left.CLEAN: 4}


def test_unstorable_node_is_not_offered_for_ever(
    spilling: Spilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spilling.cache.storage.gate, "num_admitted", lambda *_: 0)
    node = spilling.compute(chain(1, 4))
    for _ in range(MAX_RETRIES + 3):
        spilling.settle()
        spilling.clock.now += 1000
        spilling.cache.check_hicache_events()
    assert spilling.begun == [node] * (1 + MAX_RETRIES)


def test_node_with_a_gap_is_offered_again(
    spilling: Spilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may fail for one page of it alone."""
    engine, tokens = spilling.cache.storage.region_engine, chain(1, 4)
    submit = engine.submit_store

    def lose_first(run: Any, **more: Any) -> Any:
        monkeypatch.setattr(engine, "submit_store", submit)
        job = submit(run, **more)
        assert job.wait(60)
        assert engine.erase(Erasure.of(run.keys[:1]), local=ended(True))
        job.reasons[0] = Reason.IO_ERROR
        return job

    monkeypatch.setattr(engine, "submit_store", lose_first)
    spilling.compute(tokens)
    spilling.settle()
    assert spilling.num_stored(tokens) == 0
    spilling.clock.now += RETRY_S
    spilling.world.until(lambda: spilling.num_stored(tokens) == 4)


def test_missing_ancestor_is_stored_before_its_descendant(
    spilling: Spilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(spilling.stores, "offer_node", lambda *_: None)
        nodes = [spilling.compute(chain(1, 4)), spilling.compute(chain(1, 4) + prompt(2, 2))]
    nodes.append(spilling.compute(chain(1, 4) + prompt(2, 2) + prompt(3, 1)))
    spilling.settle()
    assert spilling.begun == nodes
    nodes.append(spilling.compute(chain(1, 4) + prompt(4, 1)))
    spilling.settle()
    assert spilling.begun == nodes


@pytest.mark.parametrize("is_small", [False, True])
def test_detached_tier_leaves_nothing_locked(
    open_world: Callable[..., CacheWorld],
    monkeypatch: pytest.MonkeyPatch,
    hang: threading.Event,
    is_small: bool,
) -> None:
    """SGLang forgets the stores under way without handing on their ends."""
    world = open_world(is_small=is_small)
    spilling = Spilling(world, monkeypatch)
    whole = chain(1, 8)
    for num_pages in (4, 8):
        spilling.compute(whole[: num_pages * PAGE])
    world.until(lambda: world.cache.ongoing_backup)
    spilling.is_healthy = False
    spilling.compute(chain(2, 4))
    hang.set()
    assert world.cache.detach_storage_backend()[0]
    assert world.cache.protected_size() == 0
    world.cache.evict(EvictParams(num_tokens=world.allocator.size_full))
    world.cache.evict_host(world.num_host_tokens)
    host = world.cache.cache_controller.mem_pool_host
    assert host.available_size() == host.logical_size


def test_store_that_ends_amid_a_detach_is_noted(
    spilling: Spilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang takes all ends that are there by then, and a detach may fail behind that."""
    cache = spilling.cache
    acks = cache.cache_controller.ack_backup_queue
    spilling.compute(chain(1, 4))
    spilling.world.until(lambda: cache.ongoing_backup)
    ack, nodes_of_stores = acks.get(timeout=60), small_host.nodes_of_stores

    def late(*args: Any) -> list[int]:
        acks.put(ack)
        return nodes_of_stores(*args)

    with monkeypatch.context() as patched:
        patched.setattr(small_host, "nodes_of_stores", late)
        cache.drain_storage_control_queues_local()
    cache.check_hicache_events()
    assert not cache.ongoing_backup and not spilling.stores.queue.has_flights


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_events_leaves_a_pin(spilling: Spilling, seed: int) -> None:
    source, world, cache = random.Random(seed), spilling.world, spilling.cache
    for _ in range(150):
        match source.randrange(7):
            case 0 | 1:
                num_pages = source.randrange(1, 13)
                shared = min(source.randrange(13), num_pages)
                spilling.compute(chain(source.randrange(6), num_pages, shared))
            case 2:
                cache.check_hicache_events()
            case 3:
                cache.evict_host(3 * PAGE)
            case 4:
                spilling.is_healthy = not spilling.is_healthy
            case 5:
                spilling.stores.release_pin()
            case _ if not cache.ongoing_backup and source.random() < 0.2:
                # SGLang refuses to flush while stores are queued.
                cache.reset()
                world.allocator.clear()
        check_spill_queue(spilling.stores.queue)
        spilling.clock.now += 0.1
    spilling.is_healthy = True
    spilling.settle()
    assert len(spilling.stores._locks) == 0
    spilling.evict()
    host = cache.cache_controller.mem_pool_host
    assert host.available_size() == host.logical_size
    assert cache.storage.accounting.num_dirty == 0

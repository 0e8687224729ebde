"""Host copies that were skipped are made later, and a load waits for room where it gains by it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, prompt
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV

from kit.clock import Clock
from sglang_tiered.integration.cache.host_copies import MAX_COPIES_PER_STEP, HostCopies
from sglang_tiered.integration.cache.loads import Loads, State


class Cache:
    """Nodes of a device tier below 100, and whether host memory has room for copies of them."""

    def __init__(self) -> None:
        self.has_small_host, self.decides_alone, self.has_room = False, True, True
        self.buffer_pipeline = None
        self.backed_up: set[int] = set()
        self.tried: list[int] = []
        self.ongoing_write_through: dict[int, Any] = {}
        self.ongoing_backup: dict[int, tuple[int, None]] = {}
        self.ongoing_prefetch: dict[str, Any] = {}
        self.cache_controller = SimpleNamespace(mem_pool_host=SimpleNamespace(logical_size=100))
        self.tree_core = SimpleNamespace(
            is_backuped=lambda node: self.look_up(node) in self.backed_up,
            build_backup_kv_action=lambda node: SimpleNamespace(node_ids=[node]),
            parts_to_copy=lambda node: [node + 10, node],
            num_tokens=lambda nodes: 20 * len(set(nodes)),
            has_copied_path=lambda node: {*range(1, node + 1)} <= self.backed_up,
            collect_path_info=lambda nodes: [self.path_to(nodes[0])],
        )
        self.locked: list[int] = []

    def path_to(self, last: int) -> list[Any]:
        if last == 99:
            raise KeyError(last)
        return [SimpleNamespace(node_id=node, path_end=21 * node) for node in range(1, last + 1)]

    def inc_host_lock_ref(self, node: int) -> Any:
        self.locked.append(node)
        return SimpleNamespace(to_dec_params=lambda: None)

    def dec_host_lock_ref(self, node: int, _: None) -> None:
        self.locked.remove(node)

    def look_up(self, node: int) -> int:
        if node >= 100:
            raise KeyError(node)
        return node

    def begin_copy(self, action: BackupKV) -> int:
        (node,) = action.node_ids
        self.tried.append(self.look_up(node))
        if self.has_room:
            self.backed_up.add(node)
        return int(self.has_room)


class World(SimpleNamespace):
    """Loads of others take 10 tokens; a request gains by waiting for 3 seconds."""

    def __init__(self) -> None:
        cache: Any = Cache()
        super().__init__(cache=cache, clock=Clock(100.0), waiting=set())
        self.storage = SimpleNamespace(takes_stores=True)
        self.loads: Loads[Any] = Loads()
        self.copies = HostCopies(
            cache,
            self.loads,
            patience_s=lambda request: 3.0,
            waiting_stores=lambda: self.waiting,
            clock=self.clock,
        )

    def in_the_way(self, request: str, num_tokens: int) -> int:
        self.loads.of(request)
        of = self.copies.stores_in_the_way
        return int(of(request, num_tokens, self.storage, num_loading=10))  # type: ignore[arg-type]

    def copies_wait(self) -> bool:
        """Whether a skipped copy is left for the sake of a load."""
        self.cache.tried.clear()
        self.copies.remember(50)
        self.copies.retry()
        self.cache.backed_up.discard(50)
        return not self.cache.tried


@pytest.fixture
def world() -> World:
    return World()


def test_skipped_copies_are_made_when_room_comes(world: World) -> None:
    world.cache.has_room = False
    for node in (1, 2, 100, 3):
        world.copies.remember(node)
    for _ in range(1000):
        world.copies.retry()
    assert 10 < len(world.cache.tried) < 30  # less and less often
    world.cache.has_room = True
    for _ in range(200):
        world.copies.retry()
    assert world.cache.backed_up == {1, 2, 3}
    assert world.copies.num_recovered == 3


@pytest.mark.parametrize("is_small", [True, False])
def test_room_that_stores_leave_is_taken_at_once(world: World, is_small: bool) -> None:
    """A step may be a prefill of many seconds: one copy a step would be too late for a device that
    evicts a prompt in as many. In a large tier each try evicts what is kept."""
    world.cache.has_room = False
    for node in range(MAX_COPIES_PER_STEP):
        world.copies.remember(node)
    for _ in range(1000):
        world.copies.retry()
    world.cache.has_room, world.cache.has_small_host = True, is_small
    world.copies.stores_ended()
    world.cache.has_small_host = False
    world.cache.tried.clear()
    world.copies.retry()
    assert world.cache.backed_up == (set(range(MAX_COPIES_PER_STEP)) if is_small else set())


def test_retry_of_a_copy_is_not_skipped_twice(world: World) -> None:
    world.cache.has_room = False
    assert not world.copies.back_up(9)
    assert world.copies.num_skipped == 0
    world.copies.attempted(9)
    assert world.copies.num_skipped == 1
    world.cache.backed_up.add(9)
    world.copies.attempted(9)
    assert world.copies.num_skipped == 1


def test_part_of_a_long_node_is_tried_again(world: World) -> None:
    world.cache.has_small_host, world.cache.has_room = True, False
    assert not world.copies.back_up(1)
    world.cache.tried.clear()
    world.copies.retry()
    assert world.cache.tried == [21, 11]


def test_node_being_copied_is_told_from_copied_ones(world: World) -> None:
    world.cache.ongoing_write_through[2] = SimpleNamespace(publish_node_ids=[1, 2])
    assert world.copies.is_being_copied(1) and not world.copies.is_being_copied(3)


@pytest.fixture
def small(world: World) -> World:
    """With a small host tier of 100 tokens; nodes have 20."""
    world.cache.has_small_host = True
    world.cache.ongoing_write_through[1] = SimpleNamespace(publish_node_ids=[1])
    world.cache.ongoing_backup[7] = 2, None
    world.waiting.add(3)
    return world


def test_load_waits_until_copies_leave_it_room(small: World) -> None:
    """One that began at once would find no room, and all of its prompt would be computed."""
    assert small.in_the_way("small", 30) == 0  # there is room beside them
    assert small.in_the_way("cold", 0) == 0 and not small.copies_wait()
    assert small.in_the_way("ours", 60) == 30
    assert small.in_the_way("longer than host memory", 1_000) == 60
    assert small.copies_wait()
    small.cache.ongoing_backup.clear()
    small.copies.stores_ended()
    assert small.in_the_way("ours", 60) == 10
    small.waiting.clear()
    small.copies.note_room()
    assert small.in_the_way("ours", 60) == 0


@pytest.mark.parametrize("has_room", [True, False])
def test_no_copy_is_begun_between_two_steps(small: World, has_room: bool) -> None:
    """It would lock on the device what a batch that is made up just then counts on: SGLang's
    scheduler ended with "Prefill out of memory"."""
    cache, copies = small.cache, small.copies
    for _ in range(2):
        cache.has_room = has_room
        cache.backed_up.clear()
        cache.tried.clear()
        assert copies.has_host_path(2) is None and copies.has_host_path(2) is None
        assert not cache.tried and not cache.locked
        copies.make_paths()
        assert cache.tried and not cache.locked
        assert copies.has_host_path(2) is has_room
    copies.has_host_path(99)  # is gone by the next step
    copies.make_paths()
    assert copies.has_host_path(5) is None
    copies.make_paths()
    assert copies.has_host_path(5) is False  # longer than host memory


@pytest.mark.parametrize("why", ["time", "a sick disk", "several ranks"])
def test_load_does_not_wait_for_room_for_ever(small: World, why: str) -> None:
    """A store may hang, or new copies may come as fast as others go."""
    assert small.in_the_way("ours", 60) == 30
    if why == "time":
        small.clock.now += 3.0
    elif why == "a sick disk":
        small.storage.takes_stores = False
    else:
        small.cache.decides_alone = False
    assert small.in_the_way("ours", 60) == 0
    assert small.in_the_way("ours", 1_000) == 0
    if why == "time":
        assert not small.copies_wait()
        assert small.in_the_way("another", 60) == 30


def test_skipped_copies_leave_room_to_the_load(small: World) -> None:
    """The stores' end brings the room, and the load is asked for a step or two later."""
    assert small.in_the_way("ours", 60) == 30
    small.cache.ongoing_backup.clear()
    small.cache.ongoing_write_through.clear()
    small.waiting.clear()
    small.copies.note_room()
    assert small.in_the_way("ours", 60) == 0 and small.copies_wait()
    load = SimpleNamespace(host_indices=None)
    small.cache.ongoing_prefetch["ours"] = SimpleNamespace(operation=load)
    small.loads.move("ours", State.LOADING)
    small.copies.note_room()
    assert small.copies_wait()
    load.host_indices = object()
    small.copies.note_room()
    assert not small.copies_wait()


@pytest.mark.parametrize("end", ["it leaves", "reset", "reset while it waits"])
def test_nothing_is_kept_of_a_load_that_waited(small: World, end: str) -> None:
    assert small.in_the_way("ours", 60) == 30
    if end == "it leaves":
        small.loads.drop("ours")
    else:
        if end == "reset while it waits":
            small.loads.arrives("ours")
        small.loads.clear()
    assert not small.copies_wait()


def test_load_that_needed_no_room_may_wait_later(small: World) -> None:
    """What it brought gave way to others, and it is asked for again."""
    load = SimpleNamespace(operation=SimpleNamespace(host_indices=object()))
    small.cache.ongoing_prefetch["ours"] = load
    small.loads.of("ours")
    small.loads.move("ours", State.LOADING)
    small.copies.note_room()
    assert small.in_the_way("ours", 60) == 30


def test_load_takes_no_device_memory_from_a_batch(open_world: Callable[..., CacheWorld]) -> None:
    """The cache itself: what follows a device prefix without a copy is on NVMe, and is asked for
    while SGLang goes through its queue. What a request was admitted to evict can still be."""
    world, whole = open_world(is_small=True), prompt(1, 8)
    cache = world.cache
    world.store(whole)
    world.compute(whole[: 4 * PAGE])
    world.until(lambda: not cache.ongoing_backup)
    cache.evict_host(world.num_host_tokens)
    evictable = cache.full_evictable_size()
    assert evictable >= 4 * PAGE and not cache.tree_core.full_host_duplicates
    request = world.asks("returns", whole)
    assert cache.full_evictable_size() == evictable and not cache.ongoing_write_through
    world.until(lambda: world.is_retried(request))
    world.asks("returns", whole)
    assert request in cache.ongoing_prefetch

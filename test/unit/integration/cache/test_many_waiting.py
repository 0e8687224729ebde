"""Many requests wait for loads at once: a step looks at a few of them, and at each in its turn."""

from __future__ import annotations

import threading
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, prompt
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from sglang_tiered.integration.cache.load_scheduler import GIVES_WAY_STEPS, MAX_LOOKS_PER_STEP
from sglang_tiered.integration.cache.loads import Turns

NUM_LOADS = 3 * MAX_LOOKS_PER_STEP


@pytest.fixture
def world(world: CacheWorld, disk: threading.Event) -> CacheWorld:
    """Loads of one page that NVMe holds, of a disk that gives nothing until it is set."""
    world.store(*(prompt(number, 1) for number in range(NUM_LOADS)))
    allow(world, 2 * NUM_LOADS)
    disk.clear()
    return world


def allow(world: CacheWorld, num_pages: int) -> None:
    """From now on so much may be under way at once."""
    world.cache.tiering.loads._turns = Turns(num_pages * PAGE)


def ask(world: CacheWorld, name: str, number: int) -> CacheRequestHandle:
    return world.asks(name, prompt(number, 1))


def store_large(world: CacheWorld, disk: threading.Event, num_pages: int) -> array[int]:
    disk.set()
    world.store(large := prompt(900, num_pages))
    disk.clear()
    return large


def landed(
    world: CacheWorld, disk: threading.Event, name: str, tokens: array[int]
) -> CacheRequestHandle:
    """A request whose load has come, and that is not admitted."""
    disk.set()
    request = world.asks(name, tokens)
    world.until(lambda: not world.cache.ongoing_prefetch)
    disk.clear()
    return request


def is_put_off(world: CacheWorld, request: CacheRequestHandle) -> bool:
    return world.cache.tiering.planner.loads.get(request).num_put_off is not None


def ask_all(world: CacheWorld) -> list[Any]:
    requests = [ask(world, f"r{number}", number) for number in range(NUM_LOADS)]
    assert len(world.cache.ongoing_prefetch) == NUM_LOADS
    return requests


def looked_at(world: CacheWorld, requests: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests of which one step asks whether to wait on."""
    seen: list[str] = []
    planner = world.cache.tiering.planner
    with monkeypatch.context() as patch:
        patch.setattr(planner, "should_wait", lambda request, **_: seen.append(request.rid) or True)
        world.cache.check_hicache_events()
        assert not any(world.cache.check_prefetch_progress(request) for request in requests)
    return seen


def test_step_looks_at_few_loads_and_misses_none(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = ask_all(world)
    steps = [looked_at(world, requests, monkeypatch) for _ in range(2 * MAX_LOOKS_PER_STEP)]
    assert all(MAX_LOOKS_PER_STEP <= len(seen) <= 2 * MAX_LOOKS_PER_STEP for seen in steps)
    assert {rid for seen in steps for rid in seen} == {request.rid for request in requests}


def test_all_ranks_look_at_the_same_loads(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has arrived differs between ranks, and a question is a reduction of all of them."""
    requests = ask_all(world)
    loads = world.cache.tiering.loads
    loads.step()
    before = [loads.rests(loads.planner.loads.get(each)) for each in requests]
    for info in world.cache.ongoing_prefetch.values():
        monkeypatch.setattr(info.operation, "completed_tokens", PAGE)
    loads._num_steps -= 1
    loads.step()
    assert [loads.rests(loads.planner.loads.get(each)) for each in requests] == before


def test_memory_that_is_read_into_is_not_free(world: CacheWorld, disk: threading.Event) -> None:
    """Aborted in the queue: no other load may get host pages before their reads have ended."""
    host = world.cache.cache_controller.mem_pool_host
    before = host.available_size()
    requests, loads = ask_all(world), world.cache.tiering.loads
    assert loads.num_tokens() == NUM_LOADS * PAGE
    nvme = world.cache.storage.stack.nvme
    world.until(lambda: nvme.stats().num_inflight_jobs > 1)
    for request in requests:
        world.cache.release_aborted_request(request)
    for _ in range(50):
        world.cache.check_hicache_events()
        assert host.available_size() <= before - nvme.stats().num_inflight_jobs * PAGE
    assert world.cache.has_loads_under_way
    disk.set()
    world.until(lambda: host.available_size() == before and loads.num_tokens() == 0)
    assert not world.cache.has_loads_under_way


def admit(world: CacheWorld, request: Any) -> None:
    world.until(lambda: request not in world.cache.ongoing_prefetch)
    world.cache.pop_prefetch_loaded_span(request)
    world.cache.finish_storage_prefetch_admission(request, PAGE, reason=None)


def pass_of(world: CacheWorld, *requests: Any) -> list[Any]:
    """A pass of the scheduler over these; return those that it could admit."""
    world.cache.check_hicache_events()
    return [each for each in requests if world.cache.load_has_ended(each)]


@pytest.mark.parametrize("waits_for_room", [True, False])
def test_wait_ends_when_computing_would(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch, *, waits_for_room: bool
) -> None:
    """The load before it hangs; or the disk always seems to be nearly there."""
    now = [0.0]
    monkeypatch.setattr(world.cache.tiering.planner.loads, "_clock", lambda: now[0])
    if waits_for_room:
        allow(world, 1)
        ask(world, "first", 0)
    waiting = ask(world, "waiting", 1)
    for now[0] in (0.0, 0.9 * PAGE):  # computing takes a second per token
        assert not pass_of(world, waiting)
    now[0] = 1.3 * (PAGE + 1)
    assert pass_of(world, waiting) == [waiting]


def test_no_small_load_behind_passes_a_large_one(world: CacheWorld, disk: threading.Event) -> None:
    """Or it would find no room for as long as small ones come."""
    allow(world, 3)
    large = store_large(world, disk, 3)
    first = ask(world, "first", 0)
    waiting = [world.asks("large", large)]
    for number in range(1, 4):
        waiting.append(ask(world, f"small{number}", number))
        for _ in range(4):
            assert not pass_of(world, *waiting)
            assert not any(map(world.is_retried, waiting))
    disk.set()
    admit(world, first)
    assert not pass_of(world, *waiting)
    assert [world.is_retried(each) for each in waiting] == [True, False, False, False]


def test_loads_that_nobody_can_admit_give_way(
    world: CacheWorld, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their requests wait for an adapter's slot, say, and are not looked at."""
    notes = world.cache.tiering.notes
    monkeypatch.setattr(notes, "_is_kept", True)
    allow(world, 2)
    stuck = [landed(world, disk, f"stuck{number}", prompt(number, 1)) for number in range(2)]
    disk.set()
    waiting = ask(world, "waiting", 2)
    for _ in range(2 * GIVES_WAY_STEPS):
        assert not pass_of(world, waiting)
    assert world.is_retried(waiting)
    assert waiting == ask(world, "waiting", 2)
    admit(world, waiting)
    # Now a slot is free for it, and it finds its prefix in memory or loads it again.
    [gave_way] = [each for each in stuck if is_put_off(world, each)]
    assert notes._stories[gave_way].waits_for == "window", "its log says what it waits for"
    assert not pass_of(world, gave_way)
    assert not pass_of(world, gave_way) and world.is_retried(gave_way)
    tokens = prompt(stuck.index(gave_way), 1)
    world.asks(gave_way.rid, tokens)
    world.until(lambda: world.cache.load_has_ended(gave_way))
    assert world.match(tokens).host_hit_length == PAGE


def test_load_with_no_attempt_left_waits_for_none(world: CacheWorld) -> None:
    """SGLang attempts it no more, so its turn would never come."""
    allow(world, 1)
    ask(world, "first", 0)
    spent = CacheRequestHandle("spent", 0)
    req: Any = SimpleNamespace(cache_request_handle=spent, storage_prefetch_retry_attempts=8)
    world.cache.tiering.loads.comes(req, 8)
    assert world.cache.load_has_ended(ask(world, "spent", 1))


def test_request_elsewhere_holds_no_other_up(world: CacheWorld, disk: threading.Event) -> None:
    """It was put off, and now waits for a decode server, where SGLang attempts nothing."""
    allow(world, 3)
    large = store_large(world, disk, 3)
    first = ask(world, "first", 0)
    world.asks("elsewhere", large)
    behind = ask(world, "behind", 1)
    disk.set()
    admit(world, first)
    world.until(lambda: world.is_retried(behind))

"""Which loads begin and which requests wait for one, over SGLang's own tree and a real store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from cache_world import PAGE, CacheWorld, cache_world, prompt

from sglang_tiered.integration.load_scheduling import MAX_ASKS_PER_STEP

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RETURNING, SHORT, COLD = prompt(1, 16), prompt(2, 1), prompt(3, 4)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheWorld]:
    """A window of 4 pages, and NVMe that holds two prompts, one of them longer than the window."""
    with cache_world(tmp_path / "kv", monkeypatch) as world:
        world.store(RETURNING, SHORT)
        world.cache.begin_loading(4 * PAGE)
        yield world


def overfill(world: CacheWorld) -> None:
    """A load longer than the window is begun, once the ranks have agreed on it."""
    returning = world.asks("returning", RETURNING)
    world.cache.check_hicache_events()
    assert not world.cache.load_has_ended(returning) and world.is_retried(returning)
    world.asks("returning", RETURNING)
    assert returning in world.cache.ongoing_prefetch


def put_off(world: CacheWorld, name: str) -> Any:
    """A request whose load finds the window full, on all ranks."""
    world.asks(name, SHORT)
    world.cache.check_hicache_events()
    request = world.asks(name, SHORT)
    assert world.cache._window.num_tokens(name) == PAGE
    return request


def test_a_cold_request_does_not_wait_for_a_load_that_overfills_the_window(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.has_ranks(monkeypatch)
    overfill(world)
    cold = world.asks("cold", COLD)
    world.cache.check_hicache_events()
    world.cache.load_has_ended(cold)
    assert world.is_retried(cold)
    assert world.cache.load_has_ended(world.asks("cold", COLD))


def test_a_cold_request_does_not_wait_behind_many_that_wait_for_their_turn(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.has_ranks(monkeypatch)
    overfill(world)
    waiting = [put_off(world, f"r{number}") for number in range(MAX_ASKS_PER_STEP)]
    cold = world.asks("cold", COLD)
    world.cache.check_hicache_events()
    assert not any(world.cache.load_has_ended(request) for request in [*waiting, cold])
    assert world.is_retried(cold)


@pytest.mark.parametrize("whose", ["this rank", "another rank"])
def test_a_put_off_load_that_gains_no_more_on_one_rank_is_given_up_by_all(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    gains = {"this rank": True, "another rank": True}
    world.has_ranks(monkeypatch, lambda question: 1 << 40 if gains["another rank"] else 0)
    planner = world.cache._planner
    monkeypatch.setattr(planner, "gains_by_its_turn", lambda *_, **__: gains["this rank"])
    overfill(world)
    request = put_off(world, "late")

    def waits() -> bool:
        """In a step of its own, as the ranks answer each other from one to the next."""
        world.cache.check_hicache_events()
        return not world.cache.load_has_ended(request)

    assert all(waits() for _ in range(4))
    gains[whose] = False
    num_steps = 0
    while waits():
        num_steps += 1
        assert num_steps <= 3

"""Dirty nodes go to the disk in order of value, no faster than it takes them."""

from __future__ import annotations

import pytest

from kit.clock import Clock
from sglang_tiered.policy.spill import (
    HIGH_SHARE,
    LOW_SHARE,
    MAX_HOLD_S,
    MAX_SHARE,
    MIN_SHARE,
    TARGET_WAIT_S,
    NodeStore,
    SpillQueue,
)

HOST = 64_000
FLOOR = int(HOST * MIN_SHARE)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> SpillQueue[str]:
    return SpillQueue(HOST, clock)


def store(node: str, num_tokens: int) -> NodeStore[str]:
    return NodeStore(node, 100, 100 + num_tokens)


def take(queue: SpillQueue[str], *, loads_wait: bool = False) -> str | None:
    taken = queue.take_next_node(loads_wait=loads_wait)
    return None if taken is None else taken.node


@pytest.mark.parametrize(("size", "num_begun"), [(HOST, 2), (HOST // 2, 2), (FLOOR // 3, 3)])
def test_no_more_is_in_flight_than_the_limit(
    queue: SpillQueue[str], size: int, num_begun: int
) -> None:
    """An idle disk takes the largest node at once; a slow one has a store to follow."""
    for node in "abcd":
        queue.add_node(store(node, size), returned=False)
    for number, node in enumerate("abcd"[:num_begun]):
        assert take(queue) == node
        queue.note_flight(number, store(node, size))
    assert queue.take_next_node(loads_wait=False) is None
    assert queue.flight_tokens == num_begun * size
    assert queue.end_flight(num_begun) is None
    assert queue.end_flight(0) == store("a", size)
    assert take(queue) == "abcd"[num_begun]
    assert queue.flight_tokens == (num_begun - 1) * size


def test_limit_doubles_when_dry_and_halves_when_late(queue: SpillQueue[str], clock: Clock) -> None:
    queue.add_node(store("waits", 10), returned=False)
    for _ in range(20):
        queue.adapt_limit(0.0)
    assert queue.limit_tokens == HOST * MAX_SHARE
    queue.adapt_limit(TARGET_WAIT_S * 1.01)
    queue.adapt_limit(TARGET_WAIT_S * 1.01)  # still about the same stores
    assert queue.limit_tokens == HOST * MAX_SHARE / 2
    for _ in range(20):
        clock.now += TARGET_WAIT_S
        queue.adapt_limit(TARGET_WAIT_S * 1.01)
    assert queue.limit_tokens == HOST * MIN_SHARE


def test_stores_hold_for_loads_but_not_for_ever(queue: SpillQueue[str], clock: Clock) -> None:
    queue.add_node(store("a", 10), returned=False)
    queue.add_node(store("b", 10), returned=True)
    clock.now = MAX_HOLD_S * 0.99
    assert queue.take_next_node(loads_wait=True) is None
    clock.now = MAX_HOLD_S
    assert take(queue, loads_wait=True) == "b"
    queue.note_flight(1, store("begun", 10))
    assert queue.take_next_node(loads_wait=True) is None  # one at a time
    queue.end_flight(1)
    assert take(queue, loads_wait=True) == "a"


@pytest.mark.parametrize(("share", "num_taken"), [(LOW_SHARE, 0), (HIGH_SHARE, 1), (0.5, 3)])
def test_watermarks_decide_how_fast_stores_go_beside_loads(
    queue: SpillQueue[str], clock: Clock, share: float, num_taken: int
) -> None:
    size = FLOOR // 3
    for number in range(int(HOST * share) // size):
        queue.add_node(store(f"{number}", size), returned=False)
    taken = 0
    while queue.take_next_node(loads_wait=True) is not None:
        queue.note_flight(taken, store(f"{taken}", size))
        taken += 1
    assert taken == num_taken

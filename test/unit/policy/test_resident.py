"""The resident set keeps a part of the host tier out of a rotation larger than the tier."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.policy.resident import MAX_IDLE_TURNOVERS, ResidentSet


def make_set(capacity: int = 300, tier: int = 1000) -> ResidentSet[int]:
    return ResidentSet(capacity=capacity, tier_tokens=tier)


def test_set_fills_in_order_and_then_refuses() -> None:
    residents = make_set()
    assert residents.offer(1, 200)
    assert not residents.offer(1, 200)
    assert not residents.offer(2, 200)
    assert residents.offer(3, 100)
    assert 1 in residents and 2 not in residents
    assert residents.num_tokens == 300


def test_unused_resident_leaves_after_many_turnovers() -> None:
    residents = make_set()
    residents.offer(1, 100)
    residents.offer(2, 100)
    assert residents.evicted(MAX_IDLE_TURNOVERS * 1000) == []
    residents.use(1)
    assert residents.evicted(1) == [2]
    assert 1 in residents and residents.num_tokens == 100


def test_pressure_dismisses_the_least_recently_used() -> None:
    residents = make_set()
    for chain in (1, 2, 3):
        residents.offer(chain, 100)
    residents.use(1)
    assert [residents.give_up() for _ in range(4)] == [2, 3, 1, None]
    residents.check_integrity()


def test_clear_makes_room_again() -> None:
    residents = make_set()
    residents.offer(1, 300)
    residents.clear()
    assert residents.offer(2, 300)


@pytest.mark.parametrize(("capacity", "tier"), [(0, 10), (-1, 10), (11, 10)])
def test_impossible_share_is_refused(capacity: int, tier: int) -> None:
    with pytest.raises(ValueError, match="resident set"):
        ResidentSet(capacity=capacity, tier_tokens=tier)


def simulate_rotation(num_chains: int, tier_chains: int, *, with_residents: bool) -> int:
    """Hits of three rounds over chains of equal size in a least-recently-used tier."""
    size = 100
    residents = ResidentSet[int](capacity=tier_chains * size // 3, tier_tokens=tier_chains * size)
    tier: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for _ in range(3):
        for chain in range(num_chains):
            if chain in tier:
                hits += 1
                tier.move_to_end(chain)
                residents.use(chain)
                continue
            while len(tier) >= tier_chains:
                victim = next(c for c in tier if not with_residents or c not in residents)
                del tier[victim]
                residents.evicted(size)
            tier[chain] = None
            residents.offer(chain, size)
    return hits


def test_rotation_larger_than_the_tier_still_hits() -> None:
    assert simulate_rotation(48, 9, with_residents=False) == 0
    assert simulate_rotation(48, 9, with_residents=True) == 2 * 3


@given(
    st.lists(
        st.tuples(st.sampled_from(["offer", "use", "evict", "give_up"]), st.integers(0, 20)),
        max_size=60,
    )
)
def test_books_balance_whatever_happens(operations: list[tuple[str, int]]) -> None:
    residents = make_set()
    for operation, number in operations:
        if operation == "offer":
            residents.offer(number, number * 10)
        elif operation == "use":
            residents.use(number)
        elif operation == "evict":
            residents.evicted(number * 1000)
        else:
            residents.give_up()
        residents.check_integrity()

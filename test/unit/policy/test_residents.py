"""The resident set keeps a part of the host tier out of a rotation larger than the tier."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.policy import residents as resident
from sglang_tiered.policy.residents import NEW_CHAINS_PER_TRIAL, ChainOffer, ResidentSet


def test_set_fills_in_order_and_then_refuses() -> None:
    residents = ResidentSet[int](300)
    assert residents.offer_chain(1, 200) == ChainOffer(True, [])
    assert residents.offer_chain(2, 200) == ChainOffer(False, [])
    assert residents.offer_chain(3, 100) == ChainOffer(True, [])
    assert residents.offer_chain(4, 301) == ChainOffer(False, [])
    assert 1 in residents and 2 not in residents
    assert residents.num_tokens == 300


def test_returning_chain_replaces_one_that_idled_longer() -> None:
    residents = ResidentSet[str](100)
    residents.offer_chain("dead", 100)
    residents.note_eviction(50)
    residents.offer_chain("returning", 100)
    residents.note_eviction(500)
    assert residents.offer_chain("returning", 100) == ChainOffer(True, ["dead"])


def test_resident_before_its_turn_stays() -> None:
    residents = ResidentSet[str](100)
    residents.offer_chain("early", 200)
    residents.note_eviction(50)
    residents.offer_chain("resident", 100)
    residents.note_eviction(500)
    assert residents.offer_chain("early", 90) == ChainOffer(False, [])
    assert "resident" in residents


def test_stream_of_new_chains_replaces_unused_ones() -> None:
    residents = ResidentSet[int](100)
    residents.offer_chain(0, 100)
    offers = [residents.offer_chain(chain, 100) for chain in range(1, NEW_CHAINS_PER_TRIAL + 1)]
    assert [offer.accepted for offer in offers] == [False] * (NEW_CHAINS_PER_TRIAL - 1) + [True]
    assert offers[-1].dismissed == [0]


def test_stream_of_new_chains_replaces_nothing_used() -> None:
    residents = ResidentSet[int](100)
    residents.offer_chain(0, 100)
    residents.offer_chain(0, 100)
    assert not any(residents.offer_chain(chain, 100).accepted for chain in range(1, 100))


def test_pressure_dismisses_the_least_recently_used() -> None:
    residents = ResidentSet[int](300)
    for chain in (1, 2, 3, 1):
        residents.offer_chain(chain, 100)
    assert [residents.evict_chain() for _ in range(4)] == [2, 3, 1, None]
    residents.check_integrity()


def test_chain_to_compute_outlives_one_to_load() -> None:
    residents = ResidentSet[str](200)
    residents.offer_chain("computed", 100, cost=9.0)
    residents.note_eviction(100)
    residents.offer_chain("loaded", 100, cost=1.0)
    residents.note_eviction(100)
    assert [residents.evict_chain(), residents.evict_chain()] == ["loaded", "computed"]


def test_costly_resident_goes_after_long_idleness() -> None:
    residents = ResidentSet[str](200)
    residents.offer_chain("computed", 100, cost=3.0)
    residents.note_eviction(300)
    residents.offer_chain("loaded", 100, cost=1.0)
    residents.note_eviction(100)  # idle for 400 and 100: worth 3 / 400 and 1 / 100
    assert residents.evict_chain() == "computed"


@pytest.mark.parametrize(("cost", "accepted"), [(1.0, False), (2.0, True)])
def test_costly_chain_replaces_a_cheaper_later_one(cost: float, accepted: bool) -> None:
    residents = ResidentSet[str](100)
    residents.offer_chain("returning", 200)  # too large for now; its last use is remembered
    residents.note_eviction(30)
    residents.offer_chain("cheap", 100, cost=1.0)
    residents.note_eviction(60)  # away for 90, idle for 60
    assert residents.offer_chain("returning", 100, cost=cost).accepted is accepted


@pytest.mark.parametrize("by_use", [False, True])
def test_resident_that_reached_the_disk_is_cheap(by_use: bool) -> None:
    residents = ResidentSet[str](200)
    residents.offer_chain("a", 100, cost=9.0)
    residents.offer_chain("b", 100, cost=2.0)
    if by_use:
        residents.offer_chain("a", 100, cost=1.0)
    else:
        residents.price_chain("a", 1.0)
        residents.price_chain("unknown", 1.0)
    residents.note_eviction(100)
    assert residents.evict_chain() == "a"


def test_clear_makes_room_again() -> None:
    residents = ResidentSet[int](300)
    residents.offer_chain(1, 300)
    residents.clear()
    assert residents.offer_chain(2, 300).accepted


def test_memory_of_past_chains_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "MAX_REMEMBERED", 10)
    residents = ResidentSet[int](1)
    for chain in range(1000):
        residents.offer_chain(chain, 5)
    assert len(residents._last_used) == 10


def test_tokens_of_a_growing_conversation_count_once() -> None:
    residents = ResidentSet[str](300)
    assert residents.offer_chain("turn 1", 100).accepted
    assert residents.offer_chain("turn 2", 200, beginnings=["turn 1"]) == (True, ["turn 1"])
    assert residents.offer_chain("turn 3", 300, beginnings=["turn 1", "turn 2"]).accepted
    assert residents.num_tokens == 300
    assert not residents.offer_chain("turn 2", 200, beginnings=["turn 1"]).accepted
    assert residents.num_tokens == 300
    residents.check_integrity()
    assert residents.evict_chain() == "turn 3"
    assert residents.offer_chain("turn 2", 200, beginnings=["turn 1"]).accepted


def test_conversation_too_long_keeps_its_beginning() -> None:
    residents = ResidentSet[str](200)
    assert residents.offer_chain("turn 1", 100).accepted
    assert residents.offer_chain("turn 2", 201, beginnings=["turn 1"]) == (False, [])
    assert residents.offer_chain("other", 100).accepted
    assert residents.offer_chain("turn 2", 150, beginnings=["turn 1"]) == (False, [])
    assert "turn 1" in residents and "other" in residents


def test_set_without_capacity_keeps_nothing() -> None:
    residents: ResidentSet[str] = ResidentSet(0)
    assert residents.offer_chain("a", 1) == (False, [])
    assert residents.evict_chain() is None
    with pytest.raises(ValueError, match="cannot keep"):
        ResidentSet(-1)


def simulate(rounds: list[range], tier_chains: int, *, with_residents: bool) -> list[int]:
    """Hits of each round over chains of equal size in a least-recently-used tier."""
    size = 100
    residents = ResidentSet[int](tier_chains * size // 3)
    pinned: set[int] = set()
    tier: OrderedDict[int, None] = OrderedDict()
    hits = []
    for chains in rounds:
        hits.append(0)
        for chain in chains:
            if chain in tier:
                hits[-1] += 1
                tier.move_to_end(chain)
            else:
                while len(tier) >= tier_chains:
                    del tier[next(c for c in tier if c not in pinned)]
                    residents.note_eviction(size)
                tier[chain] = None
            if with_residents:
                offer = residents.offer_chain(chain, size)
                pinned -= set(offer.dismissed)
                if offer.accepted:
                    pinned.add(chain)
            residents.check_integrity()
    return hits


def test_rotation_larger_than_the_tier_still_hits() -> None:
    rounds = [range(48)] * 4
    assert simulate(rounds, 9, with_residents=False) == [0, 0, 0, 0]
    with_residents = simulate(rounds, 9, with_residents=True)
    assert with_residents[0] == 0 and all(hits == 3 for hits in with_residents[1:])


def test_dead_chains_leave_room_to_the_next_rotation() -> None:
    rounds = [range(1000, 1016), *[range(48)] * 3]
    hits = simulate(rounds, 9, with_residents=True)
    assert hits[:2] == [0, 0] and hits[2] >= 2 and hits[3] >= 3


def test_tier_that_holds_everything_is_not_made_worse() -> None:
    assert simulate([range(9)] * 3, 9, with_residents=True) == [0, 9, 9]


@given(
    st.lists(
        st.tuples(st.sampled_from(["offer", "evict", "give_up"]), st.integers(0, 20)),
        max_size=80,
    )
)
def test_books_balance_whatever_happens(operations: list[tuple[str, int]]) -> None:
    residents = ResidentSet[int](300)
    pinned: set[int] = set()
    for operation, number in operations:
        if operation == "offer":
            below = range(number - number % 5, number)  # four conversations that grow
            offer = residents.offer_chain(
                number, number * 10 + 1, cost=1.0 + number % 3, beginnings=below
            )
            pinned -= set(offer.dismissed)
            if offer.accepted:
                pinned.add(number)
        elif operation == "evict":
            residents.note_eviction(number * 1000)
        else:
            pinned.discard(residents.evict_chain() or -1)
            pinned -= {chain for chain in pinned if chain not in residents}
        residents.check_integrity()
        assert pinned == {chain for chain in range(21) if chain in residents}

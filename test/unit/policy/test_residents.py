"""The resident set keeps a part of the host tier out of a rotation larger than the tier."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.policy import residents as resident
from sglang_tiered.policy.residents import NEW_CHAINS_PER_TRIAL, ChainOffer, ResidentSet


def play(capacity: int, *steps: int | tuple[Any, ...]) -> tuple[ResidentSet[str], ChainOffer]:
    """What is offered: name, tokens and cost; or so many tokens are evicted. The last answer."""
    residents, answer = ResidentSet[str](capacity), ChainOffer(False, [])
    for step in steps:
        if isinstance(step, int):
            residents.note_eviction(step)
        else:
            chain, num_tokens, *cost = step
            answer = residents.offer_chain(chain, num_tokens, **({"cost": cost[0]} if cost else {}))
    return residents, answer


NOBODY, GONE_90 = (False, []), [("a", 200), 30, ("b", 100, 1.0), 60]
"""Away for 90, which is remembered though it was too large; the other idled for 60."""
WORTH = {
    "longer": ([("a", 100), 50, ("b", 100), 500, ("b", 100)], (True, ["a"])),
    "before its turn": ([("a", 200), 50, ("b", 100), 500, ("a", 90)], NOBODY),
    "as cheap": ([*GONE_90, ("a", 100, 1.0)], NOBODY),
    "costlier": ([*GONE_90, ("a", 100, 2.0)], (True, ["b"])),
}


@pytest.mark.parametrize(("steps", "answer"), WORTH.values(), ids=WORTH)
def test_resident_goes_if_another_is_worth_more(steps: list[Any], answer: ChainOffer) -> None:
    assert play(100, *steps)[1] == answer


PRESSED = {
    "used last stays": ([("a", 70), ("b", 70), ("c", 60), ("a", 70)], ["b", "c", "a", None]),
    "a load goes before computing": ([("a", 100, 9.0), 100, ("b", 100, 1.0), 100], ["b", "a"]),
    # Idle for 400 and 100: worth 3 / 400 and 1 / 100.
    "but not for ever": ([("a", 100, 3.0), 300, ("b", 100, 1.0), 100], ["a"]),
    "reached the disk": ([("a", 100, 9.0), ("b", 100, 2.0), ("a", 100, 1.0), 100], ["a"]),
}


@pytest.mark.parametrize(("steps", "gone"), PRESSED.values(), ids=PRESSED)
def test_pressure_dismisses_what_is_worth_least(steps: list[Any], gone: list[str | None]) -> None:
    residents, _ = play(200, *steps)
    assert [residents.evict_chain() for _ in gone] == gone
    residents.check_integrity()


def test_stream_of_new_chains_replaces_unused_ones() -> None:
    residents = ResidentSet[int](100)
    residents.offer_chain(0, 100)
    offers = [residents.offer_chain(chain, 100) for chain in range(1, NEW_CHAINS_PER_TRIAL + 1)]
    assert [offer.accepted for offer in offers] == [False] * (NEW_CHAINS_PER_TRIAL - 1) + [True]
    assert offers[-1].dismissed == [0]


def test_memory_of_past_chains_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "MAX_REMEMBERED", 10)
    residents = ResidentSet[int](1)
    for chain in range(1000):
        residents.offer_chain(chain, 5)
    assert len(residents._last_used) == 10


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


@given(
    st.lists(
        st.tuples(st.sampled_from(["offer", "evict", "give_up", "clear"]), st.integers(0, 20)),
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
        elif operation == "clear":
            residents.clear()
            pinned.clear()
        else:
            pinned.discard(residents.evict_chain() or -1)
            pinned -= {chain for chain in pinned if chain not in residents}
        residents.check_integrity()
        assert pinned == {chain for chain in range(21) if chain in residents}

"""Who takes how much of the NVMe that servers share."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_tiered.policy.shares import StoreShare, grant, recall

TOTAL = 100


def member(cap: int, *, floor: int = 10, **more: Any) -> StoreShare:
    return StoreShare(
        floor_bytes=floor, cap_bytes=cap, **{"due_bytes": cap, "held_bytes": cap, **more}
    )


def test_floors_are_lent_to_nobody() -> None:
    members = {"a": member(80, wants_bytes=50, coldest_s=0.0), "b": member(0, held_bytes=0)}
    assert grant(TOTAL, members, "a") == 10
    members["b"] = member(12)
    assert grant(TOTAL, members, "a") == 8
    assert recall(TOTAL, members, "a") == {"b": 10}


TAKER = member(50, wants_bytes=8, coldest_s=1.0)
SMALL = member(20, wants_bytes=15, coldest_s=1.0)
WARM = member(40, wants_bytes=1, coldest_s=50.0)
COLD = member(40, wants_bytes=1, coldest_s=90.0)
UNUSED = member(50, held_bytes=30, coldest_s=0.0)
ASKED = {
    "an unused part goes however recently used": ([TAKER, UNUSED], {1: 42}),
    "a closed store gives before a live one": (
        [TAKER, member(25, coldest_s=90.0), member(25, is_live=False)],
        {2: 17},
    ),
    "the coldest gives first": ([SMALL, WARM, COLD], {2: 25}),
    "and no more than it can": ([SMALL, WARM, COLD._replace(keeps_bytes=36)], {2: 36, 1: 29}),
    "what is on its way is asked once": ([TAKER, member(50, due_bytes=42, coldest_s=90.0)], {}),
}


@pytest.mark.parametrize(("members", "asked"), ASKED.values(), ids=ASKED)
def test_what_lacks_is_asked_of_the_coldest(
    members: list[StoreShare], asked: dict[int, int]
) -> None:
    assert recall(TOTAL, dict(enumerate(members)), 0) == asked


def test_two_that_are_equally_busy_do_not_trade() -> None:
    busy = member(50, wants_bytes=4, coldest_s=20.0)
    members = {"a": busy, "b": busy._replace(coldest_s=25.0)}
    assert recall(TOTAL, members, "a") == recall(TOTAL, members, "b") == {}
    members["b"] = busy._replace(coldest_s=40.0)
    assert recall(TOTAL, members, "a") == {"b": 46}
    assert recall(TOTAL, members, "b") == {}


def test_a_lender_leaves_what_it_gave() -> None:
    """Or it would have it back before the taker looks."""
    members = {"a": TAKER, "b": member(42, wants_bytes=8, coldest_s=90.0)}
    assert grant(TOTAL, members, "b") == 0
    assert grant(TOTAL, members, "a") == 8


def test_a_newcomer_gets_its_floor_from_whoever() -> None:
    members = {
        "new": member(0, held_bytes=0, floor=30, coldest_s=1e9),
        "b": member(60, coldest_s=0.0, wants_bytes=9),
        "c": member(40, coldest_s=5.0, wants_bytes=9),
    }
    assert grant(TOTAL, members, "b") == 0
    assert recall(TOTAL, members, "new") == {"c": 10}
    members["c"] = member(10)
    assert grant(TOTAL, members, "new") == 30

"""Who takes how much: of the host tier, of which running requests are left a share however large
it is, and of the NVMe that servers share."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.policy.shares import HostBudget, StoreShare, grant, recall

# ---- The host tier ----


TOKENS = st.integers(1, 1 << 40)


@given(TOKENS, TOKENS)
def test_loads_and_residents_leave_running_requests_a_sixth(host: int, device: int) -> None:
    budget = HostBudget(host, device)
    taken = budget.loading_tokens + budget.resident_tokens
    assert taken <= max(2, budget.own_tokens * 5 / 6 + 1)
    assert budget.pinned_tokens <= budget.own_tokens / 6 + 1


def test_pins_take_what_loads_leave_of_theirs() -> None:
    budget = HostBudget(host_tokens=1200, device_tokens=600)
    assert budget.own_tokens == 600
    assert budget.pinned_tokens == pytest.approx(100)
    assert [budget.unused_by_loads(loading) for loading in (0, 100, 500)] == [300.0, 200.0, 0.0]


def test_device_larger_than_host_leaves_shares() -> None:
    assert HostBudget(host_tokens=1000, device_tokens=5000).own_tokens == 250


def test_small_tier_keeps_no_residents_and_shares_everything() -> None:
    budget = HostBudget(host_tokens=1000, device_tokens=5000, is_small=True)
    assert (budget.own_tokens, budget.loading_tokens, budget.resident_tokens) == (1000, 500, 0)


# ---- NVMe ----


TOTAL = 100


def member(cap: int, *, floor: int = 10, **more: Any) -> StoreShare:
    return StoreShare(
        floor_bytes=floor, cap_bytes=cap, **{"due_bytes": cap, "held_bytes": cap, **more}
    )


TAKER = member(50, wants_bytes=8, coldest_s=1.0)
GIVER = member(42, wants_bytes=8, coldest_s=90.0)
SMALL = member(20, wants_bytes=15, coldest_s=1.0)
WARM = member(40, wants_bytes=1, coldest_s=50.0)
COLD = member(40, wants_bytes=1, coldest_s=90.0)
BUSY, AS_BUSY, LESS_BUSY = (member(50, wants_bytes=4, coldest_s=s) for s in (20.0, 25.0, 40.0))
LARGE = member(80, wants_bytes=50, coldest_s=0.0)
NEW = member(0, held_bytes=0, floor=30, coldest_s=1e9)
B, C = member(60, coldest_s=0.0, wants_bytes=9), member(40, coldest_s=5.0, wants_bytes=9)
SHARED: dict[str, tuple[list[StoreShare], int, dict[int, int]]] = {
    "a floor is lent to nobody": ([LARGE, member(0, held_bytes=0)], 10, {}),
    "what is above one is asked for": ([LARGE, member(12)], 8, {1: 10}),
    "an unused part goes however recently used": (
        [TAKER, member(50, held_bytes=30, coldest_s=0.0)],
        *(0, {1: 42}),
    ),
    "a closed store gives before a live one": (
        [TAKER, member(25, coldest_s=90.0), member(25, is_live=False)],
        *(0, {2: 17}),
    ),
    "the coldest gives first": ([SMALL, WARM, COLD], 0, {2: 25}),
    "and no more than it can": ([SMALL, WARM, COLD._replace(keeps_bytes=36)], 0, {2: 36, 1: 29}),
    "what is on its way is asked once": (
        [TAKER, member(50, due_bytes=42, coldest_s=90.0)],
        *(0, {}),
    ),
    "two that are as busy do not trade": ([BUSY, AS_BUSY], 0, {}),
    "nor the other way": ([AS_BUSY, BUSY], 0, {}),
    "but one that is less busy gives": ([BUSY, LESS_BUSY], 0, {1: 46}),
    "and takes nothing": ([LESS_BUSY, BUSY], 0, {}),
    # Or it would have it back before the taker looks.
    "a lender leaves what it gave": ([GIVER, TAKER], 0, {}),
    "which is the taker's": ([TAKER, GIVER], 8, {}),
    "a newcomer asks whoever for its floor": ([NEW, B, C], 0, {2: 10}),
    "which nobody else takes": ([B, NEW, C._replace(cap_bytes=10, due_bytes=10)], 0, {}),
    "and gets it": ([NEW, B, C._replace(cap_bytes=10, due_bytes=10)], 30, {}),
}


@pytest.mark.parametrize(("members", "granted", "asked"), SHARED.values(), ids=SHARED)
def test_free_is_granted_and_lacking_is_asked(
    members: list[StoreShare], granted: int, asked: dict[int, int]
) -> None:
    named = {str(number): one for number, one in enumerate(members)}
    assert grant(TOTAL, named, "0") == granted
    assert recall(TOTAL, named, "0") == {str(number): due for number, due in asked.items()}

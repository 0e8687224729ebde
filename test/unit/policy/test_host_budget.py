"""Shares of the host tier: what running requests are left, however large or small the tier is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.policy.shares import HostBudget

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

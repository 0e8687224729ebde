"""Budgets bound what is spent, and come back with time."""

from __future__ import annotations

import pytest

from kit.clock import Clock
from sglang_tiered.storage.object.budgets import DailyBudget, RequestCost, RetryBudget


def test_a_failing_store_gets_few_retries() -> None:
    budget = RetryBudget()
    assert sum(budget.take() for _ in range(1000)) == 10
    for _ in range(31):
        budget.earn()
    assert sum(budget.take() for _ in range(1000)) == 3


def test_a_day_never_sees_more_than_its_budget() -> None:
    clock = Clock(1000.0)
    budget = DailyBudget(86_400, clock)
    spent = 0
    for _ in range(24 * 60):
        clock.now += 60
        while budget.available >= 100:
            budget.spend(100)
            spent += 100
    assert 0.9 * 86_400 <= spent <= 86_400


def test_what_was_overspent_flows_in_first() -> None:
    clock = Clock(1000.0)
    budget = DailyBudget(1000, clock)
    budget.spend(1000)
    assert budget.available == pytest.approx(-900)
    clock.now += 86_400
    assert budget.available == pytest.approx(0)
    assert DailyBudget(None, clock).available == float("inf")


def test_the_gap_is_what_a_request_costs() -> None:
    cost = RequestCost(1 << 20)
    assert cost.gap_bytes == 1 << 20
    for _ in range(50):
        cost.observe(1000, 0.02)
        cost.observe(2_000_000, 0.04)  # 100 MB/s beside the latency
    assert 1_900_000 < cost.gap_bytes < 2_100_000
    for _ in range(100):
        cost.observe(1000, 1e-6)
    assert cost.gap_bytes == 16 << 10

"""A server forgets so many pages in an hour, and says when it will forget more."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from sglang_tiered.budgets import WINDOW_S, ForgetAllowance


def test_made_up_pages_are_refused_beyond_the_hour() -> None:
    allowance = ForgetAllowance(100)
    assert allowance.wait_s(101, 0.0) == math.inf
    for at, num in ((10.0, 30), (20.0, 50)):
        assert allowance.wait_s(num, at) == 0.0
        allowance.take(num, at)
    assert allowance.wait_s(20, 30.0) == 0.0
    assert allowance.wait_s(21, 30.0) == 10.0 + WINDOW_S - 30.0
    assert allowance.wait_s(51, 30.0) == 20.0 + WINDOW_S - 30.0
    assert allowance.wait_s(50, 10.0 + WINDOW_S) == 0.0


@example([(1, 0.0), (100, 0.0), (1, WINDOW_S)])  # rounded, its hour ends as it is asked
@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, WINDOW_S)), max_size=30))
def test_no_hour_has_more_than_its_share(asked: list[tuple[int, float]]) -> None:
    allowance, now = ForgetAllowance(100), 0.0
    taken: list[tuple[float, int]] = []
    for num, gap_s in asked:
        now += gap_s
        wait_s = allowance.wait_s(num, now)
        if wait_s:
            assert sum(n for at, n in taken if at + WINDOW_S > now) + num > 100, "for nothing"
            now = math.nextafter(now + wait_s, math.inf)
            assert allowance.wait_s(num, now) == 0.0, "the wait was too short"
        allowance.take(num, now)
        taken.append((now, num))
        assert sum(n for at, n in taken if at + WINDOW_S > now) <= 100

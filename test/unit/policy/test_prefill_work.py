"""The busy share is what a ruler over the batches measures, and what is left never runs away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.policy.prefill_work import WINDOW_S, PrefillWork

steps = st.lists(
    st.tuples(st.floats(0, 4), st.floats(0, 25), st.integers(1, 3)), min_size=1, max_size=12
)


@given(st.integers(0, 10**6), steps, st.floats(0, 30))
def test_busy_share_equals_the_measured_overlap(
    start: int, pauses: list[tuple[float, float, int]], rest_s: float
) -> None:
    work, now = PrefillWork(), float(start)
    batches: list[tuple[float, float]] = []
    for pause_s, takes_s, num_at_once in pauses:
        now += pause_s
        begun = now
        for _ in range(num_at_once):
            work.launched(takes_s, now)
        for _ in range(num_at_once):
            work.busy_share(now + takes_s / 3)  # a look in between changes nothing
            now += takes_s
            work.ended(now)
        batches.append((begun, now))
    now += rest_s
    first = int(now) - WINDOW_S + 1  # of the seconds in the window
    overlap_s = sum(max(0.0, end - max(begun, first)) for begun, end in batches)
    wanted = overlap_s / max(now - first, 1e-9)
    assert work.busy_share(now) == pytest.approx(min(1.0, wanted), abs=1e-6)
    assert not work.is_running


def test_batch_under_way_counts_before_its_end() -> None:
    work = PrefillWork()
    work.launched(100.0, 1000.0)
    assert work.busy_share(1000.0) == 0.0
    assert work.busy_share(1004.5) == pytest.approx(4.5 / (WINDOW_S - 0.5))
    assert work.busy_share(1050.5) == 1.0


def test_what_is_left_follows_launches_and_ends() -> None:
    work = PrefillWork()
    assert work.left_s(5.0) == 0.0
    work.launched(2.0, 5.0)
    work.launched(3.0, 5.5)
    assert work.left_s(6.0) == 4.0
    assert work.left_s(9.0) == 3.0, "a late batch took the next one's time"
    work.ended(9.0)
    assert work.left_s(10.0) == 2.0
    work.ended(10.0)
    assert work.left_s(10.0) == 0.0
    work.ended(11.0)  # of a batch that was not noted
    assert not work.is_running

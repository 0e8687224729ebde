"""Durations are counted exactly, from any thread, in memory that does not grow."""

from __future__ import annotations

import math
import sys
import threading

import pytest

from sglang_tiered.metrics import BOUNDS_S, DurationCounts, Durations


def test_duration_on_a_bound_counts_below_it() -> None:
    durations = Durations()
    for bound in BOUNDS_S:
        durations.record(bound)
        durations.record(math.nextafter(bound, math.inf))
    counts = durations.take().counts
    assert counts == (1, *[2] * (len(BOUNDS_S) - 1), 1)


def test_clock_that_went_back_counts_as_no_time() -> None:
    durations = Durations()
    durations.record(-5.0)
    durations.record(1e6)
    taken = durations.take()
    assert (taken.count, taken.sum_s) == (2, 1e6)
    assert (taken.counts[0], taken.counts[-1]) == (1, 1)


def test_threads_lose_no_duration() -> None:
    durations = Durations()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: [durations.record(0.25) for _ in range(2_000)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        taken = DurationCounts()
        while any(thread.is_alive() for thread in threads):
            later = durations.take()
            assert later.count >= taken.count and later.sum_s == 0.25 * later.count
            taken = later
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert durations.take().count == 8_000
    assert durations.take().sum_s == pytest.approx(2_000.0)

"""What requests waited for, in histograms."""

from __future__ import annotations

from kit.clock import Clock
from sglang_tiered.integration.cache.timing.waits import AdmissionWaits


def test_wait_for_a_load_begins_with_the_turn() -> None:
    clock = Clock(100.0)
    waits = AdmissionWaits(clock)
    waits.arrives("r")
    waits.has_load("r")
    clock.now += 4.0  # behind others
    waits.held_up("r")
    clock.now += 0.5
    waits.held_up("r")
    waits.arrives("r")  # its load is attempted again
    clock.now += 0.5
    waits.admitted("r")
    stats = waits.stats()
    assert (stats.requests.count, stats.requests.sum_s) == (1, 5.0)
    assert (stats.loads.count, stats.loads.sum_s) == (1, 1.0)


def test_load_that_kept_nobody_counts_as_none() -> None:
    clock = Clock()
    waits = AdmissionWaits(clock)
    for request in ("loads", "cold"):
        waits.arrives(request)
    waits.has_load("loads")
    waits.held_up("cold")  # until all ranks had agreed that nothing is loaded
    clock.now += 2.0
    for request in ("loads", "cold", "unknown"):
        waits.admitted(request)
    stats = waits.stats()
    assert (stats.requests.count, stats.requests.sum_s) == (2, 4.0)
    assert (stats.loads.count, stats.loads.sum_s) == (1, 0.0)


def test_aborted_request_leaves_no_wait() -> None:
    waits = AdmissionWaits(Clock())
    waits.arrives("aborted")
    waits.has_load("aborted")
    waits.drop("aborted")
    waits.admitted("aborted")
    assert waits.stats().requests.count == waits.stats().loads.count == 0

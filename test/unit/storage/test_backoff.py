"""Who waits for one thing comes back ever later."""

from __future__ import annotations

from kit.clock import Clock
from sglang_tiered.storage.backoff import Backoff


def test_a_pause_doubles_to_a_minute_then_resets() -> None:
    """Failures within a pause are one incident."""
    clock = Clock()
    backoff, pauses = Backoff(clock), []
    for _ in range(9):
        for _ in range(3):
            backoff.fail()
        start = clock.now
        while not backoff.is_over:
            clock.now += 0.5
        pauses.append(clock.now - start)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    backoff.succeed()
    backoff.fail()
    assert backoff.wait_s == 1.0

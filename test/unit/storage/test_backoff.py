"""Many that wait for one thing do not come back at once, and a cause is told once."""

from __future__ import annotations

import logging

import pytest

from sglang_tiered.storage.backoff import Backoff, OnceLog


def test_spread_pauses_stay_within_their_bounds() -> None:
    backoff, now, pauses = Backoff(0.1, 5.0, spread=0.5), 0.0, []
    for _ in range(12):
        backoff.fail(now)
        pauses.append(backoff.wait_s(now))
        now += pauses[-1]
    whole = [min(0.1 * 2**number, 5.0) for number in range(12)]
    assert all(
        0.499 * top <= pause <= 1.001 * top for pause, top in zip(pauses, whole, strict=True)
    )
    backoff.succeed()
    assert backoff.wait_s(now) == 0.0


def test_a_pause_doubles_to_a_minute_then_resets() -> None:
    """Failures within a pause are one incident."""
    backoff, now, pauses = Backoff(), 0.0, []
    for _ in range(9):
        for _ in range(3):
            backoff.fail(now)
        start = now
        while not backoff.is_over(now):
            now += 0.5
        pauses.append(now - start)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    backoff.succeed()
    backoff.fail(now)
    assert backoff.is_over(now + 1.0)


def test_a_settled_cause_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    log = OnceLog(logging.getLogger("once"))
    for _ in range(2):
        for cause in ("a", "b", "a"):
            log.report(cause, "%s fails", cause)
        for cause in ("a", "b"):
            log.settle(cause)
    assert [record.getMessage() for record in caplog.records] == ["a fails", "b fails"] * 2

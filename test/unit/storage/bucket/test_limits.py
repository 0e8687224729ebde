"""The breaker opens after failures in a row, probes with growing pauses, and closes by itself."""

from __future__ import annotations

from kit.clock import Clock
from sglang_tiered.storage.base import Health
from sglang_tiered.storage.bucket.limits import Breaker
from sglang_tiered.storage.bucket.requests import BucketError, Failure

FAILED = BucketError(Failure.UNAVAILABLE, "get was answered with status 503")


def test_a_bucket_that_never_answered_opens_at_once() -> None:
    breaker = Breaker(Clock(1000.0))
    breaker.note(FAILED)
    assert breaker.is_open


def test_pauses_double_to_a_minute_until_a_success() -> None:
    """It opens after three failures in a row; those begun earlier do not lengthen the pause."""
    clock = Clock(1000.0)
    breaker, pauses = Breaker(clock), []
    for number in (1, 2):
        breaker.note(None)
        for _ in range(3):
            assert not breaker.is_open
            breaker.note(FAILED)
        assert breaker.diagnosis() == (Health.MISS_ONLY, FAILED.clause)
        assert not breaker.accepts_stores()
        assert (breaker.num_opened, breaker.wait_s()) == (number, 1.0)
    for _ in range(20):
        breaker.note(FAILED)
    for _ in range(9):
        pauses.append(breaker.wait_s())
        clock.now += breaker.wait_s()
        assert breaker.is_open, "half-open serves the probe alone"
        breaker.note(FAILED)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert breaker.num_opened == 2

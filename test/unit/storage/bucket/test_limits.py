"""The breaker opens after failures in a row, probes with growing pauses, and closes by itself."""

from __future__ import annotations

from kit.clock import Clock
from sglang_tiered.storage.base import Health
from sglang_tiered.storage.bucket.limits import Breaker
from sglang_tiered.storage.bucket.requests import BucketError, Failure


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    breaker.note(None)
    for _ in range(3):
        assert not breaker.is_open
        breaker.note(BucketError(Failure.UNAVAILABLE, "get was answered with status 503"))
    assert breaker.is_open
    return breaker


def test_it_opens_after_three_failures_and_says_why() -> None:
    breaker = opened(Clock(1000.0))
    assert breaker.diagnosis() == (Health.MISS_ONLY, "get was answered with status 503")
    assert not breaker.accepts_stores()


def test_a_bucket_that_never_answered_opens_at_once() -> None:
    breaker = Breaker(Clock(1000.0))
    breaker.note(BucketError(Failure.UNAVAILABLE, "list found no connection"))
    assert breaker.is_open


def test_requests_begun_earlier_do_not_lengthen_the_pause() -> None:
    clock = Clock(1000.0)
    breaker = opened(clock)
    for _ in range(20):
        breaker.note(BucketError(Failure.UNAVAILABLE, "x"))
    assert breaker.wait_s() == 1.0
    assert breaker.num_opened == 1


def test_pauses_double_to_a_minute_until_a_success() -> None:
    clock = Clock(1000.0)
    breaker = opened(clock)
    pauses = []
    for _ in range(9):
        pauses.append(breaker.wait_s())
        clock.now += breaker.wait_s()
        assert breaker.is_open, "half-open serves the probe alone"
        breaker.note(BucketError(Failure.UNAVAILABLE, "x"))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    breaker.note(None)
    assert not breaker.is_open
    for _ in range(3):
        breaker.note(BucketError(Failure.UNAVAILABLE, "x"))
    assert breaker.wait_s() == 1.0
    assert breaker.num_opened == 2

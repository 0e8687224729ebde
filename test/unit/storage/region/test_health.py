"""Pauses, retries and hanging I/O on an injected clock."""

from __future__ import annotations

import pytest

from kit.clock import Clock
from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.base import Health
from sglang_tiered.storage.region.health import HealthMonitor

ERROR = OSError(5, "Input/output error")


@pytest.fixture
def clock() -> Clock:
    return Clock(50.0)


@pytest.fixture
def health(clock: Clock) -> HealthMonitor:
    return HealthMonitor(clock, 5.0)


def test_a_pause_doubles_to_a_minute_then_resets() -> None:
    backoff = Backoff()
    now = 0.0
    pauses = []
    for _ in range(9):
        backoff.fail(now)
        start = now
        while not backoff.is_over(now):
            now += 0.5
        pauses.append(now - start)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    backoff.succeed()
    backoff.fail(now)
    assert backoff.is_over(now + 1.0)


def test_failures_within_a_pause_are_one_incident() -> None:
    backoff = Backoff()
    for _ in range(10):
        backoff.fail(0.0)
    assert backoff.is_over(1.0)


def test_store_failures_leave_loads_alone(health: HealthMonitor, clock: Clock) -> None:
    health.store_failed()
    assert not health.accepts_stores()
    assert health.state() is Health.RUNNING
    clock.now += 1.0
    assert health.accepts_stores()


def test_single_read_failures_are_tolerated(health: HealthMonitor) -> None:
    for _ in range(20):
        health.read_failed(ERROR)
        health.read_failed(ERROR)
        health.read_succeeded()
    assert health.state() is Health.RUNNING


def test_three_read_failures_in_a_row_pause_everything(health: HealthMonitor, clock: Clock) -> None:
    for _ in range(3):
        health.read_failed(ERROR)
    assert health.state() is Health.MISS_ONLY
    health.read_succeeded()  # begun before the incident; proves nothing
    assert health.state() is Health.MISS_ONLY
    clock.now += 1.0
    assert health.state() is Health.RUNNING
    health.read_failed(ERROR)
    clock.now += 1.0
    assert health.state() is Health.MISS_ONLY
    clock.now += 1.0
    health.read_succeeded()
    assert health.state() is Health.RUNNING


def test_hanging_io_shows_during_and_shortly_after(health: HealthMonitor, clock: Clock) -> None:
    with health.watch():
        clock.now += 5.0
        assert health.state() is Health.RUNNING
        clock.now += 0.1
        assert health.state() is Health.MISS_ONLY
    assert health.state() is Health.MISS_ONLY
    clock.now += 1.0
    assert health.state() is Health.RUNNING


def test_watch_forgets_io_that_failed(health: HealthMonitor, clock: Clock) -> None:
    with pytest.raises(OSError, match="no"), health.watch():
        raise OSError("no")
    clock.now += 100.0
    assert health.state() is Health.RUNNING

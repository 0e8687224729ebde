"""The state of a device on an injected clock, beside what ``test_region_faults.py`` sees of it."""

from __future__ import annotations

import pytest

from kit.clock import Clock
from sglang_tiered.storage.base import Health
from sglang_tiered.storage.region.health import HealthMonitor

ERROR = OSError(5, "Input/output error")


def test_only_three_failed_reads_in_a_row_pause() -> None:
    clock = Clock(50.0)
    health = HealthMonitor(clock, 5.0)
    for _ in range(20):
        health.read_failed(ERROR)
        health.read_failed(ERROR)
        health.read_succeeded()
    assert health.state() is Health.RUNNING
    for _ in range(3):
        health.read_failed(ERROR)
    health.read_succeeded()  # begun before the incident; proves nothing
    assert health.state() is Health.MISS_ONLY
    clock.now += 1.0
    assert health.state() is Health.RUNNING


def test_watch_forgets_io_that_failed() -> None:
    clock = Clock(50.0)
    health = HealthMonitor(clock, 5.0)
    with pytest.raises(OSError, match="no"), health.watch():
        raise OSError("no")
    clock.now += 100.0
    assert health.state() is Health.RUNNING

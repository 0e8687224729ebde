"""The state of a device on an injected clock, beside what ``test_region_faults.py`` sees of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.clock import Clock
from kit.tiers import open_disk
from sglang_tiered.storage.base import Health

ERROR = OSError(5, "Input/output error")


def test_only_three_failed_reads_in_a_row_pause(tmp_path: Path) -> None:
    clock = Clock(50.0)
    disk = open_disk(tmp_path, clock)
    for _ in range(20):
        disk.read_ended(ERROR)
        disk.read_ended(ERROR)
        disk.read_ended(None)
    assert disk.is_running
    for _ in range(3):
        disk.read_ended(ERROR)
    disk.read_ended(None)  # begun before the incident; proves nothing
    assert disk.health() == (Health.MISS_ONLY, "reads fail: Input/output error")
    clock.now += 1.0
    assert disk.is_running


def test_watch_forgets_io_that_failed(tmp_path: Path) -> None:
    clock = Clock(50.0)
    disk = open_disk(tmp_path, clock)
    with pytest.raises(OSError, match="no"), disk.watch():
        raise OSError("no")
    clock.now += 100.0
    assert disk.is_running

"""What reclaim saves: the hot pages of its victims, and no more than its share."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.faulty import FaultyDevice
from kit.runs import make_run
from kit.tiers import close_whole, loads, open_region, store
from kit.waiting import TIMEOUT_S, drained
from sglang_tiered.storage.base import Health, Run
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice

PAGE = 4096
REGION = 64 * PAGE
CAPACITY = 4 * REGION


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RegionEngine]:
    engine = open_region(tmp_path / "s", capacity_bytes=CAPACITY, region_bytes=REGION)
    yield engine
    close_whole(engine)


def test_what_is_loaded_outlives_what_is_not(engine: RegionEngine) -> None:
    """And what was loaded once is let go in the end."""
    hot, cold, once = (make_run(seed, [PAGE] * 3) for seed in (0, 1, 99))
    for run in (hot, cold, once):
        store(engine, run)
    loads(engine, once)
    for seed in range(2, 42):  # ten times the capacity
        store(engine, make_run(seed, [PAGE] * 50))
        loads(engine, hot)
    assert engine.lookup(cold.keys).num_hits == engine.lookup(once.keys).num_hits == 0
    stats = engine.stats()
    assert stats.num_pages_reinserted > 3
    assert stats.bytes_reinserted == stats.num_pages_reinserted * PAGE


def test_reads_that_fail_now_and_then_pause_nothing(tmp_path: Path) -> None:
    """Only reclaim reads here, and all but one page of each region verify."""
    num_reads = 0

    def fail(operation: str) -> None:
        nonlocal num_reads
        if operation == "readv" and threading.current_thread().name == "tier-writer":
            num_reads += 1
            if num_reads % 4 in (1, 2):  # of a page, and when it is tried again
                raise OSError(errno.EIO, "a bad sector")

    device = FaultyDevice(FileDevice(tmp_path))
    engine = open_region(tmp_path, capacity_bytes=3 * CAPACITY, region_bytes=REGION, device=device)
    for seed in range(10):
        run = make_run(seed, [PAGE] * 50)
        store(engine, run)
        apart = slice(0, 50, 20)  # each is a read of its own
        loads(engine, Run(run.keys[apart], run.pages[apart]))
    device.before = fail
    for seed in range(100, 112):
        store(engine, make_run(seed, [PAGE] * 50))
        assert engine.health is Health.RUNNING
    assert num_reads > 12, "reclaim read nothing"
    assert drained(engine, TIMEOUT_S)
    engine.close()

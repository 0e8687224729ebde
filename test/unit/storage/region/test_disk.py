"""The health of a device, beside what ``test_region_faults.py`` sees of it; and the syncer thread,
which outlives an unforeseen exception and makes up for what it cost."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.clock import Clock
from kit.faulty import Fault, FaultyDevice, fail_once
from kit.runs import make_run
from kit.tiers import open_disk, open_region, store
from sglang_tiered.storage.base import Erasure, Health
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine, writer
from sglang_tiered.storage.region.device import FileDevice

TIMEOUT_S = 10.0
REGION = 64 * 1024
ERROR = OSError(5, "Input/output error")


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def engine(tmp_path: Path, clock: Clock) -> Iterator[RegionEngine]:
    sizes = {"capacity_bytes": 4 * REGION, "region_bytes": REGION}
    engine = open_region(
        tmp_path, **sizes, sync_interval_s=1000.0, device=FileDevice(tmp_path), clock=clock
    )
    yield engine
    engine.close()
    assert not [thread.name for thread in engine._workers._threads if thread.is_alive()]


@pytest.mark.parametrize("name", ["sync", "sync_directory"])
def test_an_internal_error_refuses_only_one_barrier(
    engine: RegionEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store(engine, make_run(1, [4096]))
    fail_once(monkeypatch, engine._device, name)
    assert not engine.flush(TIMEOUT_S)
    assert engine.stats().health is Health.MISS_ONLY
    assert "internal error while syncing" in engine.stats().health_reason
    clock.now += 100.0
    assert engine.stats().health is Health.RUNNING
    assert engine.flush(TIMEOUT_S)
    (region,) = engine._state.regions
    assert region.has_name and not region.dirty
    engine.check_integrity()


def test_no_internal_error_costs_later_barriers(
    engine: RegionEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, writer, "write_footer")
    first = make_run(1, [4096] * 10)
    store(engine, first)
    job = engine.submit_store(make_run(2, [4096] * 10))  # the first region is full
    assert job.wait(TIMEOUT_S)
    engine.flush(TIMEOUT_S)
    clock.now += 100.0
    assert engine.lookup(first.keys).num_hits == 10
    store(engine, *(make_run(seed, [4096] * 10) for seed in range(3, 9)))
    assert engine.lookup(first.keys).num_hits == 0, "it was reclaimed in its turn"
    assert engine.flush(TIMEOUT_S)


def test_names_found_at_a_start_stay_durable(tmp_path: Path) -> None:
    """A sync of the directory that fails later says nothing of them."""
    sizes = {"capacity_bytes": 4 * REGION, "region_bytes": REGION, "sync_interval_s": 1000.0}
    engine = open_region(tmp_path, **sizes)
    store(engine, make_run(1, [4096]))
    engine.close()
    device = FaultyDevice(
        FileDevice(tmp_path),
        [Fault(1, "sync_directory", error=errno.EIO)],  # 0 is the start's
    )
    engine = open_region(tmp_path, device=device, **sizes)
    assert not engine.flush(TIMEOUT_S)
    assert engine.flush(TIMEOUT_S), "what it holds counts as lost"
    engine.close()


def test_reclaim_waits_for_no_other_sync(tmp_path: Path) -> None:
    """After a start every region is synced: thousands, of which the first may have to go."""
    sizes = {"capacity_bytes": 4 * REGION, "region_bytes": REGION, "sync_interval_s": 1000.0}
    engine = open_region(tmp_path, **sizes)
    store(engine, *(make_run(seed, [4096] * 10) for seed in range(4)))
    engine.close()
    device = FaultyDevice(FileDevice(tmp_path))
    reached, goes_on = threading.Event(), threading.Event()

    def wait_at_the_second(operation: str) -> None:
        if operation == "sync" and device.calls.count("sync") == 2:
            reached.set()
            assert goes_on.wait(TIMEOUT_S)

    device.before = wait_at_the_second
    engine = open_region(tmp_path, device=device, **sizes)
    flushed: list[bool] = []
    flushing = threading.Thread(target=lambda: flushed.append(engine.flush(TIMEOUT_S)))
    flushing.start()
    try:
        assert reached.wait(TIMEOUT_S)
        job = engine.submit_store(make_run(9, [4096] * 10))
        assert job.wait(TIMEOUT_S / 2), "it waits for the sync of another region"
        assert all(job.ok)
        assert is_true(engine.erase(Erasure.of(make_run(3, [4096] * 10).keys)), TIMEOUT_S)
    finally:
        goes_on.set()
        flushing.join(TIMEOUT_S)
        engine.close()
    assert flushed == [True], "one of them went before its sync"


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

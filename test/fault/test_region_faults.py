"""The region engine on devices that fail: no exception, no wrong bytes, and it works again."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kit.clock import Clock
from kit.faulty import Fault, FaultyDevice
from kit.runs import blank, make_run, page_data
from kit.tiers import open_region
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.storage.base import Erasure, Health, Reason, Stop
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice

REGION = 64 * 1024


def open_engine(directory: Path, device: FaultyDevice | None = None, **kwargs: Any) -> RegionEngine:
    options = {"capacity_bytes": 3 * REGION, "region_bytes": REGION} | kwargs
    return open_region(directory, device=device, **options)


def faulty(directory: Path, *faults: Fault, **kwargs: Any) -> FaultyDevice:
    directory.mkdir(mode=0o700, exist_ok=True)
    return FaultyDevice(FileDevice(directory, direct=False), faults, **kwargs)


@pytest.mark.parametrize("operation", ["readv", "writev"])
def test_hanging_io_is_noticed_by_whoever_asks(
    tmp_path: Path, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock, device = Clock(100.0), faulty(tmp_path / "s")
    engine = open_engine(tmp_path / "s", device, clock=clock, io_timeout_s=5.0)
    run, other = make_run(1, [4096]), make_run(2, [4096])
    finished(engine.submit_store(run))
    entered, release = threading.Semaphore(0), threading.Event()

    def hang(called: str) -> None:
        if called == operation:
            entered.release()
            assert release.wait(TIMEOUT_S)

    device.before = hang
    submit = engine.submit_load if operation == "readv" else engine.submit_store
    first = submit(blank(run) if operation == "readv" else other)
    stuck = [first] if operation == "writev" else [first, submit(blank(run))]  # threads for it
    assert all(entered.acquire(timeout=TIMEOUT_S) for _ in stuck)
    queued = submit(blank(run) if operation == "readv" else make_run(3, [4096]))
    assert engine.lookup(run.keys).num_hits == 1
    eventually(lambda: operation == "readv" or len(engine._state.to_write) == 1)
    clock.now += 6.0
    deadline = time.monotonic() + TIMEOUT_S
    while not queued.wait(0.01):  # the writer may just be giving it a place
        assert engine.lookup(run.keys) == (0, Stop.UNHEALTHY)
        assert time.monotonic() < deadline, "a queued job waits behind a hanging device"
    assert not any(job.done for job in stuck), "buffers of a hanging job are still the device's"
    purged = engine.erase(Erasure(tenant=b"t" * 16))
    assert operation == "readv" or not is_true(purged, 0.01)
    release.set()
    device.before = None
    assert [finished(job) for job in stuck] == [[Reason.OK]] * len(stuck)
    assert engine.stats().health is Health.MISS_ONLY, "a late answer is still a sick device"
    clock.now += 1.5
    assert engine.lookup(run.keys).num_hits == 1
    assert finished(engine.submit_load(blank(run))) == [Reason.OK]
    engine.check_integrity()
    engine.close()
    assert "internal error" not in caplog.text, "what was shed is written all the same"


def test_callers_close_no_file_on_hanging_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last close of an unlinked file frees its blocks: the scheduler must not wait for it."""
    closed_by: list[str] = []
    close = FaultyDevice.close

    def closes(device: FaultyDevice, fd: int) -> None:
        closed_by.append(threading.current_thread().name)
        close(device, fd)

    monkeypatch.setattr(FaultyDevice, "close", closes)
    clock, device = Clock(100.0), faulty(tmp_path)
    engine = open_engine(tmp_path, device, clock=clock, capacity_bytes=2 * REGION, io_timeout_s=5.0)
    first, second, third = (make_run(seed, [12_288] * 3) for seed in range(3))
    finished(engine.submit_store(first))
    finished(engine.submit_store(second))
    engine.flush(TIMEOUT_S)
    entered, release = threading.Semaphore(0), threading.Event()

    def hang(called: str) -> None:
        if called == "readv" and threading.current_thread().name.startswith("tier-io"):
            entered.release()
            assert release.wait(TIMEOUT_S)

    device.before = hang
    stuck = [engine.submit_load(blank(second)) for _ in range(2)]  # one for each thread
    assert all(entered.acquire(timeout=TIMEOUT_S) for _ in stuck)
    queued = engine.submit_load(blank(first))  # the one reason why its region is open
    late = engine.submit_store(third)
    eventually(lambda: engine._state.regions.retiring_bytes == REGION)
    clock.now += 6.0
    assert engine.lookup(first.keys) == (0, Stop.UNHEALTHY)
    assert finished(queued) == [Reason.IO_ERROR] * 3
    release.set()
    for job in (*stuck, late):
        finished(job)
    regions = engine._state.regions  # of which the late store, shed, may still be making one
    eventually(lambda: regions.physical_bytes == sum(region.nbytes for region in regions))
    assert {name[:7] for name in closed_by} == {"tier-io"}
    engine.close()


def test_eviction_under_a_running_load_lets_it_finish(tmp_path: Path) -> None:
    device = faulty(tmp_path / "s")
    engine = open_engine(tmp_path / "s", device, capacity_bytes=REGION)
    first = make_run(1, [12_288] * 3)
    finished(engine.submit_store(first))
    entered, release = threading.Event(), threading.Event()

    def hold(called: str) -> None:
        # The writer reads as well: it saves the hot pages of its victim.
        if called == "readv" and threading.current_thread().name.startswith("tier-io"):
            entered.set()
            assert release.wait(TIMEOUT_S)
        if called == "unlink":
            release.set()

    device.before = hold
    target = blank(first)
    load = engine.submit_load(target)
    assert entered.wait(TIMEOUT_S)
    for seed in range(3, 6):
        finished(engine.submit_store(make_run(seed, [12_288] * 3)))
        assert engine.stats().physical_bytes <= REGION
    assert engine.lookup(first.keys).num_hits == 0
    assert finished(load) == [Reason.OK] * 3
    assert page_data(target) == page_data(first)
    engine.check_integrity()
    engine.close()

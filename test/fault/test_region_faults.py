"""The region engine on devices that fail: no exception, no wrong bytes, and it works again."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kit.clock import Clock
from kit.faulty import Fault, FaultyDevice
from kit.runs import NAMESPACE, Blank, MakeRun, PageData
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.storage.base import Erasure, Health, Reason, Stop
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice

REGION = 64 * 1024


def open_engine(directory: Path, device: FaultyDevice | None = None, **kwargs: Any) -> RegionEngine:
    options = {"capacity_bytes": 3 * REGION, "region_bytes": REGION, "num_threads": 2} | kwargs
    return RegionEngine(directory, namespace=NAMESPACE, device=device, **options)


def faulty(directory: Path, *faults: Fault, **kwargs: Any) -> FaultyDevice:
    directory.mkdir(mode=0o700, exist_ok=True)
    return FaultyDevice(FileDevice(directory, direct=False), faults, **kwargs)


def test_write_failure_indexes_nothing_and_loads_go_on(
    tmp_path: Path, make_run: MakeRun, blank: Blank
) -> None:
    clock = Clock(100.0)
    device = faulty(tmp_path / "s")
    engine = open_engine(tmp_path / "s", device, clock=clock)
    good, bad = make_run(1, [4096] * 2), make_run(2, [4096] * 2)
    finished(engine.submit_store(good))
    device.faults = [Fault(device.calls.count("writev"), "writev", error=errno.EIO)]
    assert finished(engine.submit_store(bad)) == [Reason.IO_ERROR] * 2
    assert engine.lookup(bad.keys) == (0, Stop.MISS)
    assert finished(engine.submit_store(bad)) == [Reason.REJECTED] * 2
    assert finished(engine.submit_load(blank(good))) == [Reason.OK] * 2
    clock.now += 2.0
    assert finished(engine.submit_store(bad)) == [Reason.OK] * 2
    engine.close()
    assert len(list((tmp_path / "s").glob("*.kv"))) == 1, "the offset was not used again"
    reopened = open_engine(tmp_path / "s")
    assert reopened.lookup(good.keys + bad.keys) == (4, Stop.END)
    reopened.close()


def test_repeated_read_errors_turn_to_misses_and_heal(
    tmp_path: Path, make_run: MakeRun, blank: Blank, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(100.0)
    device = faulty(tmp_path / "s")
    engine = open_engine(tmp_path / "s", device, clock=clock)
    runs = [make_run(seed, [4096]) for seed in range(8)]
    for run in runs:
        finished(engine.submit_store(run))
    device.faults = [Fault(0, "readv", times=10**6, error=errno.EIO)]
    for run in runs[:3]:
        assert finished(engine.submit_load(blank(run))) == [Reason.IO_ERROR]
    assert engine.stats().health is Health.MISS_ONLY
    assert engine.lookup(runs[5].keys) == (0, Stop.UNHEALTHY)
    num_calls = len(device.calls)
    assert finished(engine.submit_load(blank(runs[5]))) == [Reason.MISS]
    assert finished(engine.submit_store(make_run(50, [4096]))) == [Reason.REJECTED]
    assert len(device.calls) == num_calls, "something reached a sick device"
    clock.now += 1.5
    assert finished(engine.submit_load(blank(runs[5]))) == [Reason.IO_ERROR]
    assert engine.stats().health is Health.MISS_ONLY, "one failed retry must pause again"
    device.faults = []
    clock.now += 2.5
    assert finished(engine.submit_load(blank(runs[6]))) == [Reason.OK]
    assert engine.stats().health is Health.RUNNING
    assert len([r for r in caplog.records if "cannot be read" in r.message]) == 1
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("operation", ["readv", "writev"])
def test_hanging_io_is_noticed_by_whoever_asks(
    tmp_path: Path, make_run: MakeRun, blank: Blank, operation: str
) -> None:
    clock = Clock(100.0)
    device = faulty(tmp_path / "s")
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
    clock.now += 6.0
    assert engine.lookup(run.keys) == (0, Stop.UNHEALTHY)
    deadline = time.monotonic() + TIMEOUT_S
    while not queued.wait(0.01):  # the writer may just be giving it a place
        assert engine.lookup(run.keys) == (0, Stop.UNHEALTHY)
        assert time.monotonic() < deadline, "a queued job waits behind a hanging device"
    assert not any(job.done for job in stuck), "buffers of a hanging job are still the device's"
    release.set()
    device.before = None
    assert [finished(job) for job in stuck] == [[Reason.OK]] * len(stuck)
    assert engine.stats().health is Health.MISS_ONLY, "a late answer is still a sick device"
    clock.now += 1.5
    assert engine.lookup(run.keys).num_hits == 1
    assert finished(engine.submit_load(blank(run))) == [Reason.OK]
    engine.check_integrity()
    engine.close()


def test_purging_a_hanging_disk_keeps_its_timeout(tmp_path: Path, make_run: MakeRun) -> None:
    device = faulty(tmp_path / "s")
    engine = open_engine(tmp_path / "s", device)
    entered, release = threading.Event(), threading.Event()

    def hang(called: str) -> None:
        if called == "writev":
            entered.set()
            assert release.wait(TIMEOUT_S)

    device.before = hang
    run = make_run(1, [4096])
    stuck = engine.submit_store(run)
    assert entered.wait(TIMEOUT_S)
    engine.set_namespace(b"\x22" * 32)
    assert not is_true(engine.erase(Erasure()), 0.01)
    assert not is_true(engine.erase(Erasure(tenant=b"t" * 16)), 0.01)
    assert finished(stuck) == [Reason.CANCELLED], "it had no place yet"
    release.set()
    assert is_true(engine.erase(Erasure()), TIMEOUT_S)
    engine.close()


class ClosingDevice(FaultyDevice):
    """Notes which threads close files."""

    def __init__(self, directory: Path) -> None:
        super().__init__(FileDevice(directory, direct=False))
        self.closed_by: list[str] = []

    def close(self, fd: int) -> None:
        self.closed_by.append(threading.current_thread().name)
        super().close(fd)


def test_callers_close_no_file_on_hanging_disks(
    tmp_path: Path, make_run: MakeRun, blank: Blank
) -> None:
    """The last close of an unlinked file frees its blocks: the scheduler must not wait for it."""
    clock, device = Clock(100.0), ClosingDevice(tmp_path)
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
    assert threading.current_thread().name not in device.closed_by
    release.set()
    for job in (*stuck, late):
        finished(job)
    regions = engine._state.regions  # of which the late store, shed, may still be making one
    eventually(lambda: regions.physical_bytes == sum(region.nbytes for region in regions))
    assert {name[:7] for name in device.closed_by} == {"tier-io"}
    engine.check_integrity()
    engine.close()


def test_a_read_right_at_second_try_is_served(
    tmp_path: Path, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    """Page by page; only what was read is timed as verified."""
    device = faulty(tmp_path / "s")
    engine = open_engine(tmp_path / "s", device)
    run = make_run(1, [4096] * 4)
    finished(engine.submit_store(run))
    faults: tuple[dict[str, int], ...] = ({"flip_bit": 40_000}, {"short_bytes": 6000}, {"error": 5})
    for fault in faults:
        device.faults = [Fault(device.calls.count("readv"), "readv", **fault)]
        target = blank(run)
        assert finished(engine.submit_load(target)) == [Reason.OK] * 4
        assert page_data(target) == page_data(run)
    verified = engine.stats().verification_durations
    assert verified.count == 2
    assert verified.sum_s > 0.0
    engine.close()


def test_eviction_under_a_running_load_lets_it_finish(
    tmp_path: Path, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
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

"""The power goes, or the process dies, at every change the engine makes to its disk.

A small workload on a real engine is stopped at change number N, for all N (in the gate a third of
them). What the disk holds then is tried in every mode of ``simulation.device``: unsynced writes
lost, torn, reordered. Whatever is found must be right, what was acknowledged before the last
completed barrier must be found, and the death of the process alone must lose nothing. The workloads
stay below capacity: nothing is evicted.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from simulation.device import MODES, CrashMode, SimulatedDevice
from simulation.engine import running
from simulation.ledger import TIMEOUT_S, Ledger, content, keys
from simulation.lives import check_after, live_below_capacity, live_full, owed_after, run

from kit.runs import NAMESPACE
from kit.thirds import in_thirds, is_of
from sglang_tiered.storage.base import Erasure, Reason
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine

Workload = Callable[["RegionEngine", Ledger], None]

CRASHES: tuple[tuple[CrashMode, int], ...] = (
    ("kill", 0),
    ("drop", 0),
    ("torn", 0),
    ("reorder", 0),
    ("reorder", 1),
)


def one_by_one(engine: RegionEngine, ledger: Ledger) -> None:
    for number in range(7):
        ledger.store(engine, keys(range(3 * number, 3 * number + 3)))
        if number in (2, 5):
            ledger.sync(engine)


def all_at_once(engine: RegionEngine, ledger: Ledger) -> None:
    """Stores that the writer may group, and a barrier while the next ones are under way."""
    for start in (0, 12):
        jobs = [ledger.submit(engine, keys(range(n, n + 2))) for n in range(start, start + 12, 2)]
        for job in jobs[:3]:
            ledger.settle(job)
        ledger.sync(engine)
        for job in jobs[3:]:
            ledger.settle(job)


WORKLOADS = [one_by_one, all_at_once]


@in_thirds
@pytest.mark.parametrize("workload", WORKLOADS)
def test_power_may_go_at_any_change(tmp_path: Path, workload: Workload, third: int) -> None:
    for at in filter(partial(is_of, third), itertools.count()):
        device, ledger = SimulatedDevice(power_off_at=at), Ledger()
        run(tmp_path, device, ledger, workload)
        if device.powered:
            break
        for number, (mode, seed) in enumerate(CRASHES):
            files, owed = device.crash(mode, 2 * at + seed), owed_after(mode, ledger)
            try:
                check_after(tmp_path, files, ledger, owed, once=(at + number) % 3 > 0)
            except AssertionError as error:
                raise AssertionError(
                    f"change {at}, {mode}, seed {2 * at + seed}: {error}"
                ) from error
    assert ledger.durable, "the workload has no barrier"
    assert at > 20, "the workload is too small to mean anything"


@pytest.mark.parametrize("mode", MODES)
def test_power_may_fail_anywhere_in_a_recovery(tmp_path: Path, mode: CrashMode) -> None:
    for first_at in range(5, 45, 13):
        device, ledger = SimulatedDevice(power_off_at=first_at), Ledger()
        run(tmp_path, device, ledger, one_by_one)
        files = device.crash(mode, first_at)
        owed = owed_after(mode, ledger)
        at = 0
        while True:
            again = SimulatedDevice(files, power_off_at=at)
            run(tmp_path, again, ledger, lambda engine, ledger: None)
            check_after(tmp_path, again.crash("reorder", at), ledger, owed & ledger.durable)
            check_after(tmp_path, again.crash("kill", at), ledger, owed)
            if again.powered:
                break
            at += 1


@pytest.mark.parametrize("seed", range(4))
def test_many_lives_of_one_store(tmp_path: Path, seed: int) -> None:
    live_below_capacity(tmp_path, seed)


@pytest.mark.parametrize("seed", range(4))
def test_many_lives_of_a_full_store(tmp_path: Path, seed: int) -> None:
    live_full(tmp_path, seed)


@pytest.mark.parametrize("mode", ["drop", "torn", "reorder"])
def test_a_barrier_covers_a_killed_process_writes(tmp_path: Path, mode: CrashMode) -> None:
    """Written and acknowledged, never synced, then ``kill -9``: a barrier of the next process is
    a promise for those pages too, although it did not write them."""
    at = 2
    while True:
        device, ledger = SimulatedDevice(power_off_at=at), Ledger()
        run(tmp_path, device, ledger, one_by_one)
        if device.powered:
            break
        heir = device.restart(at)
        with running(tmp_path, heir) as engine:
            ledger.check(engine, ledger.acknowledged)
            assert ledger.sync(engine), "a barrier fails on a working device"
            files = heir.crash(mode, at)
        check_after(tmp_path, files, ledger, ledger.acknowledged)
        at += 2


@pytest.mark.parametrize("num_lost", range(1, 5))
def test_a_failed_sync_stays_failed(tmp_path: Path, num_lost: int) -> None:
    """After a failed ``fsync`` Linux forgets what it could not write, and the next one succeeds.
    A barrier after that must not promise the pages of the first; with those gone, it promises."""
    device, ledger = SimulatedDevice(), Ledger()
    with running(tmp_path, device) as engine:
        ledger.store(engine, keys(range(4)))
        device.lossy_syncs = num_lost
        for _ in range(num_lost + 2):
            ledger.store(engine, keys(range(len(ledger.submitted), len(ledger.submitted) + 2)))
            ledger.sync(engine)
        check_after(tmp_path / "crashed", device.crash("drop"), ledger, ledger.durable)
        check_after(tmp_path / "killed", device.crash("kill"), ledger, ledger.acknowledged)
        is_true(engine.erase(Erasure()), TIMEOUT_S)
        after = keys(range(100, 104))
        ledger.store(engine, after)
        assert ledger.sync(engine), "no barrier completes any more"
        files = device.crash("drop")
    check_after(tmp_path, files, ledger, set(after))


def test_a_lost_sync_leaves_no_hit_behind(tmp_path: Path) -> None:
    """The barriers behind it succeed, and the checkpoint must not say that they cover its pages."""
    device, ledger = SimulatedDevice(), Ledger()
    lost, later = keys(range(4)), keys(range(4, 8))
    with running(tmp_path, device) as engine:
        ledger.store(engine, lost)
        device.lossy_syncs = 1
        assert not ledger.sync(engine)
        ledger.store(engine, later)
        for _ in range(2):
            assert not ledger.sync(engine)
        files = device.crash("kill")
    for each in lost:  # of each page, its bytes, but not what the extent says of it
        bytes_lost = content(NAMESPACE, each)
        files = {
            name: data.replace(bytes_lost, bytes(len(bytes_lost))) for name, data in files.items()
        }
    with running(tmp_path / "after", SimulatedDevice(files)) as engine:
        assert engine.contains(lost) == [False] * 4
        assert ledger.load(engine, later) == [Reason.OK] * 4


class Watched(SimulatedDevice):
    """Tells when names, the last step of making pages durable, were synced."""

    def __init__(self) -> None:
        super().__init__()
        self.synced = threading.Event()

    def sync_directory(self) -> None:
        super().sync_directory()
        self.synced.set()


def test_what_was_stored_becomes_durable_unasked(tmp_path: Path) -> None:
    device, ledger = Watched(), Ledger()
    with running(tmp_path, device, sync_interval_s=0.01) as engine:
        for start in (0, 3):
            device.synced.clear()
            ledger.store(engine, keys(range(start, start + 3)))
            assert device.synced.wait(TIMEOUT_S), "nobody syncs"
            check_after(tmp_path / "other", device.crash("drop"), ledger, ledger.acknowledged)

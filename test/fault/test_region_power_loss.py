"""The power goes, or the process dies, at every change the engine makes to its disk.

A small workload on a real engine is stopped at change number N, for all N (in the gate a third of
them). What the disk holds then is tried in every mode of ``simulation.device``: unsynced writes
lost, torn, reordered. Whatever is found must be right, what was acknowledged before the last
completed barrier must be found, and the death of the process alone must lose nothing. The workloads
stay below capacity: nothing is evicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from simulation.device import MODES, CrashMode, SimulatedDevice
from simulation.engine import running
from simulation.ledger import TIMEOUT_S, Ledger, keys
from simulation.lives import check_after, live_below_capacity, live_full, owed_after, run

from kit.thirds import in_thirds, is_of
from kit.waiting import eventually
from sglang_tiered.storage.base import Erasure
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


@pytest.mark.parametrize("live", [live_below_capacity, live_full])
@pytest.mark.parametrize("seed", range(4))
def test_many_lives_of_one_store(tmp_path: Path, live: Callable[..., None], seed: int) -> None:
    live(tmp_path, seed)


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


def test_what_was_stored_becomes_durable_unasked(tmp_path: Path) -> None:
    device, ledger = SimulatedDevice(), Ledger()
    with running(tmp_path, device, sync_interval_s=0.01) as engine:
        files = device._names.values()
        for start in (0, 3):
            ledger.store(engine, keys(range(start, start + 3)))
            eventually(lambda: not device._name_changes and not any(f.unsynced for f in files))
            check_after(tmp_path / "other", device.crash("drop"), ledger, ledger.acknowledged)

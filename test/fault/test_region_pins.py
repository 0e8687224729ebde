"""Pins, while the power goes, the process dies, the disk refuses, or a file is damaged."""

from __future__ import annotations

import contextlib
import errno
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from simulation.device import CrashMode, SimulatedDevice
from simulation.engine import REGION, running
from simulation.ledger import TIMEOUT_S, Ledger, fill, keys, pin

from kit.clock import Clock
from kit.faulty import Fault, FaultyDevice
from kit.thirds import in_thirds, is_of
from kit.waiting import drained
from sglang_tiered.storage.base import Health, Reason
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine, pins
from sglang_tiered.storage.region.format import is_pin_name
from sglang_tiered.storage.region.pins import file_of

NUM_REGIONS = 6
LIMITS: dict[str, Any] = {"capacity_bytes": NUM_REGIONS * REGION}
KEPT = keys(range(9))
CRASHES: tuple[tuple[CrashMode, int], ...] = (("kill", 0), ("drop", 0), ("torn", 1), ("reorder", 2))


def workload(engine: RegionEngine, told: list[str]) -> None:
    """A pinned page or two in every region, then more than the capacity: reclaim moves the pages
    of one region after the other. ``told`` is what the caller knows."""
    ledger = Ledger()
    pinned = pin(engine, "kept", KEPT)
    for number, each in enumerate(KEPT):
        assert ledger.store(engine, [each]) == [Reason.OK]
        fill(engine, 1000 + 100 * number, 1)
    fill(engine, 4000, 2)
    if engine.flush(TIMEOUT_S) and pinned:
        told.append("kept")
    if pin(engine, "other", keys(range(500, 503))) and is_true(engine.unpin("other"), TIMEOUT_S):
        told.append("unpinned")
    fill(engine, 5000, 16)


def expect_kept(engine: RegionEngine, where: str) -> None:
    assert engine.stats().health is Health.RUNNING, where
    assert Ledger().load(engine, KEPT) == [Reason.OK] * 9, where
    assert drained(engine, TIMEOUT_S)


def test_a_full_store_pins_beside_a_spare_region(tmp_path: Path) -> None:
    """Or the next victim's pinned pages would be in memory alone, which no ``close`` writes."""
    with running(tmp_path, SimulatedDevice(), **LIMITS) as engine:
        fill(engine, 1000, 40)
        assert Ledger().store(engine, KEPT[:3]) == [Reason.OK] * 3
        full = engine.stats().physical_bytes
        assert full > (NUM_REGIONS - 1) * REGION
        assert pin(engine, "kept", KEPT[:3])
        assert engine.stats().physical_bytes <= full - REGION
        assert Ledger().load(engine, KEPT[:3]) == [Reason.OK] * 3


@in_thirds
def test_power_may_fail_anywhere_in_a_rescue(tmp_path: Path, third: int) -> None:
    """What was durable when it was pinned is found, after the crash and after what reclaim does
    then, which may find no region free to begin with."""
    num_kept = 0
    for at in filter(partial(is_of, third), itertools.count()):
        device, told = SimulatedDevice(power_off_at=at), list[str]()
        with running(tmp_path, device, **LIMITS) as engine:
            if device.powered:
                try:
                    workload(engine, told)
                except AssertionError:
                    assert not device.powered, "the workload fails on a disk that works"
            assert engine.stats().physical_bytes <= LIMITS["capacity_bytes"]
        assert not device.misuse, device.misuse
        num_kept += "kept" in told and not device.powered
        # Two ways to crash at each change, the others at the next.
        for mode, seed in CRASHES[at % 2 :: 2] if "kept" in told else ():
            where = f"change {at}, {mode}, seed {seed}, {told}"
            after = SimulatedDevice(device.crash(mode, seed))
            with running(tmp_path, after, **LIMITS) as engine:
                names = {info.name: info.num_pages for info in engine.pins()}
                assert names.pop("kept") == 9, where
                assert not names or "unpinned" not in told, where
                expect_kept(engine, where)
                if mode != "reorder":
                    fill(engine, 8000, 8)
                    expect_kept(engine, f"{where}, later")
            assert not after.misuse, after.misuse
        if device.powered:
            break
    assert num_kept > 20, "the power never went while reclaim was at work"


FAULTS: dict[str, tuple[Any, int]] = {  # the operation that fails, and how often in a row
    **{name: (name, 1) for name in ("writev", "readv", "sync", "sync_directory", "create")},
    "a page cannot be read": ("readv", 2),
    "several pages cannot be read": ("readv", 5),
    "a sync is lost": ("sync", 0),
    "all files but one stay for a while": ("unlink", 4),
    "all files stay for a while": ("unlink", 5),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_operation_loses_no_pinned_page(tmp_path: Path, name: str) -> None:
    """An error is no damage: what cannot be read now stays in its file, and a restart finds it.
    What a sync has failed on may be lost, so what it was copied from must stay."""
    operation, times = FAULTS[name]
    counting = FaultyDevice(SimulatedDevice())
    with running(tmp_path, counting, **LIMITS) as engine:
        workload(engine, [])
    num_calls = counting.calls.count(operation)
    num_tried = 0
    for at in range(num_calls // 3, num_calls, 1 + num_calls // 40):
        clock, told, inner = Clock(1000.0), list[str](), SimulatedDevice()
        device = FaultyDevice(inner, [Fault(at, operation, times, error=errno.EIO)])

        def lose(called: Any, device: Any = device, inner: Any = inner, at: int = at) -> None:
            if called == operation and device.calls.count(operation) == at + 1:
                inner.lossy_syncs += times == 0

        device.before = lose
        with running(tmp_path, device, clock=clock, **LIMITS) as engine:
            with contextlib.suppress(AssertionError):  # a store may be refused
                workload(engine, told)
            clock.now += 100.0
            if "kept" in told:
                fill(engine, 8000, 8)
                if times == 1:
                    expect_kept(engine, f"{name} {at}")
            assert drained(engine, TIMEOUT_S)
            engine.check_integrity()
            engine.flush(TIMEOUT_S)  # that files are gone is durable too
            files = inner.crash("drop")
        if "kept" in told:
            num_tried += 1
            with running(tmp_path, SimulatedDevice(files), **LIMITS) as engine:
                expect_kept(engine, f"{name} {at}, after a loss of power")
    assert num_tried > 5, "the faults come too early"


def test_a_region_that_stays_loses_no_pin(tmp_path: Path) -> None:
    """No file can be removed for a while: stores are dropped, and go on later."""
    clock, device = Clock(1000.0), FaultyDevice(SimulatedDevice())
    with running(tmp_path, device, clock=clock, **LIMITS) as engine:
        workload(engine, [])
        device.faults = [Fault(0, "unlink", times=1 << 30, error=errno.EACCES)]
        fill(engine, 8000, 8)
        expect_kept(engine, "nothing can be removed")
        device.faults = []
        clock.now += 100.0
        fill(engine, 9000, 12)
        expect_kept(engine, "it can again")
        assert Ledger().load(engine, keys(range(9033, 9036))) == [Reason.OK] * 3


def test_a_damaged_pin_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes, as does what a dying process left of one; one of a newer version is left alone."""
    device = SimulatedDevice({file_of("p") + ".tmp": b"half"})
    with running(tmp_path, device, **LIMITS) as engine:
        Ledger().store(engine, KEPT)
        assert pin(engine, "kept", KEPT)
        assert pin(engine, "harmed", KEPT[:2])
        monkeypatch.setattr(pins, "VERSION", 2)
        assert pin(engine, "newer", KEPT[:2])
        monkeypatch.undo()
    files = device.crash("kill")
    assert [name for name in files if name.endswith(".tmp")] == []
    good = files[file_of("harmed")]
    harmed = [good[:-1], b"", good + b"x", files[file_of("kept")]]
    for bit in range(0, 8 * len(good), 11):
        byte = bytes([good[bit // 8] ^ 1 << bit % 8])
        harmed.append(good[: bit // 8] + byte + good[bit // 8 + 1 :])
    for each in harmed:
        device = SimulatedDevice(files | {file_of("harmed"): each})
        with running(tmp_path, device, **LIMITS) as engine:
            assert [info.name for info in engine.pins()] == ["kept"]
            expect_kept(engine, "another is damaged")
        left = {file_of("kept"), file_of("newer")}
        assert set(filter(is_pin_name, device.list_names())) == left


def test_a_kept_region_goes_with_its_pin(tmp_path: Path) -> None:
    """Once nothing wants the page that could not be read, its room is given back."""
    device = FaultyDevice(SimulatedDevice())
    with running(tmp_path, device, **LIMITS) as engine:
        Ledger().store(engine, KEPT[:1])
        assert pin(engine, "kept", KEPT[:1])
        device.faults = [Fault(device.calls.count("readv"), "readv", times=2, error=errno.EIO)]
        assert Ledger().load(engine, KEPT[:1]) == [Reason.IO_ERROR]
        first = min(name for name in device.list_names() if name.startswith("region-"))
        fill(engine, 1000, 30)
        assert first in device.list_names()
        assert is_true(engine.unpin("kept"), TIMEOUT_S)
        fill(engine, 2000, 30)
        assert first not in device.list_names()

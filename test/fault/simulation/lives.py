"""Lives of a store: a workload until the power goes, and what the next one finds."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulation.device import MODES, CrashMode, SimulatedDevice
from simulation.engine import REGION, running
from simulation.ledger import TIMEOUT_S, Ledger, keys

from kit.waiting import drained
from sglang_tiered.errors import StoreError
from sglang_tiered.storage.region import RegionEngine

Files = dict[str, bytes]
Workload = Callable[["RegionEngine", Ledger], None]

_NUM_LIVES = 14


def run(
    directory: Path, device: SimulatedDevice, ledger: Ledger, workload: Workload, **changes: Any
) -> None:
    """The workload until it ends or the power goes; the engine ends in either case."""
    try:
        with running(directory, device, **changes) as engine:
            workload(engine, ledger)
            assert drained(engine, TIMEOUT_S)
    except StoreError:
        assert not device.powered, "the store was refused on a working device"
    assert not device.misuse
    assert device.num_open == 0, "descriptors are left open"


def found(directory: Path, device: SimulatedDevice, ledger: Ledger, owed: set[bytes]) -> set[bytes]:
    files = device.crash("kill")
    with running(directory, device) as engine:
        result = ledger.check(engine, owed, files)
    assert not device.misuse
    assert device.num_open == 0, "descriptors are left open"
    return result


def check_after(
    directory: Path, files: Files, ledger: Ledger, owed: set[bytes], *, once: bool = False
) -> set[bytes]:
    """Open what a crash left: twice, or only once."""
    device = SimulatedDevice(files)
    first = found(directory, device, ledger, owed)
    if once:
        return first
    assert found(directory, device, ledger, owed) == first, "the second opening found others"
    return first


def owed_after(mode: CrashMode, ledger: Ledger) -> set[bytes]:
    return ledger.acknowledged if mode == "kill" else ledger.durable


def live_below_capacity(directory: Path, seed: int) -> None:
    """Each life opens what the last crash left, stores, and ends at some change. Numbers of regions
    lost with their names are used again."""
    source = random.Random(seed)
    ledger = Ledger()
    files: Files = {}
    next_key = 0
    for life in range(_NUM_LIVES):
        device = SimulatedDevice(files, power_off_at=source.randint(3, 40), seed=life)

        def live(engine: RegionEngine, ledger: Ledger) -> None:
            nonlocal next_key
            for _ in range(source.randint(1, 5)):
                count = source.randint(1, 4)
                again = source.sample(sorted(ledger.submitted), min(2, len(ledger.submitted)))
                ledger.store(engine, keys(range(next_key, next_key + count)) + again)
                next_key += count
                if source.random() < 0.3:
                    ledger.sync(engine)

        run(directory, device, ledger, live, capacity_bytes=1024 * REGION)
        mode = source.choice(MODES)
        files = device.crash(mode, life)
        still = check_after(directory, files, ledger, owed_after(mode, ledger))
        # What a loss of power took is not owed any more, whatever acknowledged it.
        ledger.acknowledged &= still
        ledger.durable &= still


def live_full(directory: Path, seed: int) -> None:
    """The same under eviction: nothing is owed, but nothing may be wrong or beyond the cap."""
    source = random.Random(100 + seed)
    ledger = Ledger()
    files: Files = {}
    capacity = 4 * REGION
    for life in range(_NUM_LIVES):
        device = SimulatedDevice(files, power_off_at=source.randint(10, 120), seed=life)

        def live(engine: RegionEngine, ledger: Ledger) -> None:
            for _ in range(12):
                ledger.store(engine, keys(source.sample(range(60), 4)))
                wanted = keys(source.sample(range(60), 4))
                ledger.load(engine, wanted)
                ledger.perhaps_twice.update(wanted)  # hot: reclaim may write them again
                if source.random() < 0.2:
                    ledger.sync(engine)

        run(directory, device, ledger, live, capacity_bytes=capacity)
        files = device.crash(source.choice(MODES), life)
        disk = SimulatedDevice(files)
        with running(directory, disk, capacity_bytes=capacity) as engine:
            ledger.perhaps_twice |= ledger.check(engine, files=files)
            assert engine.stats().physical_bytes <= capacity
        files = disk.crash("kill")

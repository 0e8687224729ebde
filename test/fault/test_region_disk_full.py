"""The disk is full after any number of bytes, from the first or from any moment on.

Full is no illness: the engine drops stores or evicts regions of its own, says so, serves what it
has, and goes on when there is room again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulation.device import SimulatedDevice
from simulation.engine import REGION, running
from simulation.ledger import Ledger, keys

from kit.clock import Clock
from sglang_tiered.storage.base import Health, Reason
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.format import BLOCK_BYTES

LIMITS: dict[str, Any] = {"capacity_bytes": 5 * REGION}
NUM_STORES = 10
ROUNDS = range(NUM_STORES)
EXPECTED = {Reason.OK, Reason.DUPLICATE, Reason.NO_SPACE, Reason.REJECTED}


def fill(engine: RegionEngine, ledger: Ledger, clock: Clock, rounds: range) -> set[Reason]:
    seen: set[Reason] = set()
    for number in rounds:
        seen |= set(ledger.store(engine, keys(range(3 * number, 3 * number + 3))))
        ledger.load(engine, keys(range(3 * number + 3)))
        clock.now += 100.0
        assert engine.stats().health is Health.RUNNING, "a full disk is not a sick one"
        if number % 4 == 3:
            ledger.sync(engine)
    return seen


def expect_room_again(engine: RegionEngine, ledger: Ledger, clock: Clock) -> None:
    clock.now += 100.0
    fresh = keys(range(500, 504))
    assert ledger.store(engine, fresh) == [Reason.OK] * len(fresh)
    ledger.check(engine, fresh)


def live_on(directory: Path, device: SimulatedDevice, rounds: range) -> set[Reason]:
    """Fill a store on a disk too small, open it again while it still is, then make room."""
    clock, ledger = Clock(1000.0), Ledger()
    with running(directory, device, clock=clock, **LIMITS) as engine:
        seen = fill(engine, ledger, clock, rounds)
        held = ledger.check(engine)
    with running(directory, device, clock=clock, **LIMITS) as engine:
        # Not equal: what reclaim had saved may have been on its way back when it was counted.
        assert ledger.check(engine, held) >= held
        seen |= fill(engine, ledger, clock, range(rounds.stop, rounds.stop + 2))
        device.capacity_bytes = None
        expect_room_again(engine, ledger, clock)
    assert not device.misuse, device.misuse
    assert device.num_open == 0, "descriptors are left open"
    return seen


def num_blocks_wanted(directory: Path) -> int:
    device, ledger, clock = SimulatedDevice(sparse=True), Ledger(), Clock(1000.0)
    with running(directory, device, clock=clock, **LIMITS) as engine:
        assert fill(engine, ledger, clock, ROUNDS) == {Reason.OK}
        device.capacity_bytes = 1 << 40
        free = device.free_bytes()
    return ((1 << 40) - free) // BLOCK_BYTES


@pytest.mark.parametrize("sparse", [False, True])
def test_a_disk_of_any_number_of_blocks(tmp_path: Path, sparse: bool) -> None:
    """Where space is taken by writing, writes come short and fail in the middle of a region."""
    wanted = num_blocks_wanted(tmp_path / "wanted") if sparse else 6 * REGION // BLOCK_BYTES
    for blocks in range(0, wanted + 2, 2 if sparse else 3):
        device = SimulatedDevice(capacity_bytes=blocks * BLOCK_BYTES, sparse=sparse)
        seen = live_on(tmp_path / "store", device, ROUNDS)
        # The write that ends the space comes short, which by itself is no full disk.
        assert seen <= EXPECTED | ({Reason.IO_ERROR} if sparse else set()), f"{blocks} blocks"
        assert blocks or Reason.OK not in seen

"""What RegionEngine does beyond the contract every engine keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.faulty import FaultyDevice
from kit.runs import OTHER_NAMESPACE, make_run
from kit.tiers import close_whole, load, loads, open_region, store
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.storage.base import Erasure, PinRefusal, Reason, Run, Stop
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice

REGION = 64 * 1024


class Gate:
    """Holds the store inside its next ``writev`` until opened, or in the one after ``passes``."""

    def __init__(self) -> None:
        self.passes = 0
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, operation: str) -> None:
        if operation != "writev":
            return
        if self.passes:
            self.passes -= 1
        else:
            self.entered.set()
            assert self.opened.wait(TIMEOUT_S)


SIZES: dict[str, Any] = {"capacity_bytes": 4 * REGION, "region_bytes": REGION}


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def gated(tmp_path: Path, gate: Gate) -> Iterator[RegionEngine]:
    device = FaultyDevice(FileDevice(tmp_path), before=gate)
    engine = open_region(tmp_path, device=device, max_queued_store_bytes=20_000, **SIZES)
    yield engine
    gate.opened.set()
    close_whole(engine)


def test_a_large_store_does_not_await_hanging_devices(tmp_path: Path, gate: Gate) -> None:
    device = FaultyDevice(FileDevice(tmp_path), before=gate)
    bounds = {"max_queued_store_bytes": 20_000, "io_timeout_s": 0.2}
    engine = open_region(tmp_path, device=device, **bounds, **SIZES)
    large = engine.submit_store(make_run(1, [12_000] * 200))
    assert gate.entered.wait(TIMEOUT_S)
    keys = large.run.keys
    eventually(lambda: engine.lookup(keys).stop is Stop.UNHEALTHY, "a hanging device is unnoticed")
    assert finished(large) == [Reason.REJECTED] * 200
    assert engine.stats().queued_store_bytes == 0
    gate.opened.set()
    engine.close()


def test_a_store_of_the_old_namespace_stays_invisible(
    gated: RegionEngine, gate: Gate, tmp_path: Path
) -> None:
    run = make_run(1, [4096])
    job = gated.submit_store(run)
    assert gate.entered.wait(TIMEOUT_S)
    switch = threading.Thread(target=gated.set_namespace, args=(OTHER_NAMESPACE,))
    switch.start()
    switch.join(TIMEOUT_S)
    assert not switch.is_alive(), "weights change on the scheduler's thread, whatever the disk does"
    gate.opened.set()
    assert finished(job) == [Reason.OK]
    assert gated.lookup(run.keys) == (0, Stop.MISS)
    same_key = Run(run.keys, make_run(2, [4096]).pages)
    store(gated, same_key)
    loads(gated, same_key)
    gated.close()
    reopened = open_region(tmp_path, **SIZES)
    loads(reopened, run)
    reopened.close()


def test_loads_do_not_wait_behind_stores(gated: RegionEngine, gate: Gate) -> None:
    gate.opened.set()
    held = make_run(1, [4096])
    finished(gated.submit_store(held))
    gate.opened.clear()
    gate.entered.clear()
    waiting = gated.submit_store(make_run(2, [4096]))
    assert gate.entered.wait(TIMEOUT_S)
    assert load(gated, held) == [Reason.OK]
    assert not waiting.done


@pytest.mark.parametrize("passes", [0, 1])
def test_close_finishes_only_what_is_being_written(
    gated: RegionEngine, gate: Gate, passes: int
) -> None:
    gate.passes = passes  # the first write is the header of the region
    first = gated.submit_store(make_run(1, [4096]))
    assert gate.entered.wait(TIMEOUT_S)
    second = gated.submit_store(make_run(2, [4096]))
    closing = threading.Thread(target=gated.close)
    closing.start()
    if not passes:
        assert finished(first) == [Reason.CANCELLED]
    assert finished(second) == [Reason.CANCELLED]
    gate.opened.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert finished(first) == [Reason.OK if passes else Reason.CANCELLED]


def test_an_expiry_serves_no_erasure_early(tmp_path: Path, gate: Gate) -> None:
    """With a store under way the end of the log may still go back."""
    now = [1000.0]
    device = FaultyDevice(FileDevice(tmp_path), before=gate)
    engine = open_region(tmp_path, device=device, wall_clock=lambda: now[0], **SIZES)
    gate.opened.set()
    pinned = engine.pin("p", make_run(1, [4096]).keys, until_s=1010.0)
    assert not isinstance(pinned, PinRefusal) and is_true(pinned, TIMEOUT_S)
    gate.opened.clear()
    gate.entered.clear()
    gate.passes = 1  # the region's header, by the writer itself
    job = engine.submit_store(make_run(2, [4096]))
    assert gate.entered.wait(TIMEOUT_S)
    now[0] = 2000.0
    durable = engine.erase(Erasure.of(make_run(3, [4096]).keys))
    eventually(lambda: not len(engine._state.pins), "it does not expire")
    with engine._state.lock:
        assert engine._state.erases and engine._state.writes
    gate.opened.set()
    assert finished(job) == [Reason.OK] and is_true(durable, TIMEOUT_S)
    with engine._state.lock:
        assert engine._state.pins.pause_s() is None, "the writer would look again and again"
    engine.close()

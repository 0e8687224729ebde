"""Operation number N of the device fails once, for all N.

The workload opens a store, fills it beyond its cap, loads, passes barriers, clears, closes, opens
it again and goes on. Every operation of all that is hit, in the gate a third of them, over the
simulator, so that what a barrier promised can be held against a loss of power.
``test_region_faults.py`` does the stores and loads of one life on a real directory.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from simulation.device import SimulatedDevice
from simulation.engine import REGION, running
from simulation.ledger import TIMEOUT_S, Ledger, keys

from kit.clock import Clock
from kit.faulty import Fault, FaultyDevice
from kit.thirds import in_thirds, is_of, sweeps
from kit.waiting import drained
from sglang_tiered.errors import StoreError
from sglang_tiered.storage.base import Erasure, Health, Reason
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.format import BLOCK_BYTES

CAPACITY = 3 * REGION
LIMITS: dict[str, Any] = {"capacity_bytes": CAPACITY}
FRESH = range(900, 904)
NUM_TRIES = 4


def first_life(engine: RegionEngine, ledger: Ledger) -> None:
    for number in range(7):
        ledger.store(engine, keys(range(3 * number, 3 * number + 3)))
        ledger.load(engine, keys(range(3 * number, 3 * number + 3)))
        if number % 3 == 1:
            ledger.sync(engine)
    ledger.load(engine, keys(range(21)))


def second_life(engine: RegionEngine, ledger: Ledger) -> None:
    ledger.load(engine, keys(range(21)))
    ledger.store(engine, keys(range(21, 25)))
    is_true(engine.erase(Erasure()), TIMEOUT_S)
    ledger.store(engine, keys(range(25, 31)))
    ledger.sync(engine)
    ledger.load(engine, keys(range(21, 31)))


@contextlib.contextmanager
def life(directory: Path, device: FaultyDevice, clock: Clock) -> Iterator[RegionEngine]:
    """An engine on the device, tried again as an operator would where a fault refuses it."""
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_TRIES):
            with contextlib.suppress(StoreError):
                engine = stack.enter_context(running(directory, device, clock=clock, **LIMITS))
                break
        else:
            raise AssertionError(f"the store is refused {NUM_TRIES} times")
        yield engine
        assert drained(engine, TIMEOUT_S), "a job is left waiting"


def expect_recovery(
    engine: RegionEngine, ledger: Ledger, clock: Clock, device: FaultyDevice
) -> None:
    """After the pause the engine takes and serves everything again. The fault may come only now,
    and then costs this a try."""
    fresh = keys(FRESH)
    reasons: list[Reason] = []
    for _ in range(NUM_TRIES):
        clock.now += 100.0
        assert engine.stats().health is Health.RUNNING
        ledger.store(engine, fresh)
        reasons = ledger.load(engine, fresh)
        if reasons == [Reason.OK] * len(fresh):
            # The check itself is no part of the workload: what it reads does not fail.
            faults, device.faults = device.faults, []
            ledger.check(engine, fresh)
            device.faults = faults
            return
    raise AssertionError(f"no recovery: {reasons}")


def expect_barrier(engine: RegionEngine, ledger: Ledger) -> None:
    """One attempt may hit the fault. No barrier vouches again for pages that a sync failed on, as
    nobody knows whether they are on the disk; without those it works."""
    if not any(ledger.sync(engine) for _ in range(NUM_TRIES)):
        is_true(engine.erase(Erasure()), TIMEOUT_S)
        assert set(ledger.store(engine, keys(FRESH))) == {Reason.OK}
        assert ledger.sync(engine), "no barrier completes any more"


def lives(directory: Path, device: FaultyDevice) -> None:
    """Both lives, and what must hold in spite of the fault."""
    clock, ledger = Clock(1000.0), Ledger()
    disk = device.inner
    assert isinstance(disk, SimulatedDevice)
    with life(directory, device, clock) as engine:
        first_life(engine, ledger)
        expect_recovery(engine, ledger, clock, device)
    with life(directory, device, clock) as engine:
        second_life(engine, ledger)
        expect_recovery(engine, ledger, clock, device)
        expect_barrier(engine, ledger)
        files = disk.crash("drop")
        assert engine.stats().physical_bytes <= CAPACITY
    assert not disk.misuse, disk.misuse
    assert disk.num_open == 0, "descriptors are left open"
    with running(directory, SimulatedDevice(files), **LIMITS) as engine:
        ledger.check(engine, keys(FRESH))


def calls_without_faults(directory: Path) -> list[str]:
    device = FaultyDevice(SimulatedDevice())
    lives(directory, device)
    return list(device.calls)


def test_the_workload_uses_every_operation(tmp_path: Path) -> None:
    operations = {name for name in dir(FileDevice) if name[0] != "_"} - {"release", "status"}
    assert operations <= vars(FaultyDevice).keys() & vars(SimulatedDevice).keys()
    assert set(calls_without_faults(tmp_path)) == operations - {"close", "file_bytes"}


FAULTS: dict[str, tuple[Any, int, Any]] = {  # operation, stride, and what the fault at N is
    "EIO": (None, 1, lambda at: {"error": errno.EIO}),
    "EIO, three times": (None, 5, lambda at: {"error": errno.EIO, "times": 3}),
    **{
        f"{operation} finds the disk full": (operation, 1, lambda at: {"error": errno.ENOSPC})
        for operation in ("create", "writev", "sync", "sync_directory")
    },
    **{
        f"{operation} comes short": (operation, 2, lambda at: {"short_bytes": at % 3 * BLOCK_BYTES})
        for operation in ("readv", "writev")
    },
    "readv is damaged on its way": ("readv", 2, lambda at: {"flip_bit": 7919 * at}),
    # Permission taken away, filesystem remounted read-only, no descriptors left, a signal.
    **{
        errno.errorcode[code]: (None, 11, lambda at, code=code: {"error": code})
        for code in (errno.EACCES, errno.EROFS, errno.EMFILE, errno.EINTR)
    },
}


@sweeps(
    FAULTS,
    large=[
        *("EIO", "EIO, three times", "writev finds the disk full"),
        *("readv comes short", "writev comes short", "readv is damaged on its way"),
    ],
)
def test_operation_n_fails(tmp_path: Path, name: str, third: int | None) -> None:
    operation, stride, kind = FAULTS[name]
    calls = calls_without_faults(tmp_path)
    num_calls = len(calls) if operation is None else calls.count(operation)
    for at in filter(partial(is_of, third), range(len(name) % stride, num_calls, stride)):
        fault = Fault(at, operation, **kind(at))
        try:
            lives(tmp_path, FaultyDevice(SimulatedDevice(), [fault]))
        except Exception as error:
            raise AssertionError(f"{fault}: {error}") from error


def below_capacity(directory: Path, device: FaultyDevice) -> None:
    """Nothing is evicted, so whatever happened on the way, what was acknowledged is owed: after
    ``kill -9`` all of it, after a loss of power all before a barrier. One region takes it all and
    has no footer until it is closed, so recovery finds nothing behind a hole in it."""
    clock, ledger = Clock(1000.0), Ledger()
    disk = device.inner
    assert isinstance(disk, SimulatedDevice)
    images: list[tuple[dict[str, bytes], set[bytes]]] = []
    with running(directory, device, clock=clock, region_bytes=8 * REGION) as engine:
        for start in range(0, 32, 8):
            jobs = [
                ledger.submit(engine, keys(range(n, n + 2))) for n in range(start, start + 8, 2)
            ]
            for job in jobs:
                ledger.settle(job)
            clock.now += 100.0
            ledger.sync(engine)
        images += [(disk.crash("kill"), set(ledger.acknowledged))]
        images += [(disk.crash("drop"), set(ledger.durable))]
    images += [(disk.crash("kill"), ledger.acknowledged), (disk.crash("drop"), ledger.durable)]
    for files, owed in images:
        with running(directory, SimulatedDevice(files)) as engine:
            ledger.check(engine, owed)


@in_thirds
@pytest.mark.parametrize("kind", ["EIO", "short write"])
def test_no_single_failure_costs_an_acknowledged_page(
    tmp_path: Path, kind: str, third: int
) -> None:
    counting = FaultyDevice(SimulatedDevice())
    below_capacity(tmp_path, counting)
    if kind == "EIO":
        faults = [Fault(at, error=errno.EIO) for at in range(len(counting.calls))]
    else:
        num_writes = counting.calls.count("writev")
        faults = [Fault(at, "writev", short_bytes=BLOCK_BYTES) for at in range(num_writes)]
    for fault in faults:
        if not is_of(third, fault.at):
            continue
        try:
            below_capacity(tmp_path, FaultyDevice(SimulatedDevice(), [fault]))
        except StoreError:
            assert fault.at < 4, f"{fault} hits nothing of opening"
        except Exception as error:
            raise AssertionError(f"{fault}: {error}") from error


@pytest.mark.parametrize("kind", [{"error": errno.EIO}, {"short_bytes": BLOCK_BYTES}])
def test_nothing_behind_a_failed_write_counts(tmp_path: Path, kind: dict[str, int]) -> None:
    """Two extents are under way; the second is written, then the first fails."""
    begun, number = [threading.Event() for _ in range(3)], itertools.count()

    def hold(operation: str) -> None:
        if operation == "writev" and (at := next(number)) < 3:  # 0 is the header of the region
            begun[at].set()
            assert at != 1 or begun[2].wait(TIMEOUT_S)

    disk = SimulatedDevice()
    device = FaultyDevice(disk, [Fault(1, "writev", **kind)], before=hold)
    clock, ledger = Clock(1000.0), Ledger()
    with running(tmp_path, device, clock=clock) as engine:
        first = ledger.submit(engine, keys(range(1)))
        assert begun[1].wait(TIMEOUT_S)
        second = ledger.submit(engine, keys(range(1, 2)))
        assert ledger.settle(first) == [Reason.IO_ERROR]
        ledger.settle(second)
        files, owed = disk.crash("kill"), set(ledger.acknowledged)
        clock.now += 100.0
        ledger.store(engine, keys(range(4)))
        ledger.check(engine, keys(range(4)))
        later = disk.crash("kill")
    for image, pages in ((files, owed), (later, set(keys(range(4))))):
        with running(tmp_path, SimulatedDevice(image)) as engine:
            ledger.check(engine, pages)


@pytest.mark.parametrize("operation", ["create", "writev"])
def test_a_disk_without_room_costs_one_region(tmp_path: Path, operation: Any) -> None:
    """As where a snapshot keeps the blocks of what is removed: none more would give any."""
    disk, ledger = SimulatedDevice(), Ledger()
    device = FaultyDevice(disk)

    def num_regions() -> int:
        return sum(name.startswith("region-") for name in disk.list_names())

    with running(tmp_path, device, capacity_bytes=5 * REGION) as engine:
        for start in range(0, 30, 3):
            ledger.store(engine, keys(range(start, start + 3)))
        held, fresh = num_regions(), itertools.count(500)
        device.faults = [Fault(0, operation, times=1 << 30, error=errno.ENOSPC)]
        while ledger.store(engine, keys([next(fresh)])) == [Reason.OK]:
            pass  # until the open region is full
        assert num_regions() >= held - 2 > 0, "one for the cap, and one for the disk"

"""A purge, while the power goes, the process dies, the disk refuses, or reclaim is at work."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING

import pytest
from simulation.device import CrashMode, SimulatedDevice
from simulation.engine import REGION, running
from simulation.ledger import TIMEOUT_S, Ledger, content, keys

from kit.faulty import Fault, FaultyDevice
from kit.runs import NAMESPACE
from kit.waiting import drained
from sglang_tiered.errors import StoreFormatError
from sglang_tiered.storage.base import Health, Job, Reason, Run, Stop
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.files import PURGES_NAME
from sglang_tiered.storage.region.purging import purges
from sglang_tiered.storage.region.purging.purges import Bound, Purges

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_tiered.storage.region import RegionEngine

A, B = b"a" * 16, b"b" * 16
OF_A, OF_B, LATER = keys(range(12)), keys(range(100, 112)), keys(range(200, 206))
CRASHES: tuple[tuple[CrashMode, int], ...] = (
    ("kill", 0),
    ("drop", 0),
    ("torn", 0),
    ("reorder", 0),
    ("reorder", 1),
)


def submit(engine: RegionEngine, wanted: Sequence[bytes], tenant: bytes) -> Job:
    pages = tuple((memoryview(content(NAMESPACE, each)),) for each in wanted)
    return engine.submit_store(Run(tuple(wanted), pages, tenant))


def store(engine: RegionEngine, wanted: Sequence[bytes], tenant: bytes) -> list[Reason]:
    job = submit(engine, wanted, tenant)
    assert job.wait(TIMEOUT_S), "a store did not finish"
    return job.reasons


def held(engine: RegionEngine, wanted: Sequence[bytes]) -> int:
    """Pages that load, which are checked to be the right ones."""
    assert engine.stats().health is Health.RUNNING, engine.stats()
    return Ledger().load(engine, wanted).count(Reason.OK)


def settle(engine: RegionEngine, wanted: Sequence[bytes]) -> int:
    """Pages that are found once what reclaim saved is back in the log."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(engine.lookup([each]).stop is Stop.PENDING for each in wanted):
        assert time.monotonic() < deadline, "what reclaim saved does not come back"
    return sum(engine.lookup([each]).num_hits for each in wanted)


def fill(engine: RegionEngine) -> None:
    for start in range(0, 12, 3):
        assert store(engine, OF_A[start : start + 3], A) == [Reason.OK] * 3
        assert store(engine, OF_B[start : start + 3], B) == [Reason.OK] * 3
    assert engine.flush(TIMEOUT_S)


def purge_amid_stores(engine: RegionEngine, told: list[str]) -> None:
    """``told`` is what the caller knows: that the purge began, and that it is durable."""
    fill(engine)
    jobs = [submit(engine, LATER[:3], A), submit(engine, keys(range(300, 303)), B)]
    told.append("begun")
    if is_true(engine.begin_purge(A), TIMEOUT_S):
        told.append("durable")
    for job in jobs:
        assert job.wait(TIMEOUT_S)
    if "durable" in told and store(engine, LATER[3:], A) == [Reason.OK] * 3:
        told.append("again")
        if engine.flush(TIMEOUT_S):
            told.append("synced")


def test_power_may_fail_anywhere_in_a_purge(tmp_path: Path) -> None:
    at = num_begun = num_durable = 0
    while True:
        device, told = SimulatedDevice(power_off_at=at), list[str]()
        with running(tmp_path, device) as engine:
            if device.powered:
                try:
                    purge_amid_stores(engine, told)
                except AssertionError:
                    assert not device.powered, "a purge fails on a disk that works"
        assert not device.misuse, device.misuse
        num_begun += "begun" in told and not device.powered
        num_durable += "durable" in told and not device.powered
        for mode, seed in CRASHES if told else ():
            with running(tmp_path, SimulatedDevice(device.crash(mode, seed))) as engine:
                where = f"change {at}, {mode}, seed {seed}, {told}"
                assert held(engine, OF_B) == 12, where
                found = held(engine, OF_A), held(engine, LATER[:3])
                if "durable" in told:
                    assert found == (0, 0), where
                    since = held(engine, LATER[3:])
                    owed = "synced" in told or ("again" in told and mode == "kill")
                    assert since == 3 if owed else since <= 3, where
                # And what a recovery makes of it stays so.
                assert store(engine, keys(range(400, 403)), A) == [Reason.OK] * 3
                assert engine.flush(TIMEOUT_S)
            # The next process of the same disk.
        if device.powered:
            break
        at += 1
    assert num_begun > 3, "the power never went while a purge was under way"
    assert num_durable > 3, "the power never went behind a purge"


@pytest.mark.parametrize("mode", ["kill", "drop", "reorder"])
def test_pages_after_a_purge_survive_two_power_losses(tmp_path: Path, mode: CrashMode) -> None:
    """The open region, and its number, may be lost with the first: the next must not reuse it, or
    the bound would kill what it holds."""
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        assert store(engine, OF_A, A) == [Reason.OK] * 12  # not synced
        assert is_true(engine.begin_purge(A), TIMEOUT_S)
        device.powered = False
    device = SimulatedDevice(device.crash(mode))
    with running(tmp_path, device) as engine:
        assert held(engine, OF_A) == 0
        assert store(engine, OF_A, A) == [Reason.OK] * 12
        assert engine.flush(TIMEOUT_S)
        device.powered = False
    with running(tmp_path, SimulatedDevice(device.crash(mode))) as engine:
        assert held(engine, OF_A) == 12


def test_a_purge_holds_for_other_namespaces_too(tmp_path: Path) -> None:
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
    device = device.restart()
    with running(tmp_path, device, namespace=b"\x77" * 32) as engine:
        assert engine.stats().num_pages == 0
        assert is_true(engine.begin_purge(A), TIMEOUT_S)
    with running(tmp_path, device.restart()) as engine:
        assert (held(engine, OF_A), held(engine, OF_B)) == (0, 12)


def test_clear_is_durable_though_files_cannot_go(tmp_path: Path) -> None:
    inner = SimulatedDevice()
    device = FaultyDevice(inner)
    with running(tmp_path, device) as engine:
        fill(engine)
        device.faults = [Fault(0, "unlink", times=1 << 30, error=errno.EACCES)]
        assert is_true(engine.begin_purge(None), TIMEOUT_S)
        assert held(engine, OF_A + OF_B) == 0
    with running(tmp_path, inner.restart()) as engine:
        assert held(engine, OF_A + OF_B) == 0
        assert store(engine, OF_A, A) == [Reason.OK] * 12


def test_an_unwritten_purge_goes_with_the_next(tmp_path: Path) -> None:
    inner = SimulatedDevice()
    device = FaultyDevice(inner)
    with running(tmp_path, device) as engine:
        fill(engine)
        device.faults = [Fault(0, "replace_file", times=1 << 30, error=errno.EIO)]
        assert not is_true(engine.begin_purge(A), TIMEOUT_S)
        assert held(engine, OF_A) == 0, "not durable, but hidden"
        device.faults = []
        assert is_true(engine.begin_purge(b"c" * 16), TIMEOUT_S)
    with running(tmp_path, inner.restart()) as engine:
        assert (held(engine, OF_A), held(engine, OF_B)) == (0, 12)


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "older"])
def test_damaged_purges_bring_nothing_back(tmp_path: Path, harm: str) -> None:
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
        assert is_true(engine.begin_purge(A), TIMEOUT_S)
    files = device.crash("kill")
    good = files[PURGES_NAME]
    for bit in range(0, 8 * len(good), 7) if harm == "flip" else [0]:
        bad = bytearray(good)
        if harm == "flip":
            bad[bit // 8] ^= 1 << bit % 8
        else:
            bad = {"cut": bad[:-1], "empty": bytearray(), "older": bytearray(b"SGLTPURG")}[harm]
        device = SimulatedDevice(files | {PURGES_NAME: bytes(bad)})
        with running(tmp_path, device) as engine:
            assert held(engine, OF_A + OF_B) == 0, "everything may be what was purged"
            assert store(engine, OF_A, A) == [Reason.OK] * 12
        with running(tmp_path, device.restart()) as engine:
            assert held(engine, OF_A) == 12, "damage is paid for once"


def test_newer_purges_refuse_the_store_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
    monkeypatch.setattr(purges, "FORMAT_VERSION", 77)
    files = device.crash("kill") | {PURGES_NAME: purges.pack(Purges())}
    monkeypatch.undo()
    device = SimulatedDevice(files)
    with (
        pytest.raises(StoreFormatError, match="format 77, newer than"),
        running(tmp_path, device),
    ):
        pass
    assert device.crash("kill") == files


def test_purges_go_with_the_last_older_region(tmp_path: Path) -> None:
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
        for number in range(20):
            assert is_true(engine.begin_purge(bytes([number]) * 16), TIMEOUT_S)
        assert len(purges.read(device).tenants) == 20
        assert is_true(engine.begin_purge(None), TIMEOUT_S)
        assert is_true(engine.begin_purge(A), TIMEOUT_S)
    assert set(purges.read(device).tenants) <= {A}
    with running(tmp_path, device.restart()) as engine:
        assert store(engine, OF_A, A) == [Reason.OK] * 12


def test_a_region_emptied_by_purge_is_freed(tmp_path: Path) -> None:
    with running(tmp_path, SimulatedDevice()) as engine:
        for start in range(0, 60, 6):
            assert store(engine, keys(range(start, start + 6)), A) == [Reason.OK] * 6
        before = engine.stats().physical_bytes
        assert is_true(engine.begin_purge(A), TIMEOUT_S)
        assert before > 3 * REGION
        assert engine.stats().physical_bytes <= REGION, "only the open one stays"
        assert engine.stats().num_pages_evicted == 0


def test_pages_being_reinserted_are_purged_too(tmp_path: Path) -> None:
    """Reclaim holds hot pages of the tenant in memory while the purge is asked for."""
    reading, go_on = threading.Event(), threading.Event()
    armed = False

    def before(operation: str) -> None:
        if armed and operation == "readv" and threading.current_thread().name == "tier-writer":
            reading.set()
            assert go_on.wait(TIMEOUT_S)

    device = FaultyDevice(SimulatedDevice(), before=before)
    with running(tmp_path, device, capacity_bytes=3 * REGION) as engine:
        hot = [next(each for each in OF_A if len(content(NAMESPACE, each)) == 4096)]
        assert store(engine, hot, A) == [Reason.OK]
        assert Ledger(submitted=set(hot)).check(engine) == set(hot)
        armed = True
        # No more than it takes, or what comes back would be reclaimed again.
        for number in range(1000, 1100, 3):
            job = submit(engine, keys(range(number, number + 3)), B)
            while not job.wait(0.01) and not reading.is_set():
                pass
            if reading.is_set():
                break
        assert reading.is_set(), "reclaim saved nothing"
        purged = engine.begin_purge(A)
        assert not engine.lookup(hot).num_hits
        armed = False
        go_on.set()
        assert is_true(purged, TIMEOUT_S)
        assert drained(engine, TIMEOUT_S)
        assert settle(engine, hot) == 0
        assert A not in {entry.tenant for entry in engine.tenants(9) if entry.num_pages}


def test_tenants_survive_restart_and_reinsertion(tmp_path: Path) -> None:
    device = SimulatedDevice()
    hot = [next(each for each in OF_A if len(content(NAMESPACE, each)) == 4096)]
    with running(tmp_path, device, capacity_bytes=4 * REGION) as engine:
        assert store(engine, hot, A) == [Reason.OK]
        for number in range(300, 400, 4):
            assert settle(engine, hot) == 1, "hot pages stay"
            assert Ledger(submitted=set(hot)).check(engine)
            store(engine, keys(range(number, number + 4)), B)
        settle(engine, hot)
        assert engine.stats().num_pages_reinserted > 0
        before = {entry.tenant: entry[1:] for entry in engine.tenants(9)}
        assert before[A][0] == 1
    with running(tmp_path, device.restart(), capacity_bytes=4 * REGION) as engine:
        assert {entry.tenant: entry[1:] for entry in engine.tenants(9)} == before
        assert is_true(engine.begin_purge(A), TIMEOUT_S)
        assert held(engine, hot) == 0


def test_a_tenants_share_costs_others_nothing(tmp_path: Path) -> None:
    """Its regions hold a few pages of another tenant, which move."""
    with running(tmp_path, SimulatedDevice(), max_tenant_bytes=4 * REGION) as engine:
        others = []
        for number in range(150):
            assert set(store(engine, keys(range(5 * number, 5 * number + 5)), A)) <= {
                Reason.OK,
                Reason.OVER_SHARE,
            }
            if number % 8 == 0:  # less than a share in all
                others.append(keys([10_000 + number]))
                assert store(engine, others[-1], B) == [Reason.OK]
            taken = {entry.tenant: entry.physical_bytes for entry in engine.tenants(9)}
            assert taken[A] <= 4 * REGION
        assert settle(engine, [each for other in others for each in other]) == len(others)
        newest = settle(engine, keys(range(725, 750)))
        assert newest > 12, "its newest pages are not kept"
        assert engine.stats().physical_bytes < 12 * REGION


def test_bounds_beyond_the_most_are_folded_into_one() -> None:
    folded = Purges()
    for number in range(purges.MAX_TENANTS + 1):
        folded.add(number.to_bytes(16, "little"), Bound(number + 1, 4096))
    assert len(folded.tenants) == purges.MAX_TENANTS // 2 + 1
    assert folded.everyone == Bound(purges.MAX_TENANTS // 2, 4096)
    assert purges.unpack(purges.pack(folded)) == folded

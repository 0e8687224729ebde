"""Erasing on NVMe, beside what ``test/contract/test_erase.py`` asks of every tier: damage, formats,
bounds, and reclaim at work."""

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
from sglang_tiered.storage.base import NO_TENANT, Erasure, Health, Job, Reason, Run, Stop
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.erasing import erased
from sglang_tiered.storage.region.erasing.erased import VERSION_WITH_KEYS, Bound, Forgotten, Purges
from sglang_tiered.storage.region.files import PURGES_NAME
from sglang_tiered.storage.region.format import FORMAT_VERSION
from sglang_tiered.storage.region.pinning.pins import PinRefusal, file_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_tiered.storage.region import RegionEngine

A, B = b"a" * 16, b"b" * 16
OF_A, OF_B, LATER = keys(range(12)), keys(range(100, 112)), keys(range(200, 206))
GONE, STAYS = OF_A[::3], [each for number, each in enumerate(OF_A) if number % 3]


def submit(engine: RegionEngine, wanted: Sequence[bytes], tenant: bytes = NO_TENANT) -> Job:
    pages = tuple((memoryview(content(NAMESPACE, each)),) for each in wanted)
    return engine.submit_store(Run(tuple(wanted), pages, tenant))


def store(engine: RegionEngine, wanted: Sequence[bytes], tenant: bytes = NO_TENANT) -> list[Reason]:
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


@pytest.mark.parametrize("mode", ["kill", "drop", "reorder"])
def test_pages_after_a_purge_survive_two_power_losses(tmp_path: Path, mode: CrashMode) -> None:
    """The open region, and its number, may be lost with the first: the next must not reuse it, or
    the bound would kill what it holds."""
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        assert store(engine, OF_A, A) == [Reason.OK] * 12  # not synced
        assert is_true(engine.erase(Erasure(tenant=A)), TIMEOUT_S)
        device.powered = False
    device = SimulatedDevice(device.crash(mode))
    with running(tmp_path, device) as engine:
        assert held(engine, OF_A) == 0
        assert store(engine, OF_A, A) == [Reason.OK] * 12
        assert engine.flush(TIMEOUT_S)
        device.powered = False
    with running(tmp_path, SimulatedDevice(device.crash(mode))) as engine:
        assert held(engine, OF_A) == 12


def test_clear_is_durable_though_files_cannot_go(tmp_path: Path) -> None:
    inner = SimulatedDevice()
    device = FaultyDevice(inner)
    with running(tmp_path, device) as engine:
        fill(engine)
        device.faults = [Fault(0, "unlink", times=1 << 30, error=errno.EACCES)]
        assert is_true(engine.erase(Erasure()), TIMEOUT_S)
        assert held(engine, OF_A + OF_B) == 0
    with running(tmp_path, inner.restart()) as engine:
        assert held(engine, OF_A + OF_B) == 0
        assert store(engine, OF_A, A) == [Reason.OK] * 12


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "older"])
@pytest.mark.parametrize("what", [Erasure(tenant=A), Erasure.of(GONE)], ids=["tenant", "pages"])
def test_damage_brings_nothing_erased_back(tmp_path: Path, what: Erasure, harm: str) -> None:
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
        assert is_true(engine.erase(what), TIMEOUT_S)
    files = device.crash("kill")
    good = files[PURGES_NAME]
    for bit in range(0, 8 * len(good), 13) if harm == "flip" else [0]:
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
    monkeypatch.setattr(erased, "FORMAT_VERSION", 77)
    files = device.crash("kill") | {PURGES_NAME: erased.pack(Purges())}
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
            assert is_true(engine.erase(Erasure(tenant=bytes([number]) * 16)), TIMEOUT_S)
        assert len(erased.read(device).tenants) == 20
        assert is_true(engine.erase(Erasure()), TIMEOUT_S)
        assert is_true(engine.erase(Erasure(tenant=A)), TIMEOUT_S)
    assert set(erased.read(device).tenants) <= {A}
    with running(tmp_path, device.restart()) as engine:
        assert store(engine, OF_A, A) == [Reason.OK] * 12


def test_a_region_emptied_by_purge_is_freed(tmp_path: Path) -> None:
    with running(tmp_path, SimulatedDevice()) as engine:
        for start in range(0, 60, 6):
            assert store(engine, keys(range(start, start + 6)), A) == [Reason.OK] * 6
        before = engine.stats().physical_bytes
        assert is_true(engine.erase(Erasure(tenant=A)), TIMEOUT_S)
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
        purged = engine.erase(Erasure(tenant=A))
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
        assert is_true(engine.erase(Erasure(tenant=A)), TIMEOUT_S)
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
    for number in range(erased.MAX_TENANTS + 1):
        folded.add(number.to_bytes(16, "little"), Bound(number + 1, 4096))
    assert len(folded.tenants) == erased.MAX_TENANTS // 2 + 1
    assert folded.everyone == Bound(erased.MAX_TENANTS // 2, 4096)
    assert erased.unpack(erased.pack(folded)) == folded


# ---- Single pages ----


def test_what_was_under_way_never_lands(tmp_path: Path) -> None:
    """One store is being written, two have no place yet, and one comes after the call."""
    writing, go_on = threading.Event(), threading.Event()
    armed = False

    def before(operation: str) -> None:
        if armed and operation == "writev":
            writing.set()
            assert go_on.wait(TIMEOUT_S)

    inner = SimulatedDevice()
    with running(tmp_path, FaultyDevice(inner, before=before)) as engine:
        fill(engine)
        armed = True
        first = submit(engine, LATER[:2])
        assert writing.wait(TIMEOUT_S)
        queued = [submit(engine, LATER[2:4]), submit(engine, [LATER[4]])]
        durable = engine.erase(Erasure.of([LATER[0], LATER[2], LATER[4], GONE[0]]))
        wanted = [*LATER[:5], GONE[0]]
        assert not any(engine.contains(wanted))
        assert engine.lookup([LATER[0]]).stop is Stop.MISS
        again = submit(engine, [LATER[0], GONE[0]])
        armed = False
        go_on.set()
        assert is_true(durable, TIMEOUT_S)
        for job in (first, *queued, again):
            assert job.wait(TIMEOUT_S)
        assert again.reasons == [Reason.OK] * 2
        expected = [True, True, False, True, False, True]
        assert engine.contains(wanted) == expected
        assert drained(engine, TIMEOUT_S)
        engine.check_integrity()
    with running(tmp_path, inner.restart()) as engine:
        assert engine.contains(wanted) == expected
        assert held(engine, wanted) == 4


def test_pages_being_rescued_are_forgotten_too(tmp_path: Path) -> None:
    """Reclaim holds pinned pages in memory, on their way to the end of the log."""
    reading, go_on = threading.Event(), threading.Event()
    armed = False

    def before(operation: str) -> None:
        if armed and operation == "readv" and threading.current_thread().name == "tier-writer":
            reading.set()
            assert go_on.wait(TIMEOUT_S)

    inner = SimulatedDevice()
    device = FaultyDevice(inner, before=before)
    with running(tmp_path, device, capacity_bytes=5 * REGION) as engine:
        assert store(engine, OF_A[:3]) == [Reason.OK] * 3
        made = engine.pin("p", OF_A[:3])
        assert not isinstance(made, PinRefusal)
        assert is_true(made, TIMEOUT_S)
        armed = True
        for number in range(1000, 1100, 3):
            job = submit(engine, keys(range(number, number + 3)))
            while not job.wait(0.01) and not reading.is_set():
                pass
            if reading.is_set():
                break
        assert reading.is_set(), "reclaim rescued nothing"
        durable = engine.erase(Erasure.of(OF_A[:2]))
        assert engine.contains(OF_A[:3]) == [False, False, True]
        armed = False
        go_on.set()
        assert is_true(durable, TIMEOUT_S)
        assert drained(engine, TIMEOUT_S)
        assert engine.contains(OF_A[:3]) == [False, False, True]
        assert [info.num_pages for info in engine.pins()] == [1]
        engine.check_integrity()
    with running(tmp_path, inner.restart(), capacity_bytes=5 * REGION) as engine:
        assert engine.contains(OF_A[:3]) == [False, False, True]
        assert [info.num_pages for info in engine.pins()] == [1]


def test_a_forgotten_page_leaves_its_pins(tmp_path: Path) -> None:
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
        for name, wanted in (("some", OF_A[:6]), ("all", GONE)):
            assert not isinstance(engine.pin(name, wanted), PinRefusal)
        assert is_true(engine.erase(Erasure.of(GONE)), TIMEOUT_S)
        assert [(info.name, info.num_pages) for info in engine.pins()] == [("some", 4)]
        assert store(engine, GONE) == [Reason.OK] * 4
        assert [info.num_pages for info in engine.pins()] == [4], "pinned again"
        assert file_of("all") not in device.list_names()
    with running(tmp_path, device.restart()) as engine:
        assert [(info.name, info.num_pages) for info in engine.pins()] == [("some", 4)]


def test_older_programs_refuse_while_pages_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of version 3 takes none above; it opens the store again once that is safe."""
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
        assert is_true(engine.erase(Erasure.of(GONE)), TIMEOUT_S)
        assert version_of(device) == VERSION_WITH_KEYS
        data = device.read_file(PURGES_NAME)
    monkeypatch.setattr(erased, "VERSION_WITH_KEYS", FORMAT_VERSION)
    with pytest.raises(StoreFormatError, match="format 4, newer than 3"):
        erased.unpack(data)
    monkeypatch.undo()
    device = device.restart()
    with running(tmp_path, device, capacity_bytes=4 * REGION) as engine:
        for number in range(1000, 1060, 3):
            assert store(engine, keys(range(number, number + 3))) == [Reason.OK] * 3
        assert is_true(engine.erase(Erasure(tenant=b"t" * 16)), TIMEOUT_S)
        assert version_of(device) == FORMAT_VERSION


def version_of(device: SimulatedDevice) -> int:
    return int.from_bytes(device.read_file(PURGES_NAME)[8:12], "little")


def test_beyond_the_most_more_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erased, "MAX_FORGOTTEN", 4)
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
        for each in GONE:
            assert is_true(engine.erase(Erasure.of([each])), TIMEOUT_S)
        assert store(engine, LATER[:3]) == [Reason.OK] * 3
        assert is_true(engine.erase(Erasure.of([LATER[0]])), TIMEOUT_S)
        assert len(erased.read(device).forgotten) == 3
    with running(tmp_path, device.restart()) as engine:
        assert held(engine, [*GONE, LATER[0]]) == 0
        assert held(engine, LATER[1:3]) == 2
        assert held(engine, STAYS) == 0, "as far back as the older half"


def test_bounds_of_keys_survive_packing() -> None:
    made = Purges()
    made.forget([b"\0" * 32, b"a" + bytes(31), b"b" * 32], Bound(3, 8192))
    made.forget([b"b" * 32], Bound(5, 4096))
    made.add(b"t" * 16, Bound(4, 4096))
    assert erased.unpack(erased.pack(made)) == made
    assert len(made.forgotten) == 3
    assert made.next_sequence() == 6
    assert made.forget_before(5)
    assert made.is_empty, "a bound at the first extent of a region says nothing of it"
    assert erased.unpack(erased.pack(made)) == Purges(forgotten=Forgotten())


def test_forgetting_checks_its_keys(tmp_path: Path) -> None:
    with running(tmp_path, SimulatedDevice()) as engine:
        with pytest.raises(ValueError, match="a key has 1 bytes, expected 32"):
            engine.erase(Erasure.of([b"k"]))
        assert is_true(engine.erase(Erasure.of([])), 0.0)
    assert not is_true(engine.erase(Erasure.of(OF_A)), 0.0), "closed"

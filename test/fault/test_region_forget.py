"""Single pages that are forgotten, while stores, reclaim, crashes and damage go on."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

import pytest
from simulation.device import CrashMode, SimulatedDevice
from simulation.engine import REGION, running
from simulation.ledger import TIMEOUT_S, Ledger, content, keys

from kit.faulty import Fault, FaultyDevice
from kit.runs import NAMESPACE
from kit.waiting import drained
from sglang_tiered.errors import StoreFormatError
from sglang_tiered.storage.base import Job, Reason, Run, Stop
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.files import PURGES_NAME
from sglang_tiered.storage.region.format import FORMAT_VERSION
from sglang_tiered.storage.region.pinning.pins import PinRefusal, file_of
from sglang_tiered.storage.region.purging import forgotten, purges
from sglang_tiered.storage.region.purging.forgotten import Forgotten
from sglang_tiered.storage.region.purging.purges import VERSION_WITH_KEYS, Bound, Purges

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_tiered.storage.region import RegionEngine

ALL = keys(range(12))
GONE, STAYS = ALL[::3], [each for number, each in enumerate(ALL) if number % 3]
LATER = keys(range(200, 206))
CRASHES: tuple[tuple[CrashMode, int], ...] = (
    ("kill", 0),
    ("drop", 0),
    ("torn", 0),
    ("reorder", 0),
    ("reorder", 1),
)


def submit(engine: RegionEngine, wanted: Sequence[bytes]) -> Job:
    pages = tuple((memoryview(content(NAMESPACE, each)),) for each in wanted)
    return engine.submit_store(Run(tuple(wanted), pages))


def store(engine: RegionEngine, wanted: Sequence[bytes]) -> list[Reason]:
    job = submit(engine, wanted)
    assert job.wait(TIMEOUT_S), "a store did not finish"
    return job.reasons


def held(engine: RegionEngine, wanted: Sequence[bytes]) -> int:
    """Pages that load, which are checked to be the right ones."""
    return Ledger().load(engine, wanted).count(Reason.OK)


def fill(engine: RegionEngine) -> None:
    for start in range(0, 12, 3):
        assert store(engine, ALL[start : start + 3]) == [Reason.OK] * 3
    assert engine.flush(TIMEOUT_S)


def forget_amid_stores(engine: RegionEngine, told: list[str]) -> None:
    fill(engine)
    job = submit(engine, LATER[:3])
    told.append("begun")
    if is_true(engine.forget([*GONE, LATER[0]]), TIMEOUT_S):
        told.append("durable")
    assert job.wait(TIMEOUT_S)
    if "durable" in told and store(engine, [*GONE[:2], *LATER[3:]]) == [Reason.OK] * 5:
        told.append("again")
        if engine.flush(TIMEOUT_S):
            told.append("synced")


def test_power_may_fail_anywhere_when_forgetting(tmp_path: Path) -> None:
    at = num_begun = num_durable = 0
    while True:
        device, told = SimulatedDevice(power_off_at=at), list[str]()
        with running(tmp_path, device) as engine:
            if device.powered:
                try:
                    forget_amid_stores(engine, told)
                except AssertionError:
                    assert not device.powered, "forgetting fails on a disk that works"
        assert not device.misuse, device.misuse
        num_begun += "begun" in told and not device.powered
        num_durable += "durable" in told and not device.powered
        for mode, seed in CRASHES if told else ():
            with running(tmp_path, SimulatedDevice(device.crash(mode, seed))) as engine:
                where = f"change {at}, {mode}, seed {seed}, {told}"
                assert held(engine, STAYS) == len(STAYS), where
                if "durable" in told:
                    assert held(engine, [*GONE[2:], LATER[0]]) == 0, where
                    since = held(engine, [*GONE[:2], *LATER[3:]])
                    owed = "synced" in told or ("again" in told and mode == "kill")
                    assert since == 5 if owed else since <= 5, where
                assert store(engine, keys(range(400, 403))) == [Reason.OK] * 3
        if device.powered:
            break
        at += 1
    assert num_begun > 3, "the power never went while pages were being forgotten"
    assert num_durable > 3, "the power never went behind it"


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
        durable = engine.forget([LATER[0], LATER[2], LATER[4], GONE[0]])
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


def test_a_forgotten_page_is_gone_for_every_namespace(tmp_path: Path) -> None:
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
    device = device.restart()
    with running(tmp_path, device, namespace=b"\x77" * 32) as engine:
        assert is_true(engine.forget(GONE), TIMEOUT_S)
        assert is_true(engine.forget(GONE[:1]), TIMEOUT_S)
    with running(tmp_path, device.restart()) as engine:
        assert (held(engine, GONE), held(engine, STAYS)) == (0, len(STAYS))
        assert engine.stats().num_pages == len(STAYS)


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
        assert store(engine, ALL[:3]) == [Reason.OK] * 3
        made = engine.pin("p", ALL[:3])
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
        durable = engine.forget(ALL[:2])
        assert engine.contains(ALL[:3]) == [False, False, True]
        armed = False
        go_on.set()
        assert is_true(durable, TIMEOUT_S)
        assert drained(engine, TIMEOUT_S)
        assert engine.contains(ALL[:3]) == [False, False, True]
        assert [info.num_pages for info in engine.pins()] == [1]
        engine.check_integrity()
    with running(tmp_path, inner.restart(), capacity_bytes=5 * REGION) as engine:
        assert engine.contains(ALL[:3]) == [False, False, True]
        assert [info.num_pages for info in engine.pins()] == [1]


def test_a_forgotten_page_leaves_its_pins(tmp_path: Path) -> None:
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
        for name, wanted in (("some", ALL[:6]), ("all", GONE)):
            assert not isinstance(engine.pin(name, wanted), PinRefusal)
        assert is_true(engine.forget(GONE), TIMEOUT_S)
        assert [(info.name, info.num_pages) for info in engine.pins()] == [("some", 4)]
        assert store(engine, GONE) == [Reason.OK] * 4
        assert [info.num_pages for info in engine.pins()] == [4], "pinned again"
        assert file_of("all") not in device.list_names()
    with running(tmp_path, device.restart()) as engine:
        assert [(info.name, info.num_pages) for info in engine.pins()] == [("some", 4)]


@pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
def test_damage_brings_no_forgotten_page_back(tmp_path: Path, harm: str) -> None:
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
        assert is_true(engine.forget(GONE), TIMEOUT_S)
    files = device.crash("kill")
    good = files[PURGES_NAME]
    for bit in range(0, 8 * len(good), 13) if harm == "flip" else [0]:
        bad = bytearray(good)
        if harm == "flip":
            bad[bit // 8] ^= 1 << bit % 8
        else:
            bad = bad[:-1] if harm == "cut" else bytearray()
        device = SimulatedDevice(files | {PURGES_NAME: bytes(bad)})
        with running(tmp_path, device) as engine:
            assert held(engine, ALL) == 0, "everything may be what was forgotten"
            assert store(engine, ALL) == [Reason.OK] * 12
        with running(tmp_path, device.restart()) as engine:
            assert held(engine, ALL) == 12, "damage is paid for once"


def version_of(device: SimulatedDevice) -> int:
    return int.from_bytes(device.read_file(PURGES_NAME)[8:12], "little")


def test_older_programs_refuse_while_pages_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of version 3 takes none above; it opens the store again once that is safe."""
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
        assert is_true(engine.forget(GONE), TIMEOUT_S)
        assert version_of(device) == VERSION_WITH_KEYS
        data = device.read_file(PURGES_NAME)
    monkeypatch.setattr(purges, "VERSION_WITH_KEYS", FORMAT_VERSION)
    with pytest.raises(StoreFormatError, match="format 4, newer than 3"):
        purges.unpack(data)
    monkeypatch.undo()
    device = device.restart()
    with running(tmp_path, device, capacity_bytes=4 * REGION) as engine:
        for number in range(1000, 1060, 3):
            assert store(engine, keys(range(number, number + 3))) == [Reason.OK] * 3
        assert is_true(engine.begin_purge(b"t" * 16), TIMEOUT_S)
        assert version_of(device) == FORMAT_VERSION


def test_an_unwritten_forgetting_goes_with_the_next(tmp_path: Path) -> None:
    inner = SimulatedDevice()
    device = FaultyDevice(inner)
    with running(tmp_path, device) as engine:
        fill(engine)
        device.faults = [Fault(0, "replace_file", times=1 << 30, error=errno.EIO)]
        assert not is_true(engine.forget(GONE[:2]), TIMEOUT_S)
        assert held(engine, GONE) == 2, "not durable, but hidden"
        device.faults = []
        assert is_true(engine.forget(GONE[2:]), TIMEOUT_S)
    with running(tmp_path, inner.restart()) as engine:
        assert (held(engine, GONE), held(engine, STAYS)) == (0, len(STAYS))


def test_beyond_the_most_more_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgotten, "MAX_FORGOTTEN", 4)
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
        for each in GONE:
            assert is_true(engine.forget([each]), TIMEOUT_S)
        assert store(engine, LATER[:3]) == [Reason.OK] * 3
        assert is_true(engine.forget([LATER[0]]), TIMEOUT_S)
        assert len(purges.read(device).forgotten) == 3
    with running(tmp_path, device.restart()) as engine:
        assert held(engine, [*GONE, LATER[0]]) == 0
        assert held(engine, LATER[1:3]) == 2
        assert held(engine, STAYS) == 0, "as far back as the older half"


def test_bounds_of_keys_survive_packing() -> None:
    made = Purges()
    made.forget([b"\0" * 32, b"a" + bytes(31), b"b" * 32], Bound(3, 8192))
    made.forget([b"b" * 32], Bound(5, 4096))
    made.add(b"t" * 16, Bound(4, 4096))
    assert purges.unpack(purges.pack(made)) == made
    assert len(made.forgotten) == 3
    assert made.next_sequence() == 6
    assert made.forget_before(5)
    assert made.is_empty, "a bound at the first extent of a region says nothing of it"
    assert purges.unpack(purges.pack(made)) == Purges(forgotten=Forgotten())


def test_forgetting_checks_its_keys(tmp_path: Path) -> None:
    with running(tmp_path, SimulatedDevice()) as engine:
        with pytest.raises(ValueError, match="a key has 1 bytes, expected 32"):
            engine.forget([b"k"])
        assert is_true(engine.forget([]), 0.0)
    assert not is_true(engine.forget(ALL), 0.0), "closed"

"""Erasing on NVMe, beside what ``test/contract/test_erase.py`` asks of every tier: damage, formats,
bounds, and reclaim at work."""

from __future__ import annotations

import errno
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from simulation.device import SimulatedDevice
from simulation.engine import REGION, running
from simulation.ledger import TIMEOUT_S, content, held, keys, pin, store, submit

from kit.faulty import Fault, FaultyDevice
from kit.runs import NAMESPACE
from kit.thirds import is_of, sweeps
from kit.waiting import drained, eventually
from sglang_tiered.errors import StoreFormatError
from sglang_tiered.storage.base import Erasure, Reason, Run, Stop
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine, erase_log
from sglang_tiered.storage.region.erase_log import Bound, Erased
from sglang_tiered.storage.region.format import ERASED_NAME
from sglang_tiered.storage.region.index import PageIndex
from sglang_tiered.storage.region.pending import Note

A, B = b"a" * 16, b"b" * 16
OF_A, OF_B, LATER = keys(range(12)), keys(range(100, 112)), keys(range(200, 206))
NOTE = Note(b"n" * 16, float("inf"), b"whose it was")
GONE, STAYS = OF_A[::3], [each for number, each in enumerate(OF_A) if number % 3]


def fill(engine: RegionEngine) -> None:
    for start in range(0, 12, 3):
        assert store(engine, OF_A[start : start + 3], A) == [Reason.OK] * 3
        assert store(engine, OF_B[start : start + 3], B) == [Reason.OK] * 3
    assert engine.flush(TIMEOUT_S)


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


@sweeps(["flip", "cut", "empty"], large=["flip"])
@pytest.mark.parametrize("what", [Erasure(tenant=A), Erasure.of(GONE)], ids=["tenant", "pages"])
def test_damage_brings_nothing_erased_back(
    tmp_path: Path, what: Erasure, name: str, third: int | None
) -> None:
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
        assert is_true(engine.erase(what), TIMEOUT_S)
        assert is_true(engine.note_erased([], [NOTE]), TIMEOUT_S)
    files = device.crash("kill")
    good = files[ERASED_NAME]
    bits = filter(partial(is_of, third), range(0, 8 * len(good), 577))
    for bit in bits if name == "flip" else [0]:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        new = {"flip": bytes(bad), "cut": good[:-1], "empty": b""}[name]
        device = SimulatedDevice(files | {ERASED_NAME: new})
        with running(tmp_path, device) as engine:
            if 28 * 8 <= bit < 8 * 4096:  # padding, that says nothing
                assert held(engine, what.keys or OF_A) == 0
                continue
            assert held(engine, OF_A + OF_B) == 0, "everything may be what was erased"
            assert store(engine, OF_A, A) == [Reason.OK] * 12
        with running(tmp_path, device.restart()) as engine:
            assert held(engine, OF_A) == 12, "damage is paid for once"


def test_a_newer_log_refuses_the_store_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        fill(engine)
    monkeypatch.setattr(erase_log, "VERSION", 77)
    files = device.crash("kill") | {ERASED_NAME: erase_log.pack(Erased())}
    monkeypatch.undo()
    with (
        pytest.raises(StoreFormatError, match=r"format 77, newer than"),
        running(tmp_path, opened := SimulatedDevice(files)),
    ):
        pass
    assert opened.crash("kill") == files


def test_a_torn_append_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of its blocks came to the disk; in a file that the version before began, too."""
    before, torn = Erased({A: Bound(3, 8192)}), Erased()
    torn.add(Erasure.of(keys(range(400))), Bound(4, 4096))
    torn.tell([NOTE])
    record = erase_log.pack_record(torn)
    monkeypatch.setattr(erase_log, "VERSION", 1)
    good = erase_log.pack(before)
    monkeypatch.undo()
    blocks = [record[at : at + 4096] for at in range(0, len(record), 4096)]
    assert len(blocks) > 3
    for kept in range(1 << len(blocks)):
        came = [block if kept >> n & 1 else bytes(4096) for n, block in enumerate(blocks)]
        data = good + b"".join(came[: kept.bit_length()])
        found = erase_log.unpack(data)
        assert found is not None and found.tenants == before.tenants
        missing = [n for n in range(len(blocks)) if not kept >> n & 1]
        assert len(found.rows) == (400 if missing in ([], [len(blocks) - 1]) else 0)
        assert list(found.notes.values()) == ([] if missing else [NOTE])  # the last block
        assert found.num_bytes == (len(data) if len(found.rows) or not kept else 0)


def test_a_deleted_regions_blocks_bring_nothing_back(tmp_path: Path) -> None:
    """A new region file may be given them, and a loss of power may uncover them: they are taken for
    the region only if they carry its number."""
    device = SimulatedDevice()
    with running(tmp_path, device) as engine:
        assert store(engine, OF_A[:3], A) == [Reason.OK] * 3
        for what in (Erasure(), Erasure(tenant=A)):  # two records, so the next start writes one
            assert is_true(engine.erase(what), TIMEOUT_S)
    device = device.restart()
    with running(tmp_path, device):
        pass
    device = device.restart()
    with running(tmp_path, device) as engine:
        device.power_off_at = device.num_changes + 1  # a file is made, and gets its header
        assert store(engine, LATER[:1]) != [Reason.OK]
    for seed in range(64):
        with running(tmp_path, SimulatedDevice(device.crash("reorder", seed))) as engine:
            assert not any(engine.contains(OF_A[:3])), seed


@pytest.mark.parametrize("is_torn", [False, True])
def test_only_what_no_region_holds_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_torn: bool
) -> None:
    """Of a region that a failed write left bytes in, nobody knows what it holds."""
    monkeypatch.setattr(erase_log, "MANY", 4)
    monkeypatch.setattr(erase_log, "_SLACK_BYTES", -1 << 30)  # written anew each time
    device = SimulatedDevice()
    disk = FaultyDevice(device)
    with running(tmp_path, disk) as engine:
        fill(engine)
        engine.set_namespace(b"\x77" * 32)
        assert is_true(engine.erase(Erasure.of(GONE)), TIMEOUT_S)
        if is_torn:
            assert store(engine, keys([500]), A) == [Reason.OK]
            small = (k for k in keys(range(501, 600)) if len(content(NAMESPACE, k)) <= 4096)
            disk.faults = [Fault(0, "writev", times=1 << 30, short_bytes=4096)]
            assert store(engine, [next(small)], A) == [Reason.IO_ERROR]
            disk.faults = []
        for number in range(30):
            what = Erasure.of(keys([1000 + number])), Erasure(tenant=bytes([number]) * 16)
            assert all(is_true(engine.erase(each), TIMEOUT_S) for each in what)
        assert is_true(engine.erase(Erasure(tenant=B)), TIMEOUT_S)
        found = erase_log.read(device)
        assert (len(found.rows) == 4 and set(found.tenants) == {B}) != is_torn
    with running(tmp_path, device.restart()) as engine:
        assert held(engine, [*GONE, *OF_B]) == 0
        assert held(engine, STAYS) == 8


def test_erasing_waits_for_no_others_load(tmp_path: Path) -> None:
    may_read, waits = threading.Event(), False

    def before(operation: str) -> None:
        assert not waits or operation != "readv" or may_read.wait(TIMEOUT_S)

    with running(tmp_path, FaultyDevice(SimulatedDevice(), before=before)) as engine:
        fill(engine)
        waits = True
        room = memoryview(bytearray(len(content(NAMESPACE, OF_B[0]))))
        loaded = engine.submit_load(Run((OF_B[0],), ((room,),)))
        try:
            assert is_true(engine.erase(Erasure.of(OF_A)), TIMEOUT_S)
            assert not loaded.done
            of_its_own = engine.erase(Erasure.of(OF_B))
            assert not of_its_own.done()
        finally:
            may_read.set()
        assert is_true(of_its_own, TIMEOUT_S)


def test_names_and_notes_outlive_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest of them, until their time. One is known only once that is durable."""
    monkeypatch.setattr(erase_log, "MAX_IDS", 4)
    monkeypatch.setattr(erase_log, "MAX_NOTES_BYTES", 53)
    device = SimulatedDevice()
    disk = FaultyDevice(device)
    names = [bytes([number]) * 16 for number in range(6)]
    first, old, other = NOTE._replace(id=bytes(16)), NOTE._replace(until_s=1.0), b"o" * 16
    notes = [first, old, Note(other, time.time() + 1e6, b"x" * 30), NOTE._replace(id=b"z" * 16)]
    with running(tmp_path, disk) as engine:
        disk.faults = [Fault(0, "replace_file", times=1 << 30, error=errno.EIO)]
        assert not is_true(engine.erase(Erasure.of(GONE)), TIMEOUT_S)
        assert not is_true(engine.note_erased(names[:1]), TIMEOUT_S)
        assert engine.has_erased(names) == [False] * 6
        disk.faults = []
        assert is_true(engine.note_erased(names[:4], notes), TIMEOUT_S)
        assert is_true(engine.erase(Erasure(GONE, id=names[4])), TIMEOUT_S)
        assert engine.has_erased([*names, other]) == [True] * 5 + [False] * 2
    with running(tmp_path, device := SimulatedDevice(device.crash("drop"))) as engine:
        assert engine.has_erased(names) == [False, True, True, True, True, False]
        assert engine.erased_notes == (*notes[2:],), "three have room, and the oldest goes"
        monkeypatch.setattr(erase_log, "_SLACK_BYTES", -1 << 30)  # written anew from now on
        assert is_true(engine.note_erased([], [notes[2]._replace(data=b"y")]), TIMEOUT_S)
    with running(tmp_path, SimulatedDevice(device.crash("drop"))) as engine:
        assert engine.erased_notes == (notes[3], notes[2]._replace(data=b"y"))


def test_a_large_erasure_lets_lookups_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, discard = list[int](), PageIndex.discard

    def counted(index: PageIndex, words: Any) -> int:
        sizes.append(len(words))
        return discard(index, words)

    monkeypatch.setattr(PageIndex, "discard", counted)
    monkeypatch.setattr("sglang_tiered.storage.region.engine._KEYS_AT_ONCE", 5)
    with running(tmp_path, None) as engine:
        fill(engine)
        what = Erasure.of(OF_A)
        assert is_true(engine.erase(what), TIMEOUT_S)
        assert sizes == [5, 5, 2], "so many are erased while nobody else gets the lock"
        assert engine.has_erased([what.id]) == [True]
        assert (held(engine, OF_A), held(engine, OF_B)) == (0, 12)


@pytest.mark.parametrize("what", [Erasure(tenant=A), Erasure.of(keys(range(60)))])
def test_a_region_that_erasing_empties_is_freed(tmp_path: Path, what: Erasure) -> None:
    with running(tmp_path, SimulatedDevice()) as engine:
        for start in range(0, 60, 6):
            assert store(engine, keys(range(start, start + 6)), A) == [Reason.OK] * 6
        before = engine.stats().physical_bytes
        assert is_true(engine.erase(what), TIMEOUT_S)
        assert before > 3 * REGION
        eventually(lambda: engine.stats().physical_bytes <= REGION)  # only the open one stays
        assert engine.stats().num_pages_evicted == 0


@pytest.mark.parametrize("how", ["hot", "pinned"])
def test_pages_that_reclaim_moves_are_erased_too(tmp_path: Path, how: str) -> None:
    """Reclaim holds pages in memory, on their way to the end of the log, when a tenant is purged or
    pages are forgotten."""
    reading, go_on = threading.Event(), threading.Event()
    armed = False

    def before(operation: str) -> None:
        if armed and operation == "readv" and threading.current_thread().name == "tier-writer":
            reading.set()
            assert go_on.wait(TIMEOUT_S)

    inner, options = SimulatedDevice(), {"capacity_bytes": 5 * REGION}
    small = [each for each in keys(range(60)) if len(content(NAMESPACE, each)) == 4096][:3]
    with running(tmp_path, FaultyDevice(inner, before=before), **options) as engine:
        assert store(engine, small, A) == [Reason.OK] * 3
        assert held(engine, small) == 3
        assert how == "hot" or pin(engine, "p", small)
        armed = True
        for number in range(1000, 1100, 3):
            job = submit(engine, keys(range(number, number + 3)), B)
            while not job.wait(0.01) and not reading.is_set():
                pass
            if reading.is_set():
                break
        assert reading.is_set(), "reclaim saved nothing"
        what = Erasure(tenant=A) if how == "hot" else Erasure.of(small[:2])
        expected = [False, False, how == "pinned"]
        durable = engine.erase(what)
        assert engine.contains(small) == expected
        armed = False
        go_on.set()
        assert is_true(durable, TIMEOUT_S)
        assert drained(engine, TIMEOUT_S)
        # What reclaim saved is back in the log.
        eventually(lambda: not any(engine.lookup([k]).stop is Stop.PENDING for k in small))
        assert engine.contains(small) == expected
        assert [info.num_pages for info in engine.pins()] == [1] * (how == "pinned")
        engine.check_integrity()
    with running(tmp_path, inner.restart(), **options) as engine:
        assert engine.contains(small) == expected
        assert [info.num_pages for info in engine.pins()] == [1] * (how == "pinned")

"""Placing, failing and rolling, seen in the files."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.faulty import Fault, FaultyDevice
from kit.runs import make_run
from kit.tiers import open_region
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.storage.base import NO_TENANT, Erasure, Job, Reason, Run
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import writer
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    region_name,
    unpack_footer,
    unpack_region_header,
    unpack_trailer,
)

REGION = 16 * BLOCK_BYTES


class Bench:
    """An engine on a device that fails on order, with a clock to wait out its pauses."""

    def __init__(self, directory: Path, device: FaultyDevice | None = None) -> None:
        self.directory = directory
        self.now = 0.0
        self.device: Any = device or FaultyDevice(FileDevice(directory))
        self.engine = open_region(
            directory,
            capacity_bytes=4 * REGION,
            region_bytes=REGION,
            sync_interval_s=1000.0,
            device=self.device,
            clock=lambda: self.now,
        )

    def fail(self, operation: Any, times: int = 1, after: int = 0, **kind: int) -> None:
        """The next operations of that kind, after ``after`` good ones."""
        at = self.device.calls.count(operation) + after
        self.device.faults = [Fault(at, operation, times, **kind)]

    def submit(self, seed: int, count: int = 1) -> tuple[Run, Job]:
        run = make_run(seed, [BLOCK_BYTES] * count)
        return run, self.engine.submit_store(run)

    def store(self, seed: int, count: int = 1) -> list[Reason]:
        reasons = finished(self.submit(seed, count)[1])
        self.engine.flush(TIMEOUT_S)  # or the jump would make a flush under way look hung
        self.now += 100.0
        return reasons

    def files(self) -> list[Path]:
        return sorted(self.directory.glob("*.kv"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.device.faults = []
    bench.engine.check_integrity()
    bench.engine.close()


def test_no_extent_takes_the_room_of_its_footer(bench: Bench) -> None:
    """14 blocks between header and trailer: 1 footer, so 12 pages of a block beside 1 header."""
    assert bench.store(1, 14) == [Reason.OK] * 14
    assert bench.engine.flush(TIMEOUT_S)
    data = bench.files()[0].read_bytes()
    header = unpack_region_header(data[:BLOCK_BYTES])
    assert header is not None
    trailer = unpack_trailer(data[-BLOCK_BYTES:], header.nonce, REGION)
    assert trailer is not None, "not sealed"
    contents = unpack_footer(data[trailer[1] : -BLOCK_BYTES], header.nonce)
    assert contents is not None
    extents = contents.extents
    assert extents["offset"].tolist() == [BLOCK_BYTES]
    assert extents["num_pages"].tolist() == [12]
    assert len(bench.files()) == 2


def test_full_disk_gives_room_of_smaller_regions(tmp_path: Path) -> None:
    """Of an earlier run: the room of one is not that of a region of now."""
    sizes = {"capacity_bytes": 16 * REGION, "sync_interval_s": 1000.0}
    engine = open_region(tmp_path, region_bytes=REGION, **sizes)
    for seed in range(8):
        assert finished(engine.submit_store(make_run(seed, [BLOCK_BYTES] * 12)))[0] is Reason.OK
    engine.close()

    def fill_the_disk(operation: str) -> None:
        if operation == "create" and len(list(tmp_path.glob("*.kv"))) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    device = FaultyDevice(FileDevice(tmp_path), before=fill_the_disk)
    engine = open_region(tmp_path, region_bytes=4 * REGION, device=device, **sizes)
    assert finished(engine.submit_store(make_run(9, [BLOCK_BYTES]))) == [Reason.OK]
    engine.close()


def test_a_place_that_keeps_failing_is_abandoned(bench: Bench) -> None:
    assert bench.store(1) == [Reason.OK]
    bench.fail("writev", times=3, error=errno.EIO)
    for seed in range(2, 5):
        assert bench.store(seed) == [Reason.IO_ERROR]
    assert bench.store(5) == [Reason.OK]
    assert len(bench.files()) == 2


def test_an_internal_error_costs_no_other_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, next_one = writer.page_table, list[Job]()

    def failing(rows: Any) -> Any:
        if next_one:
            return made(rows)
        next_one.append(bench.submit(2)[1])
        raise MemoryError

    monkeypatch.setattr(writer, "page_table", failing)
    assert finished(bench.submit(1)[1]) == [Reason.IO_ERROR]
    assert finished(next_one[0]) == [Reason.OK]


def test_a_full_readonly_disk_fails_only_the_store(bench: Bench) -> None:
    assert bench.store(1, 12) == [Reason.OK] * 12
    assert bench.store(2) == [Reason.OK]
    calls = bench.device.calls
    bench.device.faults = [
        Fault(calls.count("writev"), "writev", error=errno.ENOSPC),
        Fault(calls.count("unlink"), "unlink", 1000, error=errno.EROFS),
    ]
    assert bench.store(3) == [Reason.NO_SPACE]
    assert bench.store(4) == [Reason.OK]
    assert bench.engine.stats().num_pages == 14


@pytest.mark.parametrize(("code", "num_evicted"), [(errno.ENOSPC, 12), (errno.EIO, 0)])
def test_full_disk_gives_a_region_for_an_erasure(bench: Bench, code: int, num_evicted: int) -> None:
    """What is not on disk comes back with the next start. Other errors cost no page."""
    for seed in (1, 2):
        assert bench.store(seed, 12) == [Reason.OK] * 12
    bench.fail("replace_file", error=code)
    named = Erasure.of([make_run(3, [1]).keys[0]])
    assert is_true(bench.engine.erase(named), TIMEOUT_S) == (code == errno.ENOSPC)
    assert bench.engine.stats().num_pages_evicted == num_evicted


def test_an_irremovable_file_keeps_its_room(bench: Bench) -> None:
    calls = bench.device.calls
    bench.device.faults = [
        Fault(calls.count("writev"), "writev", error=errno.EIO),
        Fault(calls.count("unlink"), "unlink", error=errno.EROFS),
    ]
    assert bench.store(1) == [Reason.IO_ERROR]
    assert len(bench.files()) == 1
    assert bench.engine.stats().physical_bytes == REGION
    bench.engine.check_integrity()
    bench.device.faults = []
    assert bench.store(1) == [Reason.OK]
    assert bench.engine.stats().physical_bytes == 2 * REGION
    for seed in range(2, 5):
        assert bench.store(seed, 12) == [Reason.OK] * 12
    assert region_name(0) not in {file.name for file in bench.files()}, "it goes before all others"
    assert bench.engine.stats().num_pages_evicted == 0


def test_closing_removes_a_region_without_pages(bench: Bench) -> None:
    bench.fail("writev", after=1, error=errno.EIO)
    assert bench.store(1) == [Reason.IO_ERROR]
    assert len(bench.files()) == 1
    bench.engine.close()
    assert bench.files() == []


class StickyDevice(FaultyDevice):
    """The file of this name cannot be removed."""

    sticky = region_name(0)

    def unlink(self, name: str, fd: int | None = None) -> None:
        if name == self.sticky:
            self.faults = [Fault(self.calls.count("unlink"), "unlink", error=errno.EPERM)]
        super().unlink(name, fd)


def test_an_irremovable_region_does_not_wedge_reclaim(tmp_path: Path) -> None:
    """It stays in service and is passed over with pauses; an erasure removes those beside it."""
    first = region_name(0)
    bench = Bench(tmp_path, device=StickyDevice(FileDevice(tmp_path)))
    kept, job = bench.submit(0, 12)
    finished(job)
    for seed in range(1, 4):
        assert bench.store(seed, 12) == [Reason.OK] * 12
    before = bench.device.calls.count("unlink")
    for seed in range(4, 8):  # no time passes
        assert finished(bench.submit(seed, 12)[1]) == [Reason.OK] * 12
    assert bench.device.calls.count("unlink") - before == 5, "4 victims, and once the stuck one"
    assert bench.engine.lookup(kept.keys).num_hits == 12
    assert bench.engine.stats().num_regions_stuck == 1
    assert bench.engine.stats().physical_bytes == 4 * REGION
    assert is_true(bench.engine.erase(Erasure(tenant=NO_TENANT)), TIMEOUT_S)
    left = [first, region_name(7)]  # which is open
    eventually(lambda: [file.name for file in bench.files()] == left)
    bench.engine.check_integrity()
    bench.device.sticky = ""
    bench.now += 100.0
    for seed in range(9, 13):
        assert bench.store(seed, 12) == [Reason.OK] * 12
    assert bench.engine.stats().num_regions_stuck == 0
    assert first not in {file.name for file in bench.files()}
    bench.engine.close()


def test_no_footer_lists_what_is_not_written(tmp_path: Path) -> None:
    """A region is full before the last of it is written, which may fail."""
    sizes = {"capacity_bytes": 4 * 64 * 1024, "region_bytes": 64 * 1024}
    device = FaultyDevice(FileDevice(tmp_path))
    held, goes_on = threading.Event(), threading.Event()

    def fail_the_first(operation: str) -> None:
        is_extent = threading.current_thread().name.startswith("tier-io")
        if operation == "writev" and is_extent and not held.is_set():
            held.set()
            assert goes_on.wait(TIMEOUT_S)
            raise OSError(errno.EIO, "on purpose")

    device.before = fail_the_first
    engine = open_region(tmp_path, device=device, **sizes)
    first, second = make_run(1, [4096] * 11), make_run(2, [4096] * 11)
    failing = engine.submit_store(first)
    assert held.wait(TIMEOUT_S)
    other = engine.submit_store(second)
    eventually(lambda: len(engine._state.regions) == 2, "the first region is not full")
    goes_on.set()
    assert finished(failing) == [Reason.IO_ERROR] * 11
    assert finished(other) == [Reason.OK] * 11
    engine.close()
    engine = open_region(tmp_path, **sizes)
    assert not any(engine.contains(first.keys)) and all(engine.contains(second.keys))
    engine.close()

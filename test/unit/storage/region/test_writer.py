"""Placing, failing, rolling and sealing, seen in the files."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kit.faulty import Fault, FaultyDevice
from kit.runs import NAMESPACE, MakeRun
from sglang_tiered.storage.base import NO_TENANT, Erasure, Job, Reason, Run
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    Contents,
    extent_header_bytes,
    region_name,
    unpack_footer,
    unpack_region_header,
    unpack_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


TIMEOUT_S = 20.0
REGION = 16 * BLOCK_BYTES
HEADER = extent_header_bytes(1)


class Bench:
    """An engine on a device that fails on order, with a clock to wait out its pauses."""

    def __init__(
        self,
        directory: Path,
        make_run: MakeRun,
        num_regions: int = 4,
        device: FaultyDevice | None = None,
    ) -> None:
        self.directory = directory
        self.make_run = make_run
        self.now = 0.0
        self.device: Any = device or FaultyDevice(FileDevice(directory))
        self.engine = RegionEngine(
            directory,
            namespace=NAMESPACE,
            capacity_bytes=num_regions * REGION,
            region_bytes=REGION,
            num_readers=1,
            num_writers=1,
            sync_interval_s=1000.0,
            device=self.device,
            clock=lambda: self.now,
        )

    def fail(self, operation: Any, times: int = 1, after: int = 0, **kind: int) -> None:
        """The next operations of that kind, after ``after`` good ones."""
        at = self.device.calls.count(operation) + after
        self.device.faults = [Fault(at, operation, times, **kind)]

    def submit(self, seed: int, count: int = 1, nbytes: int = BLOCK_BYTES) -> tuple[Run, Job]:
        run = self.make_run(seed, [nbytes] * count)
        return run, self.engine.submit_store(run)

    def store(self, seed: int, count: int = 1, nbytes: int = BLOCK_BYTES) -> list[Reason]:
        _, job = self.submit(seed, count, nbytes)
        assert job.wait(TIMEOUT_S), "the job did not finish"
        self.engine.flush(TIMEOUT_S)  # or the jump would make a flush under way look hung
        self.now += 100.0
        return job.reasons

    def files(self) -> list[Path]:
        return sorted(self.directory.glob("*.kv"))

    def contents(self, number: int) -> Contents:
        """What the footer of that file says."""
        data = self.files()[number].read_bytes()
        header = unpack_region_header(data[:BLOCK_BYTES])
        assert header is not None
        trailer = unpack_trailer(data[-BLOCK_BYTES:], header.nonce, REGION)
        assert trailer is not None, "not sealed"
        footer = data[trailer.footer_offset : trailer.footer_offset + trailer.footer_bytes]
        contents = unpack_footer(footer, header.nonce)
        assert contents is not None
        return contents


@pytest.fixture
def bench(tmp_path: Path, make_run: MakeRun) -> Iterator[Bench]:
    bench = Bench(tmp_path, make_run)
    yield bench
    bench.device.faults = []
    bench.engine.check_integrity()
    bench.engine.close()


def test_pages_follow_the_header(bench: Bench) -> None:
    run, job = bench.submit(1, 2, 5000)
    assert job.wait(TIMEOUT_S)
    data = bench.files()[0].read_bytes()
    assert data[8192:13_192] == bytes(run.pages[0][0])
    assert data[16_384:21_384] == bytes(run.pages[1][0])


def test_no_extent_takes_the_room_of_its_footer(bench: Bench) -> None:
    """14 blocks between header and trailer: 1 footer, so 12 pages of a block beside 1 header."""
    assert bench.store(1, 14) == [Reason.OK] * 14
    assert bench.engine.flush(TIMEOUT_S)
    extents = bench.contents(0).extents
    assert extents["offset"].tolist() == [BLOCK_BYTES]
    assert extents["num_pages"].tolist() == [12]
    assert len(bench.files()) == 2


def test_stores_that_wait_share_an_extent(bench: Bench) -> None:
    entered, release = threading.Event(), threading.Event()

    def hold(operation: str) -> None:
        if operation == "create":
            entered.set()
            assert release.wait(TIMEOUT_S)

    bench.device.before = hold
    jobs = [bench.submit(1)[1]]
    assert entered.wait(TIMEOUT_S)
    jobs += [bench.submit(seed)[1] for seed in range(2, 5)]
    release.set()
    assert all(job.wait(TIMEOUT_S) for job in jobs)
    assert [job.reasons for job in jobs] == [[Reason.OK]] * 4
    bench.engine.close()
    assert bench.contents(0).extents["num_pages"].tolist() == [4]


@pytest.mark.parametrize("kind", [{"error": errno.EIO}, {"short_bytes": 8192}])
def test_a_failed_writes_offset_is_used_again(bench: Bench, kind: dict[str, int]) -> None:
    assert bench.store(1) == [Reason.OK]
    bench.fail("writev", **kind)
    assert bench.store(2, 2) == [Reason.IO_ERROR] * 2
    assert bench.store(3) == [Reason.OK]
    bench.engine.close()
    offsets = bench.contents(0).extents["offset"].tolist()
    assert offsets == [BLOCK_BYTES, 2 * BLOCK_BYTES + HEADER]


def test_a_hole_fails_what_was_placed_behind(tmp_path: Path, make_run: MakeRun) -> None:
    """An extent that was written behind one that was not could not be found again."""
    region_bytes, page = 48 << 20, 8 << 20
    device = FaultyDevice(FileDevice(tmp_path))
    engine = RegionEngine(
        tmp_path,
        namespace=NAMESPACE,
        capacity_bytes=2 * region_bytes,
        region_bytes=region_bytes,
        num_writers=1,
        device=device,
    )
    entered, release = threading.Event(), threading.Event()

    def hold(operation: str) -> None:
        if operation == "writev" and threading.current_thread().name.startswith("tier-extent"):
            entered.set()
            assert release.wait(TIMEOUT_S)

    device.before = hold
    run = make_run(1, [page] * 3)  # an extent each, all in work at once
    job = engine.submit_store(run)
    assert entered.wait(TIMEOUT_S)
    # The chunk that is held is the first of five; the sixth after it is of the second extent.
    device.faults = [Fault(device.calls.count("writev") + 5, "writev", error=errno.EIO)]
    release.set()
    assert job.wait(TIMEOUT_S)
    assert job.reasons == [Reason.OK, Reason.IO_ERROR, Reason.IO_ERROR]
    assert engine.lookup(run.keys).num_hits == 1
    engine.check_integrity()
    engine.close()
    reopened = RegionEngine(
        tmp_path, namespace=NAMESPACE, capacity_bytes=2 * region_bytes, region_bytes=region_bytes
    )
    assert reopened.stats().num_pages == 1
    reopened.close()


def test_a_place_that_keeps_failing_is_abandoned(bench: Bench) -> None:
    assert bench.store(1) == [Reason.OK]
    bench.fail("writev", times=3, error=errno.EIO)
    for seed in range(2, 5):
        assert bench.store(seed) == [Reason.IO_ERROR]
    assert bench.store(5) == [Reason.OK]
    assert len(bench.files()) == 2


@pytest.mark.parametrize("operation", ["create", "writev"])
def test_failed_creation_leaves_books_and_directory_clean(bench: Bench, operation: str) -> None:
    bench.fail(operation, error=errno.EIO)
    assert bench.store(1) == [Reason.IO_ERROR]
    assert bench.files() == []
    assert bench.engine.stats().physical_bytes == 0
    assert bench.store(1) == [Reason.OK]
    assert [file.name for file in bench.files()] == ["region-0000000000000001.kv"]


def test_a_full_readonly_disk_fails_only_the_store(
    bench: Bench,
) -> None:
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
    assert [file.name for file in bench.files()] == ["region-0000000000000001.kv"]
    assert bench.engine.stats().physical_bytes == REGION


def test_failed_footer_keeps_the_region_in_service(bench: Bench) -> None:
    bench.fail("writev", after=2, error=errno.EIO)  # after the header and the extent
    run, job = bench.submit(1, 12)
    assert job.wait(TIMEOUT_S)
    second, job = bench.submit(2, 1)
    assert job.wait(TIMEOUT_S)
    bench.engine.flush(TIMEOUT_S)
    bench.device.faults = []
    assert bench.engine.lookup(run.keys).num_hits == 12
    assert bench.engine.flush(TIMEOUT_S)
    bench.engine.close()
    reopened = Bench(bench.directory, bench.make_run)
    assert reopened.engine.lookup(run.keys).num_hits == 12
    reopened.engine.close()


def test_barriers_stay_refused_while_unsynced_pages_remain(
    bench: Bench,
) -> None:
    """Linux reports a failed write-back once; the next fsync succeeds without the lost pages."""
    bench.fail("sync", error=errno.EIO)
    run, job = bench.submit(1, 2)
    assert job.wait(TIMEOUT_S)
    assert not bench.engine.flush(TIMEOUT_S)
    bench.device.faults = []
    assert not bench.engine.flush(TIMEOUT_S), "a lost sync was forgotten"
    assert bench.engine.lookup(run.keys).num_hits == 2
    assert bench.store(2) == [Reason.OK]
    assert len(bench.files()) == 2, "the suspect region is still appended to"
    for seed in range(3, 9):
        assert bench.store(seed, 12) == [Reason.OK] * 12
    assert bench.engine.lookup(run.keys).num_hits == 0
    assert bench.engine.flush(TIMEOUT_S), "no suspect page is held"


def test_an_irremovable_victim_stays_in_service(tmp_path: Path, make_run: MakeRun) -> None:
    bench = Bench(tmp_path, make_run, num_regions=1)
    assert bench.store(1, 12) == [Reason.OK] * 12
    bench.fail("unlink", error=errno.EROFS)
    assert bench.store(2) == [Reason.NO_SPACE]
    assert bench.engine.stats().num_pages == 12
    assert bench.engine.stats().physical_bytes == REGION
    assert bench.engine.stats().num_regions_stuck == 1
    bench.engine.check_integrity()
    assert bench.store(3) == [Reason.OK]
    assert bench.engine.stats().num_pages == 1
    assert bench.engine.stats().num_regions_stuck == 0
    bench.engine.close()


class StickyDevice(FaultyDevice):
    """Files of these names cannot be removed."""

    def __init__(self, directory: Path, *names: str) -> None:
        super().__init__(FileDevice(directory))
        self.sticky = {*names}

    def unlink(self, name: str, fd: int | None = None) -> None:
        if name in self.sticky:
            self.faults = [Fault(self.calls.count("unlink"), "unlink", error=errno.EPERM)]
        super().unlink(name, fd)


def test_an_irremovable_region_does_not_wedge_reclaim(
    tmp_path: Path, make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    first = region_name(0)
    bench = Bench(tmp_path, make_run, device=StickyDevice(tmp_path, first))
    kept, job = bench.submit(0, 12)
    assert job.wait(TIMEOUT_S)
    for seed in range(1, 9):
        assert bench.store(seed, 12) == [Reason.OK] * 12
    assert bench.engine.lookup(kept.keys).num_hits == 12, "what cannot go stays in service"
    assert bench.files()[0].name == first
    assert bench.engine.stats().num_regions_stuck == 1
    assert bench.engine.stats().physical_bytes == 4 * REGION
    assert len([r for r in caplog.records if f"{first} cannot be removed" in r.message]) == 1
    bench.engine.check_integrity()

    bench.device.sticky.clear()
    assert bench.store(9, 12) == [Reason.OK] * 12
    assert bench.engine.stats().num_regions_stuck == 0
    assert first not in {file.name for file in bench.files()}
    bench.engine.close()


def test_an_irremovable_region_is_tried_with_pauses(tmp_path: Path, make_run: MakeRun) -> None:
    bench = Bench(tmp_path, make_run, device=StickyDevice(tmp_path, region_name(0)))
    for seed in range(4):
        assert bench.store(seed, 12) == [Reason.OK] * 12
    before = bench.device.calls.count("unlink")
    stood_at = bench.now
    for seed in range(4, 8):
        _, job = bench.submit(seed, 12)
        assert job.wait(TIMEOUT_S)
        assert job.reasons == [Reason.OK] * 12
    assert bench.now == stood_at
    assert bench.device.calls.count("unlink") - before == 5, "4 victims, and once the stuck one"
    bench.engine.close()


def test_a_purge_removes_regions_beside_an_irremovable_one(
    tmp_path: Path, make_run: MakeRun
) -> None:
    bench = Bench(tmp_path, make_run, device=StickyDevice(tmp_path, region_name(0)))
    for seed in range(3):
        assert bench.store(seed, 12) == [Reason.OK] * 12
    assert is_true(bench.engine.erase(Erasure(tenant=NO_TENANT)), TIMEOUT_S)
    assert [file.name for file in bench.files()] == [region_name(0), region_name(2)], "2 is open"
    bench.engine.close()


def test_closing_seals(bench: Bench) -> None:
    bench.store(1)
    bench.engine.close()
    assert len(bench.contents(0).pages) == 1


def test_closing_removes_a_region_without_pages(bench: Bench) -> None:
    bench.fail("writev", after=1, error=errno.EIO)
    assert bench.store(1) == [Reason.IO_ERROR]
    assert len(bench.files()) == 1
    bench.engine.close()
    assert bench.files() == []

"""What recovery does with errors that are not damage, and what it reports."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from kit.faulty import Fault, FaultyDevice
from kit.runs import NAMESPACE, MakeRun
from sglang_tiered.errors import StoreError
from sglang_tiered.storage.region import RegionEngine, recovery
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.index import PageIndex
from sglang_tiered.storage.region.recovery import RecoveryReport, recover
from sglang_tiered.storage.region.regions import RegionTable

if TYPE_CHECKING:
    from pathlib import Path


REGION = 64 * 1024
CAPACITY = 8 * REGION


@pytest.fixture
def directory(tmp_path: Path, make_run: MakeRun) -> Path:
    """Three sealed regions of three pages each."""
    with_pages = tmp_path / "store"
    engine = RegionEngine(
        with_pages, namespace=NAMESPACE, capacity_bytes=CAPACITY, region_bytes=REGION
    )
    for seed in range(3):
        assert engine.submit_store(make_run(seed, [12_288] * 3)).wait(20.0)
    engine.close()
    return with_pages


def run_recovery(directory: Path, namespace: bytes = NAMESPACE) -> RecoveryReport:
    device = FileDevice(directory)
    regions, index = RegionTable(), PageIndex()
    report = recover(device, namespace, CAPACITY, regions, index)
    index.check_integrity({region.slot: region.nbytes for region in regions})
    regions.check_integrity(idle=True)
    for region in regions:
        device.close(region.fd)
    return report


def test_sealed_regions_are_not_walked(directory: Path) -> None:
    expected = RecoveryReport(next_sequence=3, num_regions=3, num_pages=9)
    assert run_recovery(directory) == expected


def test_a_walked_region_is_sealed_once(directory: Path) -> None:
    file = directory / "region-0000000000000001.kv"
    with file.open("r+b") as stream:
        stream.truncate(REGION - 4096)
        stream.truncate(REGION)
    assert run_recovery(directory).num_walked == 1
    assert run_recovery(directory).num_walked == 0


def test_pages_of_others_are_counted(directory: Path) -> None:
    report = run_recovery(directory, b"\x22" * 32)
    assert (report.num_pages, report.num_foreign_pages, report.num_regions) == (0, 9, 3)


def test_numbers_of_removed_files_are_not_reused(directory: Path) -> None:
    (directory / "region-0000000000000010.kv").write_bytes(b"")
    (directory / "region-0000000000000011.kv").write_bytes(b"x" * REGION)
    report = run_recovery(directory)
    assert (report.num_damaged, report.next_sequence) == (2, 18)
    assert len(list(directory.glob("*.kv"))) == 3


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_errors_of_this_process_cost_no_data(directory: Path, code: int) -> None:
    device = FaultyDevice(FileDevice(directory), [Fault(1, "open", error=code)])
    with pytest.raises(StoreError, match="cannot be used as a store"):
        RegionEngine(
            directory,
            namespace=NAMESPACE,
            capacity_bytes=CAPACITY,
            device=device,
            region_bytes=REGION,
        )
    assert run_recovery(directory).num_pages == 9


def test_unreadable_header_is_damage(directory: Path) -> None:
    device = FaultyDevice(FileDevice(directory), [Fault(0, "readv", error=errno.EIO)])
    regions, index = RegionTable(), PageIndex()
    report = recover(device, NAMESPACE, CAPACITY, regions, index)
    assert (report.num_damaged, report.num_pages) == (1, 6)
    for region in regions:
        device.close(region.fd)


def test_the_bar_shows_only_when_recovery_takes_long(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_recovery(directory)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(recovery, "_PROGRESS_AFTER_S", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    run_recovery(directory)
    captured = capfd.readouterr()
    assert "recovering regions" in captured.err
    assert captured.out == ""

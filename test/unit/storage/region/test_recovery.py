"""What recovery does with errors that are not damage, and what it reports."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from kit.faulty import Fault, FaultyDevice
from kit.runs import NAMESPACE, make_run
from kit.tiers import open_disk, open_region, store
from sglang_tiered.errors import StoreError
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.format import region_name
from sglang_tiered.storage.region.recovery import Recovery, RecoveryReport

REGION = 64 * 1024
CAPACITY = 8 * REGION


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three sealed regions of three pages each."""
    engine = open_region(tmp_path / "store", capacity_bytes=CAPACITY, region_bytes=REGION)
    store(engine, *(make_run(seed, [12_288] * 3) for seed in range(3)))
    engine.close()
    return tmp_path / "store"


def run_recovery(
    directory: Path, namespace: bytes = NAMESPACE, capacity: int = CAPACITY
) -> RecoveryReport:
    disk = open_disk(directory, namespace=namespace)
    recovery = Recovery(disk, capacity, REGION)
    recovery.run()
    regions = disk.state.regions
    disk.state.index.check_integrity({region.slot: region.nbytes for region in regions})
    regions.check_integrity(idle=True)
    for region in regions:
        disk.device.close(region.fd)
    return recovery.report


def test_a_report_counts_what_was_found(directory: Path) -> None:
    """A region is walked once; numbers of removed files are not used again."""
    sealed = RecoveryReport(next_sequence=3, num_regions=3, num_pages=9)
    assert run_recovery(directory) == sealed
    others = replace(sealed, num_pages=0, num_foreign_pages=9)
    assert run_recovery(directory, b"\x22" * 32) == others
    with (directory / "region-0000000000000001.kv").open("r+b") as stream:
        stream.truncate(REGION - 4096)
        stream.truncate(REGION)
    assert run_recovery(directory).num_walked == 1
    assert run_recovery(directory) == sealed
    (directory / "region-0000000000000010.kv").write_bytes(b"")
    (directory / "region-0000000000000011.kv").write_bytes(b"x" * REGION)
    assert run_recovery(directory) == replace(sealed, num_damaged=2, next_sequence=18)
    assert len(list(directory.glob("*.kv"))) == 3
    smaller = replace(sealed, num_regions=2, num_pages=6, num_over_cap=1)
    assert run_recovery(directory, capacity=2 * REGION) == smaller
    left = sorted(file.name for file in directory.glob("*.kv"))
    assert left == [region_name(1), region_name(2)], "the oldest goes"


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_errors_of_this_process_cost_no_data(directory: Path, code: int) -> None:
    device = FaultyDevice(FileDevice(directory), [Fault(1, "open", error=code)])
    with pytest.raises(StoreError, match="cannot be used as a store"):
        open_region(directory, capacity_bytes=CAPACITY, region_bytes=REGION, device=device)
    assert run_recovery(directory).num_pages == 9

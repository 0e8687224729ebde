"""What recovery does with errors that are not damage, and what it reports."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.faulty import Fault, FaultyDevice
from kit.runs import NAMESPACE, make_run
from kit.tiers import open_region, store
from sglang_tiered.errors import StoreError
from sglang_tiered.storage.region import recovery
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    pack_footer,
    unpack_footer,
    unpack_region_header,
)
from sglang_tiered.storage.region.index import PageIndex
from sglang_tiered.storage.region.recovery import RecoveryReport, recover
from sglang_tiered.storage.region.regions import RegionTable

REGION = 64 * 1024
CAPACITY = 8 * REGION


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three sealed regions of three pages each."""
    with_pages = tmp_path / "store"
    fill(with_pages, 3)
    return with_pages


def fill(directory: Path, num_regions: int) -> None:
    engine = open_region(directory, capacity_bytes=CAPACITY, region_bytes=REGION)
    store(engine, *(make_run(seed, [12_288] * 3) for seed in range(num_regions)))
    engine.close()


def run_recovery(
    directory: Path, namespace: bytes = NAMESPACE, device: FileDevice | None = None
) -> RecoveryReport:
    device = device or FileDevice(directory)
    regions, index = RegionTable(), PageIndex()
    report = recover(device, namespace, CAPACITY, regions, index, max_page_bytes=REGION)
    index.check_integrity({region.slot: region.nbytes for region in regions})
    regions.check_integrity(idle=True)
    for region in regions:
        device.close(region.fd)
    return report


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


def test_a_footer_that_fits_no_extent_is_walked(directory: Path) -> None:
    """It verifies, and lists the first extent where none can begin."""
    file = directory / "region-0000000000000001.kv"
    data = bytearray(file.read_bytes())
    header = unpack_region_header(data[:BLOCK_BYTES])
    assert header is not None
    contents = unpack_footer(data[-2 * BLOCK_BYTES : -BLOCK_BYTES], header.nonce)
    assert contents is not None
    contents.extents["offset"][0] += BLOCK_BYTES
    data[-2 * BLOCK_BYTES : -BLOCK_BYTES] = pack_footer(contents, header.nonce)
    file.write_bytes(data)
    report = run_recovery(directory)
    assert (report.num_walked, report.num_pages) == (1, 9)
    assert run_recovery(directory).num_walked == 0


class BadBlock(FileDevice):
    """A disk that cannot read the second page of a region."""

    num_failed = 0

    def readv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        end = offset + sum(buffer.nbytes for buffer in buffers)
        if offset < 2 * BLOCK_BYTES + 12_288 + BLOCK_BYTES <= end:
            self.num_failed += 1
            raise OSError(errno.EIO, "Input/output error")
        return super().readv(fd, buffers, offset)


def test_one_unreadable_extent_is_tried_once(directory: Path) -> None:
    """A failing disk takes seconds for each read: not page by page, as nobody could use them."""
    file = directory / "region-0000000000000001.kv"
    (directory / "CHECKPOINT").unlink(missing_ok=True)
    with file.open("r+b") as stream:
        stream.truncate(REGION - BLOCK_BYTES)
        stream.truncate(REGION)
    for other in ("region-0000000000000000.kv", "region-0000000000000002.kv"):
        (directory / other).unlink()
    device = BadBlock(directory)
    report = run_recovery(directory, device=device)
    assert (report.num_unread, report.num_pages) == (1, 0)
    assert device.num_failed == 3, "each read is tried three times"


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_errors_of_this_process_cost_no_data(directory: Path, code: int) -> None:
    device = FaultyDevice(FileDevice(directory), [Fault(1, "open", error=code)])
    with pytest.raises(StoreError, match="cannot be used as a store"):
        open_region(directory, capacity_bytes=CAPACITY, region_bytes=REGION, device=device)
    assert run_recovery(directory).num_pages == 9


def test_contents_of_regions_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 7)
    held = []
    index_one = recovery._Recovery._index

    def count(self: recovery._Recovery, *arguments: Any) -> None:
        held.append(sum(item.contents is not None for item in self.found))
        index_one(self, *arguments)

    monkeypatch.setattr(recovery._Recovery, "_index", count)
    assert run_recovery(tmp_path).num_regions == 7
    assert len(held) == 7
    assert max(held) <= 3  # the one in hand, and two that its only thread has read ahead

"""Appending, failing and sealing, without the threads of the store."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from sglang_tiered.storage.faulty import Fault, FaultyDevice
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    extent_header_bytes,
    footer_bytes,
    unpack_footer,
    unpack_trailer,
)
from sglang_tiered.storage.region.health import HealthMonitor
from sglang_tiered.storage.region.reclaim import Reclaimer
from sglang_tiered.storage.region.state import StoreState
from sglang_tiered.storage.region.writer import RegionWriter

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_tiered.storage.base import Page

NAMESPACE = b"\x11" * 32
REGION = 16 * BLOCK_BYTES


class Bench:
    def __init__(self, directory: Path, num_regions: int = 4) -> None:
        self.directory = directory
        self.device = FaultyDevice(FileDevice(directory))
        self.state = StoreState(NAMESPACE)
        health = HealthMonitor(lambda: 0.0, 5.0)
        self.reclaimer = Reclaimer(self.device, health, self.state, num_regions * REGION, 5.0)
        self.writer = RegionWriter(self.device, health, self.reclaimer, REGION, 0)

    def files(self) -> list[Path]:
        return sorted(self.directory.glob("*.kv"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def pages(count: int, nbytes: int, start: int = 0) -> list[tuple[bytes, Page]]:
    return [
        (bytes([i]) * 32, (memoryview(bytes([i]) * nbytes),)) for i in range(start, start + count)
    ]


def test_places_follow_the_header(bench: Bench) -> None:
    placed = bench.writer.append(NAMESPACE, pages(2, 5000))
    assert [entry.offset for _, entry in placed] == [8192, 16_384]
    data = bench.files()[0].read_bytes()
    assert data[8192:13_192] == b"\0" * 5000
    assert data[16_384:21_384] == b"\1" * 5000


def test_an_extent_is_appended_only_with_room_for_its_footer(bench: Bench) -> None:
    """14 blocks between header and trailer: 1 footer, so 12 pages of a block beside 1 header."""
    placed = bench.writer.append(NAMESPACE, pages(14, 4096))
    assert len(placed) == 12
    (region,) = bench.state.regions
    assert region.tail + footer_bytes(1, 12) + BLOCK_BYTES == REGION
    bench.writer.seal()
    data = bench.files()[0].read_bytes()
    trailer = unpack_trailer(data[-BLOCK_BYTES:], region.nonce, REGION)
    assert trailer is not None
    footer = data[trailer.footer_offset : trailer.footer_offset + trailer.footer_bytes]
    extents = unpack_footer(footer, region.nonce)
    assert extents is not None
    assert [(e.offset, len(e.pages)) for e in extents] == [(BLOCK_BYTES, 12)]


def test_a_full_region_is_sealed_and_the_next_opened(bench: Bench) -> None:
    first = bench.writer.append(NAMESPACE, pages(12, 4096))
    second = bench.writer.append(NAMESPACE, pages(1, 4096, start=50))
    assert first[0][1].region.sealed
    assert second[0][1].region.sequence == 1
    assert bench.device.calls.count("sync") == 1


@pytest.mark.parametrize("fault", [{"error": errno.EIO}, {"short_bytes": 8192}])
def test_the_offset_of_a_failed_write_is_used_again(bench: Bench, fault: dict[str, int]) -> None:
    bench.writer.append(NAMESPACE, pages(1, 4096))
    bench.device.faults = [Fault(bench.device.calls.count("writev"), "writev", **fault)]
    with pytest.raises(OSError, match=r"Input/output|short write"):
        bench.writer.append(NAMESPACE, pages(2, 4096, start=20))
    ((_, entry),) = bench.writer.append(NAMESPACE, pages(1, 4096, start=30))
    assert entry.offset == 3 * BLOCK_BYTES + extent_header_bytes(1)


def test_a_place_that_keeps_failing_is_given_up(bench: Bench) -> None:
    bench.writer.append(NAMESPACE, pages(1, 4096))
    bench.device.faults = [Fault(bench.device.calls.count("writev"), "writev", 3, errno.EIO)]
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            bench.writer.append(NAMESPACE, pages(1, 4096, start=20))
    ((_, entry),) = bench.writer.append(NAMESPACE, pages(1, 4096, start=20))
    assert entry.region.sequence == 1


def test_failed_creation_leaves_books_and_directory_clean(bench: Bench) -> None:
    for at in range(2):
        operation = ("create", "writev")[at]
        bench.device.faults = [
            Fault(bench.device.calls.count(operation), operation, error=errno.EIO)
        ]
        with pytest.raises(OSError, match="Input/output"):
            bench.writer.append(NAMESPACE, pages(1, 4096))
        assert bench.files() == []
        assert bench.state.regions.physical_bytes == 0
    bench.writer.append(NAMESPACE, pages(1, 4096))
    assert [file.name for file in bench.files()] == ["region-0000000000000002.kv"]


def test_failed_seal_keeps_the_region_in_service(bench: Bench) -> None:
    ((key, entry),) = bench.writer.append(NAMESPACE, pages(1, 4096))
    bench.state.index.put(key, entry)
    bench.device.faults = [Fault(0, "sync", error=errno.EIO)]
    with pytest.raises(OSError, match="Input/output"):
        bench.writer.seal()
    assert entry.region.sealed
    assert entry.region in bench.state.regions
    assert bench.writer.append(NAMESPACE, pages(1, 4096))[0][1].region.sequence == 1


def test_a_victim_that_cannot_be_removed_stays_in_service(tmp_path: Path) -> None:
    bench = Bench(tmp_path, num_regions=1)
    for key, entry in bench.writer.append(NAMESPACE, pages(12, 4096)):
        bench.state.index.put(key, entry)
    bench.device.faults = [Fault(0, "unlink", error=errno.EROFS)]
    with pytest.raises(OSError, match="Read-only"):
        bench.writer.append(NAMESPACE, pages(1, 4096, start=50))
    assert len(bench.state.index) == 12
    assert bench.state.regions.physical_bytes == REGION
    bench.state.check_integrity()
    bench.writer.append(NAMESPACE, pages(1, 4096, start=50))
    assert len(bench.state.index) == 0


def test_finishing_seals_or_removes(bench: Bench) -> None:
    bench.writer.append(NAMESPACE, pages(1, 4096))
    bench.writer.finish()
    assert bench.device.calls.count("sync") == 1
    bench.writer.finish()
    assert len(bench.files()) == 1

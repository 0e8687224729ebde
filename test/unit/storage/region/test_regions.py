"""The region table: bytes, slots and pins follow every change."""

from __future__ import annotations

import pytest

from sglang_tiered.storage.region.regions import Region, RegionTable

NBYTES = 1 << 16


def make(num_regions: int) -> tuple[RegionTable, list[Region]]:
    table = RegionTable()
    regions = [Region(i, -1, NBYTES, b"n" * 16, tail=4096) for i in range(num_regions)]
    for region in regions:
        table.reserve(NBYTES)
        table.add(region)
    return table, regions


def test_a_retired_region_frees_after_its_last_pin() -> None:
    table, (region,) = make(1)
    table.pin(region)
    table.pin(region)
    assert not table.retire(region)
    assert (table.physical_bytes, table.retiring_bytes) == (NBYTES, NBYTES)
    assert not table.unpin(region)
    assert table.unpin(region)
    table.closed(region)
    assert (table.physical_bytes, table.retiring_bytes) == (0, 0)
    table.check_integrity(idle=True)


def test_a_slot_is_reused_only_after_retirement() -> None:
    table, (first, second) = make(2)
    assert (first.slot, second.slot) == (0, 1)
    table.retire(first)
    third = Region(7, -1, NBYTES, b"n" * 16, tail=4096)
    table.reserve(NBYTES)
    table.add(third)
    assert third.slot == 0
    assert table.at(0) is third
    assert table.at(1) is second


def test_unbooked_pin_is_found() -> None:
    table, (region,) = make(1)
    table.pin(region)
    with pytest.raises(AssertionError, match="pinned while idle"):
        table.check_integrity(idle=True)


def test_a_leftover_file_counts_against_the_disk() -> None:
    table, _ = make(1)
    table.reserve(NBYTES)
    table.leftovers["region-0000000000000009.kv"] = NBYTES
    table.check_integrity(idle=True)
    del table.leftovers["region-0000000000000009.kv"]
    with pytest.raises(AssertionError, match="physical"):
        table.check_integrity(idle=True)

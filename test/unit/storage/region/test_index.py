"""Index and region table: counts follow every change."""

from __future__ import annotations

import pytest

from sglang_tiered.storage.region.index import Entry, Index, Region, RegionTable

KEYS = [bytes([i]) * 32 for i in range(6)]
NBYTES = 1 << 16


def make(num_regions: int) -> tuple[Index, RegionTable, list[Region]]:
    table = RegionTable()
    regions = [Region(i, -1, NBYTES, b"n" * 16, tail=4096) for i in range(num_regions)]
    for region in regions:
        table.reserve(NBYTES)
        table.add(region)
    return Index(), table, regions


def test_a_later_entry_replaces_and_the_old_region_loses_it() -> None:
    index, table, (first, second) = make(2)
    index.put(KEYS[0], Entry(first, 8192, 100, 1))
    index.put(KEYS[0], Entry(second, 8192, 50, 2))
    assert (first.num_live, second.num_live, index.stored_bytes) == (0, 1, 50)
    assert index.drop_region(first) == 0
    assert KEYS[0] in index
    index.check_integrity(table)


def test_drop_only_while_the_key_points_there() -> None:
    index, table, (first, second) = make(2)
    old = Entry(first, 8192, 100, 1)
    index.put(KEYS[0], old)
    new = Entry(second, 8192, 100, 1)
    index.put(KEYS[0], new)
    index.drop(KEYS[0], old)
    assert index.get(KEYS[0]) is new
    index.drop(KEYS[0], new)
    assert KEYS[0] not in index
    index.check_integrity(table)


def test_drop_region_takes_its_keys_only() -> None:
    index, table, (first, second) = make(2)
    for i, key in enumerate(KEYS):
        index.put(key, Entry((first, second)[i % 2], 8192, 10, i))
    assert index.drop_region(first) == 3
    assert [key in index for key in KEYS] == [False, True] * 3
    assert index.stored_bytes == 30
    index.check_integrity(table)


def test_clear_empties_the_counts() -> None:
    index, table, (region,) = make(1)
    index.put(KEYS[0], Entry(region, 8192, 10, 1))
    index.clear()
    assert (len(index), index.stored_bytes, region.num_live) == (0, 0, 0)
    index.check_integrity(table)


def test_retired_region_gives_its_bytes_back_after_the_last_pin() -> None:
    _, table, (region,) = make(1)
    table.pin(region)
    table.pin(region)
    assert not table.retire(region)
    assert (table.physical_bytes, table.retiring_bytes) == (NBYTES, NBYTES)
    assert not table.unpin(region)
    assert table.unpin(region)
    table.closed(region)
    assert (table.physical_bytes, table.retiring_bytes) == (0, 0)
    table.check_integrity(idle=True)


def test_unbooked_pin_is_found() -> None:
    _, table, (region,) = make(1)
    table.pin(region)
    with pytest.raises(AssertionError, match="pinned while idle"):
        table.check_integrity(idle=True)


def test_wrong_live_count_is_found() -> None:
    index, table, (region,) = make(1)
    index.put(KEYS[0], Entry(region, 8192, 10, 1))
    region.num_live = 2
    with pytest.raises(AssertionError, match="1 entries, num_live 2"):
        index.check_integrity(table)

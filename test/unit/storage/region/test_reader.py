"""How a load is cut into reads."""

from __future__ import annotations

from sglang_tiered.storage.region.pending import Wanted, plan_spans
from sglang_tiered.storage.region.regions import Region

FIRST = Region(0, -1, 1 << 30, b"n" * 16)
SECOND = Region(1, -1, 1 << 30, b"n" * 16)


def wanted(position: int, region: Region, offset: int, length: int) -> Wanted:
    page = (memoryview(b""),)
    return Wanted(position, bytes([position]) * 32, region, offset, length, 0, page)


def positions(items: list[Wanted]) -> list[list[int]]:
    return [[item.position for item in span] for span in plan_spans(items)]


def test_adjacent_pages_are_one_read() -> None:
    items = [
        wanted(0, FIRST, 8192, 5000),
        wanted(1, FIRST, 16_384, 4096),
        wanted(2, FIRST, 20_480, 1),
    ]
    assert positions(items) == [[0, 1, 2]]


def test_gaps_and_region_changes_start_new_reads() -> None:
    items = [
        wanted(0, FIRST, 8192, 4096),
        wanted(1, FIRST, 16_384, 4096),
        wanted(2, SECOND, 20_480, 4096),
        wanted(3, SECOND, 8192, 4096),
    ]
    assert positions(items) == [[0], [1], [2], [3]]


def test_long_runs_are_spread_over_readers() -> None:
    items = [wanted(i, FIRST, 8192 + (i << 18), 1 << 18) for i in range(9)]
    assert positions(items) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_page_larger_than_a_read_goes_alone() -> None:
    items = [wanted(i, FIRST, 8192 + (i << 22), 1 << 22) for i in range(2)]
    assert positions(items) == [[0], [1]]

"""The choice of the victim."""

from __future__ import annotations

from sglang_tiered.storage.region.reclaim import choose_victim
from sglang_tiered.storage.region.regions import Region


def region(sequence: int, *, sealed: bool = True, pins: int = 0) -> Region:
    return Region(sequence, -1, 1 << 16, b"n" * 16, tail=4096, sealed=sealed, pins=pins)


def test_nothing_to_choose_from() -> None:
    assert choose_victim([]) is None


def test_the_open_region_is_never_chosen() -> None:
    assert choose_victim([region(0, sealed=False)]) is None


def test_a_region_still_being_written_is_never_chosen() -> None:
    writing = region(0)
    writing.num_writing = 1
    assert choose_victim([writing]) is None


def test_the_oldest_goes_first() -> None:
    oldest = region(2)
    assert choose_victim([region(4), oldest, region(3)]) is oldest


def test_a_region_being_sealed_goes_in_its_turn() -> None:
    sealing = region(1, pins=1)
    sealing.syncing = True
    assert choose_victim([region(5), sealing]) is sealing


def test_a_region_being_read_goes_last() -> None:
    idle = region(5)
    assert choose_victim([region(1, pins=1), idle]) is idle
    pinned = region(1, pins=1)
    assert choose_victim([pinned]) is pinned

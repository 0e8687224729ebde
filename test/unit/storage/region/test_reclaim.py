"""The choice of the victim."""

from __future__ import annotations

from sglang_tiered.storage.region.reclaim import choose_victim
from sglang_tiered.storage.region.regions import Region


def region(sequence: int, *, last_hit: int = -1, sealed: bool = True, pins: int = 0) -> Region:
    return Region(
        sequence, -1, 1 << 16, b"n" * 16, tail=4096, sealed=sealed, last_hit=last_hit, pins=pins
    )


def test_nothing_to_choose_from() -> None:
    assert choose_victim([]) is None


def test_the_open_region_is_never_chosen() -> None:
    assert choose_victim([region(0, sealed=False)]) is None


def test_a_region_still_being_written_is_never_chosen() -> None:
    writing = region(0)
    writing.num_writing = 1
    assert choose_victim([writing]) is None


def test_never_hit_goes_first_and_the_oldest_of_those() -> None:
    oldest = region(2)
    assert choose_victim([region(1, last_hit=5), region(3), oldest]) is oldest


def test_hit_longest_ago_goes_before_hit_lately() -> None:
    stale = region(9, last_hit=3)
    assert choose_victim([region(1, last_hit=8), stale, region(2, last_hit=4)]) is stale


def test_a_region_being_sealed_does_not_save_itself_at_the_cost_of_a_hot_one() -> None:
    sealing = region(5, pins=1)
    sealing.syncing = True
    assert choose_victim([region(1, last_hit=9), sealing]) is sealing


def test_a_region_being_read_goes_last() -> None:
    idle = region(5, last_hit=9)
    assert choose_victim([region(1, pins=1), idle]) is idle
    pinned = region(1, pins=1)
    assert choose_victim([pinned]) is pinned

"""The choice of the victim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered.storage.region import reclaim
from sglang_tiered.storage.region.reclaim import choose_own_victim
from sglang_tiered.storage.region.regions import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

A, B = b"a" * 16, b"b" * 16


def region(sequence: int, *, sealed: bool = True, pins: int = 0) -> Region:
    return Region(sequence, -1, 1 << 16, b"n" * 16, tail=4096, sealed=sealed, pins=pins)


def choose_victim(regions: Sequence[Region], useless: Sequence[Region] = ()) -> Region | None:
    return reclaim.choose_victim(regions, lambda region: region in useless)


def owned(sequence: int, **bytes_of: int) -> Region:
    """A region of 64 KiB with so much of the tenants A and B."""
    made = region(sequence)
    made.tenant_bytes = {(A if name == "a" else B): size for name, size in bytes_of.items()}
    return made


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


def test_an_unreadable_region_goes_before_the_oldest() -> None:
    useless = region(7)
    assert choose_victim([region(1), useless, region(9)], [useless]) is useless


def test_a_useless_region_being_read_goes_last() -> None:
    useless, idle = region(1, pins=1), region(5)
    assert choose_victim([useless, idle], [useless]) is idle


def test_a_tenants_share_takes_its_oldest_region() -> None:
    own = owned(3, a=40_000)
    assert choose_own_victim([owned(1, b=60_000), owned(5, a=60_000), own], A) is own


def test_a_share_spares_regions_mostly_of_others() -> None:
    assert choose_own_victim([owned(1, a=20_000, b=20_001), owned(2, b=9)], A) is None
    shared = owned(1, a=20_000, b=20_000)
    assert choose_own_victim([shared], A) is shared


def test_a_share_costs_others_a_bounded_rewrite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reclaim, "_MAX_SAVED_BYTES", 10_000)
    assert choose_own_victim([owned(1, a=40_000, b=10_001)], A) is None
    assert choose_own_victim([owned(1, a=40_000, b=10_000)], A) is not None


def test_a_share_spares_foreign_and_busy_regions() -> None:
    foreign, read, written = owned(1, a=60_000), owned(2, a=60_000), owned(3, a=60_000)
    foreign.num_foreign = read.pins = written.num_writing = 1
    assert choose_own_victim([foreign, read, written], A) is None

"""The choice of the victim."""

from __future__ import annotations

import pytest

from sglang_tiered.storage.region import reclaim
from sglang_tiered.storage.region.reclaim import choose_own_victim, choose_victim
from sglang_tiered.storage.region.regions import Region

A, B = b"a" * 16, b"b" * 16


def region(sequence: int, a: int = 0, b: int = 0) -> Region:
    """A region of 64 KiB with so many bytes of the tenants A and B."""
    made = Region(sequence, -1, 1 << 16, b"n" * 16, tail=4096, sealed=True)
    made.tenant_bytes = {name: size for name, size in ((A, a), (B, b)) if size}
    return made


def test_useless_then_oldest_then_burdened_or_read() -> None:
    unsealed, written, useless, oldest, young, read, heavy = map(region, range(7))
    useless.sequence = 9
    unsealed.sealed = False
    written.num_writing = read.pins = 1
    oldest.pins, oldest.syncing = 1, True  # being sealed, which ends soon
    left = [heavy, read, young, unsealed, oldest, written, useless]
    order = []
    while victim := choose_victim(
        sorted(left, key=lambda r: r.sequence),
        [useless] if useless in left else [],
        lambda r: int(r is heavy),
    ):
        order.append(victim)
        left.remove(victim)
    assert order == [useless, oldest, young, read, heavy]
    assert left == [unsealed, written], "these never go"


def test_a_share_takes_its_oldest_own_region(monkeypatch: pytest.MonkeyPatch) -> None:
    own = region(3, a=40_000, b=10_000)
    foreign, read, written = region(0, a=60_000), region(1, a=60_000), region(2, a=60_000)
    foreign.num_foreign = read.pins = written.num_writing = 1
    others = [region(1, a=20_000, b=20_001), foreign, read, written, region(2, b=60_000)]
    assert choose_own_victim([*others, own, region(5, a=60_000)], A) is own
    assert choose_own_victim(others, A) is None
    assert choose_own_victim([own], A, lambda r: 25_001) is None, "pinned pages are written again"
    monkeypatch.setattr(reclaim, "MAX_SAVED_BYTES", 9_999)
    assert choose_own_victim([own], A) is None, "others' pages are, within a bound"

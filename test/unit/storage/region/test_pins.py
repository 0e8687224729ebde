"""What pins keep, and where they end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kit.runs import make_run, of
from kit.tiers import close_whole, load, loads, open_region, store
from kit.waiting import TIMEOUT_S
from sglang_tiered.storage.base import PinRefusal, Reason, Run
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine, pins, state

PAGE = 4096
REGION = 64 * PAGE
CAPACITY = 8 * REGION
BOUND = 3 * REGION  # half of all regions but two
A = b"a" * 16


def open_engine(directory: Path, **changes: Any) -> RegionEngine:
    sizes = {"capacity_bytes": CAPACITY, "region_bytes": REGION}
    return open_region(directory, **(sizes | changes))


def pin(engine: RegionEngine, name: str, keys: Sequence[bytes], **more: Any) -> None:
    made = engine.pin(name, keys, **more)
    assert not isinstance(made, PinRefusal), made
    assert is_true(made, TIMEOUT_S)


def refused(engine: RegionEngine, name: str, keys: Sequence[bytes], **more: Any) -> PinRefusal:
    refusal = engine.pin(name, keys, **more)
    assert isinstance(refusal, PinRefusal)
    return refusal


@pytest.mark.parametrize("spread", ["dense", "spread", "late"])
def test_a_full_bound_outlives_ten_capacities(tmp_path: Path, spread: str) -> None:
    """The pinned pages side by side, or a few in every region, or stored after their pin."""
    engine = open_engine(tmp_path / "s")
    assert engine.pin_bound_bytes == BOUND
    kept = [make_run(seed, [PAGE] * 8) for seed in range(BOUND // PAGE // 8)]
    loose = [make_run(1000 + seed, [PAGE] * 8) for seed in range(len(kept))]
    if spread == "late":
        for number, run in enumerate(kept):
            pin(engine, str(number), run.keys)
    for number, (run, other) in enumerate(zip(kept, loose, strict=True)):
        store(engine, run, *([other] if spread != "dense" else []))
        if spread != "late":
            pin(engine, str(number), run.keys)
    before = engine.stats()
    for seed in range(10 * CAPACITY // PAGE // 16):
        store(engine, make_run(2000 + seed, [PAGE] * 16))
        assert engine.stats().physical_bytes <= CAPACITY
        if seed % 40 == 0:
            for run in kept:
                assert engine.lookup(run.keys).num_hits == 8, "a pinned page is no hit meanwhile"
    after = engine.stats()
    loads(engine, *kept)
    assert not any(engine.contains([key for run in loose for key in run.keys]))
    written = after.bytes_written - before.bytes_written
    stored = after.bytes_stored - before.bytes_stored
    assert written / stored < 1.6, f"write amplification {written / stored:.2f}"
    assert after.num_pages_reinserted > 0 or spread == "dense"
    close_whole(engine)


@pytest.mark.parametrize("num_regions", [3, 4, 5])
@pytest.mark.parametrize("num_pages", [1, 2, 7])
def test_large_pages_find_room_beside_pins(
    tmp_path: Path, num_regions: int, num_pages: int
) -> None:
    """Pages that need an empty region, while every region may hold pinned ones."""
    engine = open_engine(tmp_path / "s", capacity_bytes=num_regions * REGION)
    large = (REGION - 16 * PAGE) // PAGE // num_pages * PAGE
    kept: list[Run] = []
    for seed in range(6 * num_regions):
        run = make_run(seed, [5 * PAGE])
        store(engine, run)
        if not isinstance(engine.pin(str(seed), run.keys), PinRefusal):
            kept.append(run)
        store(engine, make_run(100 + seed, [large] * num_pages))
    assert len(kept) == engine.pin_bound_bytes // (5 * PAGE)
    loads(engine, *kept)
    close_whole(engine)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_pages_beyond_todays_regions_stop_no_reclaim(tmp_path: Path, is_pinned: bool) -> None:
    """Though they are loaded, or pinned since regions were larger: none could be written again."""
    engine = open_engine(tmp_path / "s")
    large, small = of(A, make_run(1, [5 * PAGE])), of(A, make_run(2, [PAGE] * 36))
    store(engine, large, small)
    if is_pinned:
        pin(engine, "p", large.keys, tenant=A)
    close_whole(engine)
    share = 2 * REGION if is_pinned else None
    engine = open_engine(tmp_path / "s", region_bytes=8 * PAGE, max_tenant_bytes=share)
    assert load(engine, large) == [Reason.MISS]
    assert engine.lookup(small.keys).num_hits == 36
    for seed in range(100, 100 + 2 * CAPACITY // PAGE // 8):
        store(engine, of(A, make_run(seed, [PAGE] * 8)))
    assert not any(engine.contains(small.keys)), "its region went in its turn"
    close_whole(engine)


def test_too_many_pins_keys_and_notes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(tmp_path / "s")
    few, more = make_run(1, [PAGE] * 6).keys, make_run(2, [PAGE] * 5).keys
    monkeypatch.setattr(state, "MAX_KEYS", 10)
    pin(engine, "a", few)
    pin(engine, "b", few)  # the same pages
    assert "pins would name 11 pages, at most 10" in refused(engine, "c", more).why
    monkeypatch.setattr(state, "MAX_PINS", 2)
    assert "2 pins already" in refused(engine, "c", more[:1]).why
    monkeypatch.setattr(pins, "MAX_NOTES_BYTES", 100)
    pin(engine, "a", few[:1], data=b"m" * 100)
    pin(engine, "a", few[:1], data=b"m" * 100)  # in its place
    assert "pins would note 101 bytes" in refused(engine, "b", few[:1], data=b"n").why
    assert engine.unpin("a").result(TIMEOUT_S)
    pin(engine, "b", more[:1], data=b"n")
    close_whole(engine)


def test_a_share_makes_room_beside_its_pins(tmp_path: Path) -> None:
    """A tenant at its share, with pinned pages in each of its regions, still stores."""
    engine = open_engine(tmp_path / "s", capacity_bytes=16 * REGION, max_tenant_bytes=4 * REGION)
    kept: list[Run] = []
    for seed in range(200):
        small = of(A, make_run(2 * seed, [PAGE] * 4))
        rest = of(A, make_run(2 * seed + 1, [PAGE] * 36))
        store(engine, small, rest)
        if len(kept) < 15:  # a quarter of the share
            kept.append(small)
            pin(engine, str(seed), small.keys, tenant=A)
        (usage,) = engine.tenants(9)
        assert usage.physical_bytes <= 4 * REGION
    for run in kept:
        assert engine.lookup(run.keys).num_hits == 4
    close_whole(engine)

"""The choice of the victim, and what is saved of it."""

from __future__ import annotations

from pathlib import Path

from kit.runs import make_run
from kit.tiers import close_whole, loads, open_region, store
from sglang_tiered.storage.region.reclaim import choose_victim
from sglang_tiered.storage.region.regions import Region

PAGE = 4096
REGION = 64 * PAGE


def test_useless_then_oldest_then_burdened_or_read() -> None:
    regions = [Region(n, -1, REGION, b"n" * 16, tail=PAGE, sealed=True) for n in range(7)]
    unsealed, written, useless, oldest, young, read, heavy = regions
    useless.sequence = 9
    unsealed.sealed = False
    written.num_writing = read.pins = 1
    oldest.pins, oldest.syncing = 1, True  # being sealed, which ends soon
    left = [unsealed, written, oldest, young, read, heavy, useless]
    order = []
    while victim := choose_victim(
        left, [useless] if useless in left else [], lambda r: int(r is heavy)
    ):
        order.append(victim)
        left.remove(victim)
    assert order == [useless, oldest, young, read, heavy]
    assert left == [unsealed, written], "these never go"


def test_what_is_loaded_outlives_what_is_not(tmp_path: Path) -> None:
    """And what was loaded once is let go in the end."""
    engine = open_region(tmp_path / "s", capacity_bytes=4 * REGION, region_bytes=REGION)
    hot, cold, once = (make_run(seed, [PAGE] * 3) for seed in (0, 1, 99))
    store(engine, hot, cold, once)
    loads(engine, once)
    for seed in range(2, 42):  # ten times the capacity
        store(engine, make_run(seed, [PAGE] * 50))
        loads(engine, hot)
    assert engine.lookup(cold.keys).num_hits == engine.lookup(once.keys).num_hits == 0
    stats = engine.stats()
    assert stats.bytes_reinserted == stats.num_pages_reinserted * PAGE > 3 * PAGE
    close_whole(engine)

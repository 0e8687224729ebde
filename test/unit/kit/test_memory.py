"""MemoryEngine beyond the contract: pages are evicted one by one, least recently used first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.memory import MemoryEngine
from sglang_tiered.storage.base import Reason

if TYPE_CHECKING:
    from kit.runs import Blank, MakeRun


def test_a_load_protects_from_eviction(make_run: MakeRun, blank: Blank) -> None:
    engine = MemoryEngine(300)
    first, second, third = (make_run(seed, [100]) for seed in range(3))
    for run in (first, second, third):
        engine.submit_store(run)
    engine.submit_load(blank(first))
    engine.submit_store(make_run(3, [100]))
    assert engine.lookup(first.keys).num_hits == 1
    assert engine.lookup(second.keys).num_hits == 0
    assert engine.stats().num_pages_evicted == 1


def test_a_run_beyond_the_cap_evicts_in_order(make_run: MakeRun) -> None:
    engine = MemoryEngine(250)
    run = make_run(1, [100, 100, 100])
    assert engine.submit_store(run).reasons == [Reason.OK] * 3
    assert engine.lookup(run.keys).num_hits == 0
    assert engine.lookup(run.keys[1:]).num_hits == 2
    engine.check_integrity()

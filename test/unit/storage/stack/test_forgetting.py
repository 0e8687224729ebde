"""Pages forgotten in all tiers at once: nothing on its way between them brings one back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.runs import of, select
from kit.waiting import TIMEOUT_S, drained, eventually, finished
from sglang_tiered.storage.base import Erasure, JobKind, Reason
from sglang_tiered.storage.promises import is_true

if TYPE_CHECKING:
    from kit.runs import Blank, MakeRun
    from sglang_tiered.storage.stack import TierStack

PAGES = [8192] * 4
TENANT = b"a" * 16


def test_a_forgotten_page_leaves_both_tiers(
    engine: TierStack, tiers: Any, make_run: MakeRun
) -> None:
    run = of(TENANT, make_run(1, PAGES))
    finished(engine.submit_store(run))
    eventually(lambda: engine.stack_stats().num_demoted == 4, "not everything was demoted")
    assert is_true(engine.erase(Erasure.of(run.keys[1:2])), TIMEOUT_S)
    expected = [True, False, True, True]
    assert engine.contains(run.keys) == expected
    assert engine.nvme.contains(run.keys) == expected
    assert tiers.bucket.contains(run.keys) == expected
    finished(engine.submit_store(select(run, [1])))
    eventually(lambda: all(tiers.bucket.contains(run.keys)), "what was stored again is not copied")
    assert engine.nvme.contains(run.keys) == [True] * 4


def test_what_a_peer_forgot_is_only_hidden_below(
    engine: TierStack, tiers: Any, make_run: MakeRun
) -> None:
    run = of(TENANT, make_run(1, PAGES))
    finished(engine.submit_store(run))
    eventually(lambda: engine.stack_stats().num_demoted == 4, "not everything was demoted")
    assert is_true(engine.erase(Erasure.of(run.keys[2:], spread=False)), TIMEOUT_S)
    assert engine.contains(run.keys) == [True, True, False, False]
    assert tiers.bucket.stats().num_pages == 4


def test_a_page_forgotten_while_loading_is_not_promoted(
    engine: TierStack, tiers: Any, make_run: MakeRun, blank: Blank
) -> None:
    run = make_run(1, PAGES)
    finished(tiers.bucket.submit_store(of(TENANT, run)))
    tiers.bucket.holding = {JobKind.LOAD}
    job = engine.submit_load(blank(run), tenant=TENANT)
    tiers.bucket.holding = set()
    forgotten = engine.erase(Erasure.of(run.keys[:1], spread=False))
    tiers.bucket.hidden.clear()  # it was read before
    tiers.bucket.release()
    assert finished(job) == [Reason.OK] * 4
    assert is_true(forgotten, TIMEOUT_S)
    assert drained(engine.nvme, TIMEOUT_S)
    assert engine.nvme.contains(run.keys) == [False] * 4

"""Pages that NVMe lacks, from other servers and from the bucket: where they are asked for, what is
tried next, and what a purge leaves of them."""

from __future__ import annotations

from typing import Any

import pytest

from kit.runs import blank, make_run, of, page_data, select
from kit.tiers import load, store
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.storage.base import (
    REMOTE_TIERS,
    Erasure,
    Job,
    LookupResult,
    Reason,
    Run,
    Span,
    Stop,
    Tier,
)
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.stack import TierStack

TENANT = b"a" * 16
RUN = of(TENANT, make_run(1, [8192] * 4))
KEYS = RUN.keys
OK, MISS, IO_ERROR = Reason.OK, Reason.MISS, Reason.IO_ERROR


@pytest.fixture
def full(tiers: Any, three: TierStack) -> TierStack:
    """Peers and bucket hold the run, NVMe does not."""
    store(tiers.peers, RUN)
    store(tiers.bucket, RUN)
    return three


def test_a_prefix_over_three_tiers_is_one_load(tiers: Any, three: TierStack) -> None:
    run = of(TENANT, make_run(1, [8192] * 8))
    store(three, select(run, [0, 5]))
    store(tiers.peers, select(run, [0, 1, 2, 5]))
    store(tiers.bucket, select(run, [2, 3, 4, 5]))
    spans = [(Tier.NVME, 1), (Tier.PEER, 2), (Tier.OBJECT, 2), (Tier.NVME, 1)]
    assert three.lookup_spans(run.keys) == [Span(*span) for span in spans]
    assert three.lookup(run.keys) == LookupResult(6, Stop.MISS)
    target = blank(run)
    assert finished(three.submit_load(target)) == [OK] * 6 + [MISS] * 2
    assert page_data(target) == page_data(run)[:6] + [b"\xa5" * 8192] * 2
    assert tiers.peers.asked == [run.keys[1:3]]
    assert tiers.bucket.asked == [run.keys[3:5]]


@pytest.mark.parametrize("reason", [MISS, Reason.CORRUPT, IO_ERROR])
@pytest.mark.parametrize("order", [REMOTE_TIERS, REMOTE_TIERS[::-1]])
def test_what_one_remote_tier_fails_the_other_serves(
    tiers: Any, three: TierStack, reason: Reason, order: tuple[Tier, ...]
) -> None:
    tiers.order = order
    first, second = (three.remote[tier] for tier in order)
    store(first, RUN)
    store(second, select(RUN, [0, 1, 2]))
    first.failing = dict.fromkeys(KEYS[1:], reason)  # type: ignore[attr-defined]
    target = blank(RUN)
    assert finished(three.submit_load(target, tenant=TENANT)) == [OK, OK, OK, reason]
    assert page_data(target)[:3] == page_data(RUN)[:3]
    assert second.asked == [KEYS[1:3]]  # type: ignore[attr-defined]
    assert [three.remote_stats(tier).num_recovered for tier in order] == [0, 2]
    eventually(lambda: three.nvme.view.contains(KEYS) == [True] * 3 + [False], "not kept")
    assert [three.remote_stats(tier).num_promoted for tier in order] == [1, 2]


@pytest.mark.parametrize("keys", [None, KEYS[2:]], ids=["tenant", "pages"])
def test_a_purge_is_propagated_unless_it_is_remote(
    tiers: Any, full: TierStack, keys: tuple[bytes, ...] | None
) -> None:
    """And what another server purged is hidden in the bucket, not purged again: it may have been
    long ago."""
    tenant, gone = None if keys else TENANT, keys or KEYS
    assert is_true(full.erase(Erasure(keys, tenant, spread=False)), TIMEOUT_S)
    assert tiers.peers.stats().num_pages == 4, "it told the others again"
    assert tiers.bucket.hidden == set(gone)
    assert tiers.bucket.stats().num_pages == 4, "it purged the bucket again"
    assert is_true(full.erase(Erasure(keys, tenant)), TIMEOUT_S)
    assert tiers.peers.stats().num_pages == tiers.bucket.stats().num_pages == 4 - len(gone)


def raising(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


def test_raising_tier_leaves_no_read_unowned(
    tiers: Any, three: TierStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVMe's part was under way already: it would land in pages that were given to others."""
    store(three, select(RUN, [0, 1]))
    store(tiers.peers, select(RUN, [2, 3]))
    store(tiers.bucket, select(RUN, [2]))
    tiers.peers.is_raising = True
    nvme: list[Job] = []
    submit = three.nvme.submit_load

    def note(run: Run, **named: Any) -> Job:
        nvme.append(submit(run, **named))
        return nvme[-1]

    monkeypatch.setattr(three.nvme, "submit_load", note)
    ended_first: list[bool] = []
    job = three.submit_load(blank(RUN))
    job.call_at_end(lambda _: ended_first.append(all(nvme[0].ok)))
    assert finished(job) == [OK] * 3 + [IO_ERROR], "the bucket served one of two"
    assert ended_first == [True]


@pytest.mark.parametrize("is_lone", [False, True])
@pytest.mark.parametrize(
    ("place", "name", "reason"),
    [("nvme", "submit_load", IO_ERROR), ("peers", "contains", OK), ("observer", "", IO_ERROR)],
)
def test_whatever_raises_its_load_ends(
    tiers: Any,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    name: str,
    reason: Reason,
    is_lone: bool,
) -> None:
    tiers.bucket.known = False
    engine = tiers.open(peers=not is_lone, bucket=not is_lone)
    store(engine, RUN)
    if place == "observer":
        engine.observe(raising)
    else:
        monkeypatch.setattr(engine.nvme if place == "nvme" else tiers.peers, name, raising)
    assert load(engine, RUN) == [reason] * 4
    if place == "peers" and not is_lone:
        assert load(engine, make_run(2, [100])) == [MISS]
    monkeypatch.undo()


def test_raising_tier_stops_no_purge_of_others(tiers: Any, full: TierStack) -> None:
    """What was read before it must not be kept by NVMe either."""
    store(full, RUN)
    generation = full._generation
    tiers.peers.is_raising = True
    assert is_true(full.erase(Erasure()), TIMEOUT_S) is False
    assert full._generation == generation + 1
    assert not any(tiers.bucket.contains(KEYS)), "the bucket was told"
    assert not any(full.nvme.contains(KEYS))

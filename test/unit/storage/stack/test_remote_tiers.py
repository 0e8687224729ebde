"""Pages that NVMe lacks, from other servers and from the bucket: where they are asked for, what is
tried next, and what a purge leaves of them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from shared_tier import SharedTier

from kit.memory import MemoryEngine
from kit.stalls import least_stall
from kit.waiting import TIMEOUT_S, drained, eventually, finished
from sglang_tiered.storage.base import (
    Erasure,
    Health,
    Job,
    JobKind,
    LookupResult,
    Reason,
    Run,
    Stop,
    Tier,
)
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.stack import TierStack
from sglang_tiered.storage.stack.promotion import Promoter
from sglang_tiered.storage.stack.tiers import REMOTE_TIERS, Span, StackSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from kit.runs import Blank, MakeRun, PageData


PAGES = [8192] * 4
TENANT = b"a" * 16
SETTINGS = StackSettings(promotion_bytes=1 << 20, retry_s=0.01)


class Forgetful(SharedTier):
    """Says that it holds more than it can serve: as another server whose page just went, or one
    whose bytes arrive damaged."""

    def __init__(self, tier: Tier = Tier.OBJECT) -> None:
        super().__init__(tier=tier)
        self.failing: dict[bytes, Reason] = {}
        self.asked: list[tuple[bytes, ...]] = []

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        self.asked.append(run.keys)
        job = super().submit_load(run, deadline_s=deadline_s)
        if job.done:
            job.reasons = [
                self.failing.get(key, reason)
                for key, reason in zip(run.keys, job.reasons, strict=True)
            ]
        return job


class World:
    """An engine over NVMe, peers and a bucket, any of the last two left out."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.peers, self.bucket = Forgetful(tier=Tier.PEER), Forgetful()
        self.bucket.known = False  # nothing is demoted
        self.order: tuple[Tier, ...] = REMOTE_TIERS
        self.made: list[TierStack] = []

    def open(self, *, peers: bool = True, bucket: bool = True) -> TierStack:
        nvme = RegionEngine(
            self.directory,
            namespace=b"\x11" * 32,
            capacity_bytes=1 << 22,
            region_bytes=1 << 18,
            num_threads=2,
        )
        remote = [self.peers] * peers + [self.bucket] * bucket
        engine = TierStack(nvme, remote, SETTINGS, order=lambda: self.order)
        self.made.append(engine)
        return engine


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "store")
    yield made
    made.peers.release()
    made.bucket.release()
    for engine in made.made:
        assert drained(engine, TIMEOUT_S)
        engine.check_integrity()
        engine.close()


def part(run: Run, *positions: int) -> Run:
    keys = tuple(run.keys[i] for i in positions)
    return Run(keys, tuple(run.pages[i] for i in positions), TENANT)


def test_a_prefix_over_three_tiers_is_one_load(
    world: World, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    engine = world.open()
    run = make_run(1, PAGES * 2)
    finished(engine.submit_store(part(run, 0, 5)))
    finished(world.peers.submit_store(part(run, 0, 1, 2, 5)))
    finished(world.bucket.submit_store(part(run, 2, 3, 4, 5)))
    assert engine.lookup_spans(run.keys) == [
        Span(Tier.NVME, 1),
        Span(Tier.PEER, 2),
        Span(Tier.OBJECT, 2),
        Span(Tier.NVME, 1),
    ]
    assert engine.lookup(run.keys) == LookupResult(6, Stop.MISS)
    target = blank(run)
    assert finished(engine.submit_load(target)) == [Reason.OK] * 6 + [Reason.MISS] * 2
    assert page_data(target)[:6] == page_data(run)[:6]
    assert world.peers.asked == [run.keys[1:3]]
    assert world.bucket.asked == [run.keys[3:5]]


def test_the_caller_orders_the_remote_tiers(world: World, make_run: MakeRun, blank: Blank) -> None:
    engine = world.open()
    run = make_run(1, PAGES)
    finished(world.peers.submit_store(part(run, 0, 1, 2)))
    finished(world.bucket.submit_store(part(run, 0, 1, 3)))
    assert engine.lookup_spans(run.keys) == [Span(Tier.PEER, 3), Span(Tier.OBJECT, 1)]
    world.order = (Tier.OBJECT, Tier.PEER)
    assert engine.lookup_spans(run.keys) == [
        Span(Tier.OBJECT, 2),
        Span(Tier.PEER, 1),
        Span(Tier.OBJECT, 1),
    ]
    assert finished(engine.submit_load(blank(run))) == [Reason.OK] * 4
    assert world.bucket.asked == [(run.keys[0], run.keys[1], run.keys[3])]
    assert world.peers.asked == [(run.keys[2],)]


@pytest.mark.parametrize("reason", [Reason.MISS, Reason.CORRUPT, Reason.IO_ERROR])
@pytest.mark.parametrize("order", [REMOTE_TIERS, REMOTE_TIERS[::-1]])
def test_what_one_remote_tier_fails_the_other_serves(
    world: World,
    make_run: MakeRun,
    blank: Blank,
    page_data: PageData,
    reason: Reason,
    order: tuple[Tier, ...],
) -> None:
    engine = world.open()
    world.order = order
    tiers = {Tier.PEER: world.peers, Tier.OBJECT: world.bucket}
    first, second = (tiers[tier] for tier in order)
    run = make_run(1, PAGES)
    finished(first.submit_store(part(run, 0, 1, 2, 3)))
    finished(second.submit_store(part(run, 0, 1, 2)))
    first.failing = dict.fromkeys(run.keys[1:], reason)
    target = blank(run)
    reasons = finished(engine.submit_load(target, tenant=TENANT))
    assert reasons == [Reason.OK, Reason.OK, Reason.OK, reason]
    assert page_data(target)[:3] == page_data(run)[:3]
    assert second.asked == [run.keys[1:3]]
    assert engine.remote_stats(order[1]).num_recovered == 2
    assert engine.remote_stats(order[0]).num_recovered == 0
    eventually(lambda: engine.nvme.view.contains(run.keys) == [True] * 3 + [False], "not kept")
    assert [engine.remote_stats(tier).num_promoted for tier in order] == [1, 2]


def test_each_tier_is_asked_for_a_page_once(world: World, make_run: MakeRun, blank: Blank) -> None:
    engine = world.open()
    run = make_run(1, PAGES)
    for tier in (world.peers, world.bucket):
        finished(tier.submit_store(part(run, 0, 1, 2, 3)))
        tier.failing = dict.fromkeys(run.keys, Reason.IO_ERROR)
    assert finished(engine.submit_load(blank(run), tenant=TENANT)) == [Reason.IO_ERROR] * 4
    assert world.peers.asked == world.bucket.asked == [run.keys]


def test_no_other_tier_is_tried_after_the_deadline(
    world: World, make_run: MakeRun, blank: Blank
) -> None:
    engine = world.open()
    run = make_run(1, PAGES)
    for tier in (world.peers, world.bucket):
        finished(tier.submit_store(part(run, 0, 1, 2, 3)))
    world.peers.failing = dict.fromkeys(run.keys, Reason.MISS)
    assert finished(engine.submit_load(blank(run), deadline_s=0.0)) == [Reason.MISS] * 4
    assert world.bucket.asked == []


def test_pages_from_peers_are_kept_until_a_purge(
    world: World, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    engine = world.open(bucket=False)
    run, other = make_run(1, PAGES), make_run(2, PAGES)
    finished(world.peers.submit_store(part(run, 0, 1, 2, 3)))
    finished(world.peers.submit_store(part(other, 0, 1, 2, 3)))
    finished(engine.submit_load(blank(run), tenant=TENANT))
    eventually(lambda: engine.remote_stats(Tier.PEER).num_promoted == 4, "nothing was kept")
    assert [usage.tenant for usage in engine.nvme.tenants(9)] == [TENANT]
    again = blank(run)
    assert finished(engine.nvme.submit_load(again)) == [Reason.OK] * 4
    assert page_data(again) == page_data(run)
    world.peers.holding = {JobKind.LOAD}
    job = engine.submit_load(blank(other), tenant=TENANT)
    engine.erase(Erasure(tenant=TENANT, spread=False))
    world.peers.release()
    assert finished(job) == [Reason.OK] * 4
    assert drained(engine, TIMEOUT_S)
    eventually(
        lambda: engine.remote_stats(Tier.PEER).num_promotions_dropped == 4, "what came before"
    )
    assert engine.nvme.view.contains([*run.keys, *other.keys]) == [False] * 8


def test_without_a_bucket_only_demotion_is_missing(
    world: World, make_run: MakeRun, blank: Blank
) -> None:
    engine = world.open(bucket=False)
    run = make_run(1, PAGES)
    finished(engine.submit_store(part(run, 0, 1)))
    finished(world.peers.submit_store(part(run, 2, 3)))
    assert finished(engine.submit_load(blank(run))) == [Reason.OK] * 4
    assert engine.flush_to_bucket(run.keys, TIMEOUT_S) == [False] * 4
    assert engine.contains_in_bucket(run.keys) == [False] * 4
    assert engine.contains_remote(run.keys) == [False, False, True, True]
    assert engine.some_keys(9)
    engine.set_namespace(b"\x22" * 32)
    assert engine.lookup(run.keys).num_hits == 0
    assert is_true(engine.erase(Erasure()), TIMEOUT_S)


def test_nvme_alone_is_an_engine_too(world: World, make_run: MakeRun, blank: Blank) -> None:
    engine = world.open(peers=False, bucket=False)
    run = make_run(1, PAGES)
    finished(engine.submit_store(part(run, 0, 1)))
    assert engine.lookup(run.keys) == LookupResult(2, Stop.MISS)
    assert finished(engine.submit_load(blank(run))) == [Reason.OK] * 2 + [Reason.MISS] * 2
    assert is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)


def test_a_purge_is_propagated_unless_it_is_remote(world: World, make_run: MakeRun) -> None:
    """And what another server purged is hidden in the bucket, not purged again: it may have been
    long ago."""
    engine = world.open()
    run = make_run(1, PAGES)
    for tier in (world.peers, world.bucket):
        finished(tier.submit_store(part(run, 0, 1, 2, 3)))
    assert is_true(engine.erase(Erasure(tenant=TENANT, spread=False)), TIMEOUT_S)
    assert world.peers.contains(run.keys) == [True] * 4, "it told the others again"
    assert world.bucket.hidden == set(run.keys)
    assert world.bucket.stats().num_pages == 4, "it purged the bucket again"
    assert is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
    assert world.peers.stats().num_pages == world.bucket.stats().num_pages == 0


def test_sick_peers_and_bucket_leave_each_other_serving(
    world: World, make_run: MakeRun, blank: Blank
) -> None:
    engine = world.open()
    run = make_run(1, PAGES)
    for tier in (world.peers, world.bucket):
        finished(tier.submit_store(part(run, 0, 1, 2, 3)))
    world.peers.sick = True
    assert engine.lookup_spans(run.keys) == [Span(Tier.OBJECT, 4)]
    assert finished(engine.submit_load(blank(run))) == [Reason.OK] * 4
    world.peers.sick, world.bucket.sick = False, True
    assert engine.lookup_spans(run.keys) == [Span(Tier.PEER, 4)]
    assert finished(engine.submit_load(blank(run))) == [Reason.OK] * 4
    world.peers.sick = True
    assert engine.lookup_spans(run.keys) == []
    assert engine.stats().health is Health.RUNNING, "NVMe still serves"


def test_a_long_lookup_holds_the_scheduler_briefly(world: World, make_run: MakeRun) -> None:
    """Held together by a bound far above what is measured, as machines differ."""
    engine = world.open()
    run = make_run(1, [512] * 1600)
    keys = run.keys
    finished(engine.submit_store(part(run, *range(0, 1600, 3))))
    finished(world.peers.submit_store(part(run, *range(1, 1600, 3))))
    finished(world.bucket.submit_store(part(run, *range(2, 1600, 3))))
    engine.lookup_spans(keys)
    begun, computed = time.monotonic(), time.thread_time()
    spans = engine.lookup_spans(keys)
    assert time.thread_time() - computed < 0.2, "whatever else has the core meanwhile"
    assert time.monotonic() - begun < 5, "it waited"
    assert sum(span.num_pages for span in spans) == 1600


class Raising(Forgetful):
    """Has a bug: it raises where others end a job, or a future."""

    is_raising = False

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        if self.is_raising:
            raise RuntimeError("a bug")
        return super().submit_load(run, deadline_s=deadline_s)

    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        if self.is_raising:
            raise RuntimeError("a bug")
        return super().erase(what, local=local)


def test_raising_tier_leaves_no_read_unowned(
    world: World, make_run: MakeRun, blank: Blank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVMe's part was under way already: it would land in pages that were given to others."""
    world.peers = peers = Raising(tier=Tier.PEER)
    engine = world.open()
    run = make_run(1, PAGES)
    finished(engine.submit_store(part(run, 0, 1)))
    finished(peers.submit_store(part(run, 2, 3)))
    finished(world.bucket.submit_store(part(run, 2)))
    peers.is_raising = True
    nvme: list[Job] = []
    submit = engine.nvme.submit_load

    def note(run: Run, **named: Any) -> Job:
        nvme.append(submit(run, **named))
        return nvme[-1]

    monkeypatch.setattr(engine.nvme, "submit_load", note)
    ended_first: list[bool] = []
    job = engine.submit_load(blank(run))
    job.call_at_end(lambda _: ended_first.append(all(nvme[0].ok)))
    assert finished(job) == [Reason.OK] * 3 + [Reason.IO_ERROR], "the bucket served one of two"
    assert ended_first == [True]


def test_a_lone_tier_that_raises_fails_its_load(
    world: World, make_run: MakeRun, blank: Blank, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.open(peers=False, bucket=False)
    monkeypatch.setattr(engine.nvme, "submit_load", lambda *_, **__: {}["a bug"])
    run = make_run(1, PAGES)
    assert finished(engine.submit_load(blank(run))) == [Reason.IO_ERROR] * 4


def test_raising_lookup_ends_the_load(
    world: World, make_run: MakeRun, blank: Blank, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.open()
    monkeypatch.setattr(world.peers, "contains", lambda keys: {}["a bug"])
    assert finished(engine.submit_load(blank(make_run(1, PAGES)))) == [Reason.MISS] * 4
    monkeypatch.undo()


@pytest.mark.parametrize("is_lone", [False, True])
def test_raising_observer_ends_the_load(
    world: World,
    make_run: MakeRun,
    blank: Blank,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_lone: bool,
) -> None:
    engine = world.open(peers=not is_lone, bucket=not is_lone)
    run = make_run(1, PAGES)
    finished(engine.submit_store(run))

    def begin_read(num_bytes: int, tier: Tier) -> Any:
        raise RuntimeError("a bug")

    observer = SimpleNamespace(begin_read=begin_read, end_read=None)
    monkeypatch.setattr(engine._loader, "observer", observer)
    assert finished(engine.submit_load(blank(run))) == [Reason.IO_ERROR] * 4


def test_raising_tier_stops_no_purge_of_others(
    world: World, make_run: MakeRun, blank: Blank
) -> None:
    """What was read before it must not be kept by NVMe either."""
    world.peers = peers = Raising(tier=Tier.PEER)
    engine = world.open()
    run = make_run(1, PAGES)
    finished(engine.submit_store(run))
    finished(world.bucket.submit_store(run))
    generation = engine._generation
    peers.is_raising = True
    assert is_true(engine.erase(Erasure()), TIMEOUT_S) is False
    assert engine._generation == generation + 1
    assert not any(world.bucket.contains(run.keys)), "the bucket was told"
    assert finished(engine.submit_load(blank(run))) == [Reason.MISS] * 4


def test_others_run_while_promoted_pages_are_copied() -> None:
    """Requests wait for the thread that computes, and a promotion is not even one of theirs."""
    promoter = Promoter(MemoryEngine(1 << 30), threading.Lock(), 1 << 30, lambda: True)
    half = memoryview(bytearray(32 << 20))

    def promote() -> None:
        promoter.promote([b"k" * 32], [(half, half)], TENANT, Tier.OBJECT, lambda: False)

    assert least_stall(promote, 0.5) <= 0.5

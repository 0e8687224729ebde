"""The stack: where pages come from, what moves between the tiers, what never does."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from shared_tier import SharedTier

from kit.runs import of, select
from kit.waiting import TIMEOUT_S, drained, eventually, finished
from sglang_tiered.storage.base import (
    Erasure,
    Health,
    JobKind,
    LookupResult,
    Reason,
    Stop,
    Tier,
)
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.stack import promotion
from sglang_tiered.storage.stack.tiers import Span, StackSettings

if TYPE_CHECKING:
    from pathlib import Path

    from kit.runs import Blank, MakeRun, PageData
    from sglang_tiered.storage.stack import TierStack


PAGES = [8192] * 4
TENANT = b"a" * 16


def test_a_prefix_over_both_tiers_is_one_hit(
    tiers: Any, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    tiers.bucket.known = False  # nothing is demoted
    engine = tiers.open()
    run = of(TENANT, make_run(1, PAGES * 2))
    finished(engine.submit_store(select(run, [0, 1, 5])))
    finished(tiers.bucket.submit_store(select(run, [2, 3, 4, 5])))
    assert engine.lookup_spans(run.keys) == [
        Span(Tier.NVME, 2),
        Span(Tier.OBJECT, 3),
        Span(Tier.NVME, 1),
    ]
    assert engine.lookup(run.keys) == LookupResult(6, Stop.MISS)
    target = blank(run)
    assert finished(engine.submit_load(target)) == [Reason.OK] * 6 + [Reason.MISS] * 2
    assert page_data(target)[:6] == page_data(run)[:6]
    assert page_data(target)[6:] == [b"\xa5" * 8192] * 2


def test_a_load_ends_only_when_both_tiers_have(tiers: Any, make_run: MakeRun, blank: Blank) -> None:
    tiers.bucket.known = False
    engine = tiers.open()
    run = of(TENANT, make_run(1, PAGES))
    finished(engine.submit_store(select(run, [0, 1])))
    finished(tiers.bucket.submit_store(select(run, [2, 3])))
    tiers.bucket.holding = {JobKind.LOAD}
    job = engine.submit_load(blank(run))
    eventually(lambda: engine.nvme.stats().num_pages_loaded == 2, "the part of NVMe was not read")
    assert not job.done, "buffers were released while the bucket may write into them"
    assert not drained(engine, 0.0)
    tiers.bucket.release()
    assert finished(job) == [Reason.OK] * 4


def test_a_page_the_disk_lost_comes_from_below(
    tiers: Any, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    tiers.bucket.known = False
    engine = tiers.open()
    run = of(TENANT, make_run(1, PAGES))
    finished(engine.submit_store(run))
    finished(tiers.bucket.submit_store(select(run, [1, 2])))
    damage(tiers.directory, page_data(run)[1])
    damage(tiers.directory, page_data(run)[3])
    target = blank(run)
    reasons = finished(engine.submit_load(target, tenant=TENANT))
    assert reasons == [Reason.OK, Reason.OK, Reason.OK, Reason.CORRUPT]
    assert page_data(target)[:3] == page_data(run)[:3]
    assert engine.stack_stats().num_recovered == 1
    eventually(lambda: engine.stack_stats().num_promoted == 1, "it was not written again")
    assert engine.nvme.view.contains(run.keys) == [True, True, True, False]


def damage(directory: Path, data: bytes) -> None:
    for file in directory.glob("*.kv"):
        position = file.read_bytes().find(data)
        if position >= 0:
            with file.open("r+b") as stream:
                stream.seek(position)
                stream.write(bytes([data[0] ^ 1]))


def test_a_late_bucket_load_is_no_hit(
    tiers: Any, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    engine = tiers.open()
    run = make_run(1, PAGES)
    finished(tiers.bucket.submit_store(of(TENANT, run)))
    tiers.bucket.holding = {JobKind.LOAD}
    target = blank(run)
    job = engine.submit_load(target, deadline_s=0.0)
    tiers.bucket.release()
    assert finished(job) == [Reason.CANCELLED] * 4
    assert page_data(target) == [b"\xa5" * 8192] * 4
    assert tiers.bucket.deadlines == [0.0]


# ---- Promotion ----


def test_promoted_pages_are_kept_under_their_tenant(
    engine: TierStack, tiers: Any, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    run = make_run(1, PAGES)
    finished(tiers.bucket.submit_store(of(TENANT, run)))
    target = blank(run)
    finished(engine.submit_load(target, tenant=TENANT))
    for (segment,) in target.pages:
        segment[:] = bytes(segment.nbytes)  # the caller's again: the copy must be another
    eventually(lambda: engine.stack_stats().num_promoted == 4, "nothing was promoted")
    assert [usage.tenant for usage in engine.nvme.tenants(9)] == [TENANT]
    again = blank(run)
    assert finished(engine.nvme.submit_load(again)) == [Reason.OK] * 4
    assert page_data(again) == page_data(run)


def test_pages_of_an_unknown_tenant_are_not_promoted(
    engine: TierStack, tiers: Any, make_run: MakeRun, blank: Blank
) -> None:
    run = make_run(1, PAGES)
    finished(tiers.bucket.submit_store(of(TENANT, run)))
    finished(engine.submit_load(blank(run)))
    assert engine.nvme.view.contains(run.keys) == [False] * 4


def test_leading_pages_within_the_promotion_bound_are_kept(
    tiers: Any, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    run = make_run(1, PAGES)
    finished(tiers.bucket.submit_store(of(TENANT, run)))
    small = tiers.open(StackSettings(promotion_bytes=8192 * 3))
    assert finished(small.submit_load(blank(run), tenant=TENANT)) == [Reason.OK] * 4
    eventually(lambda: small.stack_stats().num_promoted == 3, "what fits was not kept")
    assert small.stack_stats().num_promotions_dropped == 1
    assert small.nvme.view.contains(run.keys) == [True] * 3 + [False]
    target = blank(run)
    assert finished(small.submit_load(target, tenant=TENANT)) == [Reason.OK] * 4
    assert page_data(target) == page_data(run)
    eventually(lambda: small.stack_stats().num_promoted == 4, "the next load brings the next")


def test_promotion_is_bounded_and_asks_first(tiers: Any, make_run: MakeRun, blank: Blank) -> None:
    run = make_run(1, PAGES)
    finished(tiers.bucket.submit_store(of(TENANT, run)))
    small = tiers.open(StackSettings(promotion_bytes=8191))
    assert finished(small.submit_load(blank(run), tenant=TENANT)) == [Reason.OK] * 4
    assert small.stack_stats().num_promotions_dropped == 4
    small.close()
    tiers.bucket = SharedTier()
    finished(tiers.bucket.submit_store(of(TENANT, run)))
    unwilling = tiers.open(may_promote=False)
    assert finished(unwilling.submit_load(blank(run), tenant=TENANT)) == [Reason.OK] * 4
    assert unwilling.stack_stats().num_promotions_dropped == 4
    assert unwilling.nvme.view.contains(run.keys) == [False] * 4


def test_a_failed_promotion_gives_its_room_back(
    tiers: Any, make_run: MakeRun, blank: Blank, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_run(1, PAGES), make_run(2, PAGES)
    engine = tiers.open(StackSettings(promotion_bytes=4 * 8192))
    for run in (first, second):
        finished(tiers.bucket.submit_store(of(TENANT, run)))
    with monkeypatch.context() as patch:
        patch.setattr(promotion, "copied", lambda _: 1 // 0)
        finished(engine.submit_load(blank(first), tenant=TENANT))
    assert engine.stack_stats().num_promotions_dropped == 4
    finished(engine.submit_load(blank(second), tenant=TENANT))
    eventually(lambda: engine.nvme.view.contains(second.keys) == [True] * 4, "no room is left")


def test_a_purge_between_load_and_promotion_wins(
    engine: TierStack, tiers: Any, make_run: MakeRun, blank: Blank
) -> None:
    run = make_run(1, PAGES)
    finished(tiers.bucket.submit_store(of(TENANT, run)))
    tiers.bucket.holding = {JobKind.LOAD}
    job = engine.submit_load(blank(run), tenant=TENANT)
    purge = engine.erase(
        Erasure(tenant=b"b" * 16)
    )  # of anybody: what was read before is not trusted
    tiers.bucket.release()
    assert finished(job) == [Reason.OK] * 4
    assert is_true(purge, TIMEOUT_S)
    assert drained(engine, TIMEOUT_S)
    assert engine.stack_stats().num_promotions_dropped == 4
    assert engine.nvme.view.contains(run.keys) == [False] * 4


def test_pages_read_while_a_purge_begins_stay_down(
    engine: TierStack,
    tiers: Any,
    make_run: MakeRun,
    blank: Blank,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run(1, PAGES)
    finished(tiers.bucket.submit_store(of(TENANT, run)))
    erase, jobs = engine.nvme.erase, []

    def erase_behind_a_read(what: Erasure) -> object:
        jobs.append(engine.submit_load(blank(run), tenant=TENANT))
        return erase(what)

    monkeypatch.setattr(engine.nvme, "erase", erase_behind_a_read)
    assert is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
    assert finished(jobs[0]) == [Reason.OK] * 4
    assert drained(engine.nvme, TIMEOUT_S)
    assert engine.lookup(run.keys).num_hits == 0
    assert engine.stack_stats().num_promotions_dropped == 4


# ---- Demotion ----


def test_reads_to_be_copied_are_not_loads(
    engine: TierStack, make_run: MakeRun, blank: Blank
) -> None:
    """Nobody times them, so a speed of loaded bytes over busy seconds would have no bound."""
    run = make_run(1, PAGES)
    finished(engine.submit_store(run))
    eventually(lambda: engine.stack_stats().num_demoted == 4, "not everything was demoted")
    stats = engine.nvme.stats()
    assert (stats.num_pages_loaded, stats.bytes_loaded) == (0, 0)
    assert (stats.num_pages_copied, stats.bytes_copied) == (4, run.num_bytes)
    finished(engine.submit_load(blank(run)))
    stats = engine.nvme.stats()
    assert (stats.num_pages_loaded, stats.bytes_loaded) == (4, run.num_bytes)
    assert stats.num_pages_copied == 4


def test_stores_go_down_in_order_under_their_tenant(
    engine: TierStack, tiers: Any, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    runs = [of(TENANT, make_run(seed, PAGES)) for seed in range(5)]
    for run in runs:
        finished(engine.submit_store(run))
    eventually(lambda: engine.stack_stats().num_demoted == 20, "not everything was demoted")
    assert engine.stack_stats().demote_backlog == 0
    stored = [key for run in tiers.bucket.stored_runs for key in run.keys]
    assert sorted(stored) == sorted(key for run in runs for key in run.keys)
    assert {run.tenant for run in tiers.bucket.stored_runs} == {TENANT}
    for run in runs:
        at = stored.index(run.keys[0])
        assert stored[at : at + 4] == list(run.keys), "a chain was torn apart"
        target = blank(run)
        assert finished(tiers.bucket.submit_load(target)) == [Reason.OK] * 4
        assert page_data(target) == page_data(run)


def test_a_copy_to_the_bucket_is_no_use(engine: TierStack, make_run: MakeRun, blank: Blank) -> None:
    copied, wanted = (of(TENANT, make_run(seed, PAGES)) for seed in range(2))
    for run in (copied, wanted):
        finished(engine.submit_store(run))
    eventually(lambda: engine.stack_stats().num_demoted == 8, "not everything was demoted")
    finished(engine.submit_load(blank(wanted)))
    behind = engine.nvme.view.pages_behind(-1)
    assert behind is not None
    assert {page.key for page in behind[1] if page.is_used} == set(wanted.keys)


def test_a_restart_finds_what_was_never_copied(tiers: Any, make_run: MakeRun) -> None:
    tiers.bucket.known = False
    first = tiers.open()
    runs = [of(TENANT, make_run(seed, PAGES)) for seed in range(6)]
    for run in runs:
        finished(first.submit_store(run))
    assert first.stack_stats().num_demoted == 0
    first.nvme.close()
    tiers.bucket.known = True
    finished(tiers.bucket.submit_store(runs[0]))  # by another server, say
    second = tiers.open()
    eventually(lambda: second.stack_stats().num_demoted == 20, "not everything was demoted")
    assert all(all(tiers.bucket.contains(run.keys)) for run in runs)
    order = [run.keys[0] for run in tiers.bucket.stored_runs]
    assert order.index(runs[1].keys[0]) == 1, "the oldest is the next to be reclaimed"


def test_nothing_is_copied_while_a_load_runs(tiers: Any, make_run: MakeRun, blank: Blank) -> None:
    tiers.bucket.known = False
    engine = tiers.open()
    wanted = make_run(1, PAGES)
    finished(tiers.bucket.submit_store(of(TENANT, wanted)))
    tiers.bucket.holding = {JobKind.LOAD}
    job = engine.submit_load(blank(wanted))
    tiers.bucket.known = True
    finished(engine.submit_store(make_run(2, PAGES)))
    # It looks at the tier first: a step that began after the store had ended found nothing to do.
    looks = tiers.bucket.num_looks
    eventually(lambda: tiers.bucket.num_looks >= looks + 2, "it does not look")
    assert engine.stack_stats().num_demoted == 0
    tiers.bucket.release()
    finished(job)
    eventually(lambda: engine.stack_stats().num_demoted == 4, "it never went on")


def test_an_unreachable_bucket_is_filled_when_it_returns(
    tiers: Any, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    tiers.bucket.sick = True
    engine = tiers.open()
    run = make_run(1, PAGES)
    finished(engine.submit_store(run))
    target = blank(run)
    assert finished(engine.submit_load(target)) == [Reason.OK] * 4
    assert page_data(target) == page_data(run)
    assert engine.stats().health is Health.RUNNING
    assert engine.stack_stats().demote_backlog == 4
    tiers.bucket.sick = False
    eventually(lambda: engine.stack_stats().num_demoted == 4, "it was not filled")


def test_failed_copies_are_retried_then_dropped(
    engine: TierStack, tiers: Any, make_run: MakeRun
) -> None:
    tiers.bucket.refuse = Reason.IO_ERROR
    run = make_run(1, PAGES)
    finished(engine.submit_store(run))
    eventually(lambda: engine.stack_stats().demote_backlog == 4, "nothing waits for its next turn")
    tiers.bucket.refuse = None
    eventually(lambda: engine.stack_stats().num_demoted == 4, "it was not tried again")
    tiers.bucket.refuse = Reason.NO_SPACE
    finished(engine.submit_store(make_run(2, PAGES)))
    eventually(lambda: engine.stack_stats().num_demotions_dropped == 4, "it was not dropped")
    assert engine.stack_stats().demote_backlog == 0


def test_what_the_bucket_rejects_is_no_try(tiers: Any, make_run: MakeRun) -> None:
    """A daily budget that is used up for hours costs no page its copy."""
    tiers.bucket.refuse = Reason.REJECTED
    engine = tiers.open(StackSettings(retry_s=0.0, max_tries=2))
    finished(engine.submit_store(make_run(1, PAGES)))
    eventually(lambda: engine.nvme.stats().num_pages_copied >= 5 * len(PAGES), "it was dropped")
    tiers.bucket.refuse = None
    eventually(lambda: engine.stack_stats().num_demoted == 4, "it was dropped")


def test_nothing_is_read_that_the_bucket_takes_not(tiers: Any, make_run: MakeRun) -> None:
    """What failed too often until it takes stores again, a walk finds."""
    tiers.bucket.refuse = Reason.IO_ERROR
    engine = tiers.open(StackSettings(retry_s=0.0, max_tries=1))
    finished(engine.submit_store(make_run(1, PAGES)))
    eventually(lambda: engine.stack_stats().num_demotions_dropped == 4)
    tiers.bucket.takes_stores, tiers.bucket.refuse = False, None
    num_looks, num_read = tiers.bucket.num_looks, engine.nvme.stats().num_pages_copied
    finished(engine.submit_store(make_run(2, PAGES)))
    eventually(lambda: tiers.bucket.num_looks > num_looks + 2)
    assert engine.nvme.stats().num_pages_copied == num_read
    tiers.bucket.takes_stores = True
    eventually(lambda: engine.stack_stats().num_demoted == 8, "what was dropped is lost")


def test_internal_errors_cost_no_copy(
    tiers: Any, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiers.open()
    find, fails = engine.nvme.view.find, [MemoryError("no memory")]

    def fail_once(keys: Any) -> Any:
        if fails:
            raise fails.pop()
        return find(keys)

    monkeypatch.setattr(engine.nvme.view, "find", fail_once)
    finished(engine.submit_store(make_run(1, PAGES)))
    eventually(lambda: engine.stack_stats().num_demoted == 4, "it was not tried again")


def test_a_scan_finds_what_a_full_queue_refused(tiers: Any, make_run: MakeRun) -> None:
    tiers.bucket.sick = True
    engine = tiers.open(StackSettings(max_queued_keys=8, retry_s=0.01))
    runs = [make_run(seed, PAGES) for seed in range(10)]
    for run in runs:
        finished(engine.submit_store(run))
    assert engine.stack_stats().demote_backlog == 8
    tiers.bucket.sick = False
    eventually(lambda: engine.stack_stats().num_demoted == 40, "what was refused was lost")


def test_a_purge_during_a_copy_leaves_no_pages(
    engine: TierStack, tiers: Any, make_run: MakeRun
) -> None:
    for turn in range(8):
        runs = [of(TENANT, make_run(100 * turn + i, PAGES)) for i in range(4)]
        jobs = [engine.submit_store(run) for run in runs]
        for job in jobs[:2]:
            finished(job)
        assert is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
        for job in jobs:
            finished(job)
        assert [engine.lookup(run.keys).num_hits for run in runs] == [0] * 4
        engine.flush_to_bucket([key for run in runs for key in run.keys], 0.05)
        assert not any(tiers.bucket.contains([key for run in runs for key in run.keys]))


@pytest.mark.parametrize("takes_all", [True, False])
def test_no_copy_of_pages_read_before_an_erasure(
    tiers: Any, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, takes_all: bool
) -> None:
    """Which costs the others nothing."""
    tiers.bucket.known = False  # nothing is copied yet
    engine = tiers.open()
    run = of(TENANT, make_run(1, PAGES))
    finished(engine.submit_store(run))
    erase = engine.nvme.erase

    def erase_behind_a_read(what: Erasure) -> object:
        tiers.bucket.known = True
        eventually(
            lambda: engine.nvme.stats().num_pages_copied == 4, "nothing was read to be copied"
        )
        return erase(what)

    monkeypatch.setattr(engine.nvme, "erase", erase_behind_a_read)
    what = Erasure(tenant=TENANT) if takes_all else Erasure.of(run.keys[1:2])
    assert is_true(engine.erase(what), TIMEOUT_S)
    eventually(lambda: engine.stack_stats().demote_backlog == 0, "the copy did not end")
    left = [not takes_all and page != 1 for page in range(4)]
    assert engine.contains(run.keys) == tiers.bucket.contains(run.keys) == left
    assert engine.stack_stats().num_demotions_gone == left.count(False)


def test_a_new_namespace_is_not_copied_down(
    engine: TierStack, tiers: Any, make_run: MakeRun
) -> None:
    engine.set_namespace(b"\x22" * 32)
    run = make_run(1, PAGES)
    finished(engine.submit_store(run))
    assert engine.stack_stats().demote_backlog == 0
    assert engine.lookup(run.keys).num_hits == 4


def test_nothing_is_copied_before_the_bucket_is_listed(tiers: Any, make_run: MakeRun) -> None:
    """However long its first listing takes: all that is there would be copied again."""
    tiers.bucket.known = False
    engine = tiers.open()
    finished(engine.submit_store(of(TENANT, make_run(1, PAGES))))
    assert engine.stack_stats().demote_backlog == 4
    assert engine.stack_stats().num_demoted == 0
    tiers.bucket.known = True
    eventually(lambda: engine.stack_stats().num_demoted == 4, "it never begins")


def test_no_copy_into_a_namespace_changed_while_reading(
    tiers: Any, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.bucket.known = False  # nothing is copied but by ``flush``
    engine = tiers.open()
    run = of(TENANT, make_run(1, PAGES))
    finished(engine.submit_store(run))
    flush = threading.Thread(target=engine.flush_to_bucket, args=(run.keys, TIMEOUT_S))
    change = tiers.bucket.set_namespace

    def change_behind_a_read(namespace: bytes) -> None:
        flush.start()
        eventually(
            lambda: engine.nvme.stats().num_pages_copied == 4, "nothing was read to be copied"
        )
        change(namespace)

    monkeypatch.setattr(tiers.bucket, "set_namespace", change_behind_a_read)
    engine.set_namespace(b"\x22" * 32)
    flush.join(TIMEOUT_S)
    assert not flush.is_alive()
    eventually(lambda: engine.stack_stats().demote_backlog == 0, "the copy did not end")
    assert engine.lookup(run.keys).num_hits == 0


def test_staging_is_bounded_and_awaited_without_a_lock(
    tiers: Any, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches land under the lock of the bucket, so it must not be called under the demoter's."""
    tiers.bucket.holding = {JobKind.STORE}
    engine = tiers.open(StackSettings(staging_bytes=1 << 15, batch_bytes=1 << 15))
    owned: list[bool] = []
    looked = threading.Semaphore(0)
    stats = tiers.bucket.stats

    def watched() -> object:
        owned.append(engine._demoter._wake._is_owned())
        looked.release()
        return stats()

    for seed in range(3):
        finished(engine.submit_store(make_run(seed, PAGES)))
    eventually(lambda: tiers.bucket.num_held == 1, "nothing was demoted")
    monkeypatch.setattr(tiers.bucket, "stats", watched)
    for _ in range(2):
        assert looked.acquire(timeout=TIMEOUT_S), "a full staging area was not looked after"
    assert tiers.bucket.num_held == 1, "more lies between the tiers than may"
    assert not any(owned)
    tiers.bucket.release()
    eventually(lambda: engine.stack_stats().num_demoted == 12, "it never went on")


# ---- Flush ----


def test_flush_goes_first_and_says_what_is_durable(
    tiers: Any, make_run: MakeRun, blank: Blank
) -> None:
    tiers.bucket.known = False  # nothing is copied unless asked for
    engine = tiers.open()
    run, other = of(TENANT, make_run(1, PAGES)), make_run(2, PAGES)
    finished(engine.submit_store(select(run, [0, 1, 2])))
    finished(engine.submit_store(other))
    assert engine.flush_to_bucket(run.keys, TIMEOUT_S) == [True, True, True, False]
    assert tiers.bucket.contains(other.keys) == [False] * 4


def test_flush_to_an_unreachable_tier_ends_in_time(tiers: Any, make_run: MakeRun) -> None:
    tiers.bucket.sick = True
    engine = tiers.open()
    run = make_run(1, PAGES)
    finished(engine.submit_store(run))
    begun = time.monotonic()
    assert engine.flush_to_bucket(run.keys, 0.2) == [False] * 4
    assert time.monotonic() - begun < 5
    threading.Timer(0.1, lambda: setattr(tiers.bucket, "sick", False)).start()
    assert engine.flush_to_bucket(run.keys, TIMEOUT_S) == [True] * 4


def test_flush_outlasts_a_pause_of_nvme(tiers: Any, make_run: MakeRun) -> None:
    tiers.bucket.known = False  # nothing is copied unless asked for
    engine = tiers.open()
    run = make_run(1, PAGES)
    finished(engine.submit_store(run))
    assert isinstance(engine.nvme, RegionEngine)
    engine.nvme._health.fault("a test")  # for a second
    assert engine.nvme.health is not Health.RUNNING
    assert engine.flush_to_bucket(run.keys, TIMEOUT_S) == [True] * 4


def test_nvme_is_closed_whatever_its_bucket_does(
    tiers: Any, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiers.open()
    run = make_run(1, PAGES)
    finished(engine.submit_store(run))

    def close() -> None:
        raise OSError("the bucket does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(tiers.bucket, "close", close)
        with pytest.raises(OSError, match="does not answer"):
            engine.close()
    assert tiers.open().lookup(run.keys).num_hits == 4


def test_jobs_end_when_their_engine_is_closed(tiers: Any, make_run: MakeRun, blank: Blank) -> None:
    engine = tiers.open()
    run = make_run(1, PAGES)
    finished(tiers.bucket.submit_store(run))
    tiers.bucket.holding = {JobKind.LOAD}
    job = engine.submit_load(blank(run))
    closer = threading.Thread(target=engine.close)
    closer.start()
    tiers.bucket.release()
    assert job.wait(TIMEOUT_S)
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
    assert finished(engine.submit_load(blank(run))) == [Reason.CANCELLED] * 4

"""The stack: where pages come from, what moves between the tiers, what never does."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from bucket_engines import open_engine

from kit.faulty import fail_once
from kit.request_hooks import listed
from kit.runs import OTHER_NAMESPACE, blank, make_run, of, page_data, select
from kit.stores import damage
from kit.tiers import load, loads, open_region, store
from kit.waiting import TIMEOUT_S, drained, eventually, finished
from sglang_tiered.storage.base import Erasure, Health, JobKind, Reason, Tier
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.stack import TierStack, demotion, loading
from sglang_tiered.storage.stack.demotion import StackSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGES = [8192] * 4
TENANT = b"a" * 16


def test_a_page_the_disk_lost_comes_from_below(still: TierStack, tiers: Any) -> None:
    run = of(TENANT, make_run(1, PAGES))
    store(still, run)
    store(tiers.bucket, select(run, [1, 2]))
    for lost in (1, 3):
        damage(tiers.directory, page_data(run)[lost])
    target = blank(run)
    reasons = finished(still.submit_load(target, tenant=TENANT))
    assert reasons == [Reason.OK, Reason.OK, Reason.OK, Reason.CORRUPT]
    assert page_data(target)[:3] == page_data(run)[:3]
    assert still.stack_stats().num_recovered == 1
    tiers.until(num_promoted=1)
    assert still.nvme.view.contains(run.keys) == [True, True, True, False]


@pytest.mark.parametrize(
    ("num_bytes", "may_promote", "tenant", "kept"),
    [
        (8192 * 3, True, TENANT, 3),
        (8191, True, TENANT, 0),
        (1 << 20, False, TENANT, 0),
        (1 << 20, True, None, 0),  # no purge of their tenant would find them
    ],
)
def test_promotion_is_bounded_and_asks_first(
    tiers: Any, num_bytes: int, may_promote: bool, tenant: bytes | None, kept: int
) -> None:
    """The leading pages that fit are kept; the next load brings the next."""
    run = make_run(1, PAGES)
    store(tiers.bucket, of(TENANT, run))
    engine = tiers.open(StackSettings(promotion_bytes=num_bytes), may_promote=lambda: may_promote)
    loads(engine, run, tenant=tenant)
    tiers.until(num_promoted=kept, num_promotions_dropped=4 - kept if tenant else 0)
    assert engine.nvme.view.contains(run.keys) == [True] * kept + [False] * (4 - kept)
    if kept:
        loads(engine, run, tenant=tenant)
        tiers.until(num_promoted=4)


def test_a_failed_promotion_gives_its_room_back(
    tiers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_run(1, PAGES), make_run(2, PAGES)
    engine = tiers.open(StackSettings(promotion_bytes=4 * 8192))
    store(tiers.bucket, of(TENANT, first), of(TENANT, second))
    with monkeypatch.context() as patch:
        patch.setattr(loading, "copied", lambda _: 1 // 0)
        load(engine, first, tenant=TENANT)
    assert engine.stack_stats().num_promotions_dropped == 4
    load(engine, second, tenant=TENANT)
    eventually(lambda: engine.nvme.view.contains(second.keys) == [True] * 4, "no room is left")


ERASURES = {
    "of others": Erasure(tenant=b"b" * 16),  # what was read before is not trusted
    "pages, told": Erasure.of(make_run(1, PAGES).keys[:1], spread=False),
    "tenant, told": Erasure(tenant=TENANT, spread=False),
}


@pytest.mark.parametrize("what", ERASURES.values(), ids=ERASURES)
@pytest.mark.parametrize("tier", [Tier.PEER, Tier.OBJECT])
def test_what_was_read_before_an_erasure_stays_down(
    three: TierStack, tiers: Any, what: Erasure, tier: Tier
) -> None:
    run, source = make_run(1, PAGES), three.remote[tier]
    store(source, of(TENANT, run))
    source.holding = {JobKind.LOAD}  # type: ignore[attr-defined]
    job = three.submit_load(blank(run), tenant=TENANT)
    erased = three.erase(what)
    source.hidden.clear()  # type: ignore[attr-defined]  # it was read before
    source.release()  # type: ignore[attr-defined]
    assert finished(job) == [Reason.OK] * 4
    assert is_true(erased, TIMEOUT_S)
    assert drained(three, TIMEOUT_S) and drained(three.nvme, TIMEOUT_S)
    assert three.remote_stats(tier).num_promotions_dropped == 4
    assert three.nvme.view.contains(run.keys) == [False] * 4


def test_stores_go_down_in_order_under_their_tenant(engine: TierStack, tiers: Any) -> None:
    runs = [of(TENANT, make_run(seed, PAGES)) for seed in range(5)]
    store(engine, *runs)
    tiers.until(num_demoted=20)
    assert engine.stack_stats().demote_backlog == 0
    stored = [key for run in tiers.bucket.stored_runs for key in run.keys]
    assert sorted(stored) == sorted(key for run in runs for key in run.keys)
    assert {run.tenant for run in tiers.bucket.stored_runs} == {TENANT}
    for run in runs:
        at = stored.index(run.keys[0])
        assert stored[at : at + 4] == list(run.keys), "a chain was torn apart"
    loads(tiers.bucket, *runs)


def test_a_copy_to_the_bucket_is_no_use(engine: TierStack, tiers: Any) -> None:
    copied, wanted = (of(TENANT, make_run(seed, PAGES)) for seed in range(2))
    store(engine, copied, wanted)
    tiers.until(num_demoted=8)
    load(engine, wanted)
    behind = engine.nvme.view.pages_behind(-1)
    assert behind is not None
    assert {page.key for page in behind[1] if page.is_used} == set(wanted.keys)


def test_a_restart_finds_what_was_never_copied(still: TierStack, tiers: Any) -> None:
    runs = [of(TENANT, make_run(seed, PAGES)) for seed in range(6)]
    store(still, *runs)
    assert still.stack_stats().num_demoted == 0
    still.nvme.close()
    tiers.bucket.known = True
    store(tiers.bucket, runs[0])  # by another server, say
    tiers.open()
    tiers.until(num_demoted=20)
    assert all(all(tiers.bucket.contains(run.keys)) for run in runs)
    order = [run.keys[0] for run in tiers.bucket.stored_runs]
    assert order.index(runs[1].keys[0]) == 1, "the oldest is the next to be reclaimed"


def test_nothing_is_copied_while_a_load_runs(still: TierStack, tiers: Any) -> None:
    wanted = make_run(1, PAGES)
    store(tiers.bucket, of(TENANT, wanted))
    tiers.bucket.holding = {JobKind.LOAD}
    job = still.submit_load(blank(wanted))
    tiers.bucket.known = True
    store(still, make_run(2, PAGES))
    # It looks at the tier first: a step that began after the store had ended found nothing to do.
    looks = tiers.bucket.num_looks
    eventually(lambda: tiers.bucket.num_looks >= looks + 2, "it does not look")
    assert still.stack_stats().num_demoted == 0
    tiers.bucket.release()
    finished(job)
    tiers.until("it never went on", num_demoted=4)


def test_an_interrupted_chain_goes_on_at_once(tiers: Any) -> None:
    """A busy server interrupts at almost every batch: with a pause each, none would end."""
    tiers.bucket.known = False
    engine = tiers.open(StackSettings(batch_bytes=8192, retry_s=1000.0, max_queued_keys=4))
    store(engine, make_run(1, PAGES))
    answers = iter([True, True, True, False])  # of a step, and before each batch
    engine._demoter._is_idle = lambda: next(answers, True)
    tiers.bucket.known = True
    tiers.until("it waits for a retry", num_demoted=4)
    assert next(answers, None) is None and engine.stack_stats().num_demotions_dropped == 0


def test_failed_copies_are_retried_then_dropped(engine: TierStack, tiers: Any) -> None:
    tiers.bucket.refuse = Reason.IO_ERROR
    store(engine, make_run(1, PAGES))
    tiers.until("nothing waits for its next turn", demote_backlog=4)
    tiers.bucket.refuse = None
    tiers.until("it was not tried again", num_demoted=4)
    tiers.bucket.refuse = Reason.NO_SPACE
    store(engine, make_run(2, PAGES))
    tiers.until("it was not dropped", num_demotions_dropped=4)
    assert engine.stack_stats().demote_backlog == 0


def test_what_the_bucket_rejects_is_no_try(tiers: Any) -> None:
    """A daily budget that is used up for hours costs no page its copy."""
    tiers.bucket.refuse = Reason.REJECTED
    engine = tiers.open(StackSettings(retry_s=0.0, max_tries=2))
    store(engine, make_run(1, PAGES))
    eventually(lambda: engine.nvme.stats().num_pages_copied >= 5 * len(PAGES), "it was dropped")
    tiers.bucket.refuse = None
    tiers.until("it was dropped", num_demoted=4)


def test_nothing_is_read_that_the_bucket_takes_not(tiers: Any) -> None:
    """What failed too often until it takes stores again, a walk finds."""
    tiers.bucket.refuse = Reason.IO_ERROR
    engine = tiers.open(StackSettings(retry_s=0.0, max_tries=1))
    store(engine, make_run(1, PAGES))
    tiers.until(num_demotions_dropped=4)
    tiers.bucket.takes_stores, tiers.bucket.refuse = False, None
    num_looks, num_read = tiers.bucket.num_looks, engine.nvme.stats().num_pages_copied
    store(engine, make_run(2, PAGES))
    eventually(lambda: tiers.bucket.num_looks > num_looks + 2)
    assert engine.nvme.stats().num_pages_copied == num_read
    tiers.bucket.takes_stores = True
    tiers.until("what was dropped is lost", num_demoted=8)


@pytest.mark.parametrize("name", ["find", "pages_behind"])
def test_internal_errors_cost_no_copy(
    tiers: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of a chain, or of the walk that finds it."""
    tiers.bucket.known = False
    engine = tiers.open()
    store(engine, make_run(1, PAGES))
    engine.nvme.close()
    engine = tiers.open()
    left = fail_once(monkeypatch, engine.nvme.view, name)
    tiers.bucket.known = True
    tiers.until("it was not tried again", num_demoted=4)
    assert not left


def test_chain_that_always_fails_holds_up_no_other(
    tiers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demotion, "STEP_PAGES", len(PAGES))
    bad, good = make_run(1, PAGES), make_run(2, PAGES)
    engine = tiers.open(StackSettings(max_queued_keys=4, retry_s=0.0, max_tries=2))
    find = engine.nvme.view.find

    def raising(keys: Sequence[bytes]) -> Any:
        if bad.keys[0] in keys:
            raise MemoryError
        return find(keys)

    monkeypatch.setattr(engine.nvme.view, "find", raising)
    tiers.bucket.sick = True
    store(engine, bad, good)
    tiers.bucket.sick = False
    tiers.until("no walk comes by the bad one", num_demoted=4)
    eventually(lambda: engine.stack_stats().num_demotions_dropped >= 4)


def test_a_scan_finds_what_a_full_queue_refused(tiers: Any) -> None:
    tiers.bucket.sick = True
    engine = tiers.open(StackSettings(max_queued_keys=8, retry_s=0.01))
    store(engine, *(make_run(seed, PAGES) for seed in range(10)))
    assert engine.stack_stats().demote_backlog == 8
    tiers.bucket.sick = False
    tiers.until("what was refused was lost", num_demoted=40)
    eventually(lambda: not engine._demoter.queue.overflowed, "it walks for ever")


@pytest.mark.parametrize("takes_all", [True, False])
def test_no_copy_of_pages_read_before_an_erasure(
    still: TierStack, tiers: Any, monkeypatch: pytest.MonkeyPatch, takes_all: bool
) -> None:
    """Which costs the others nothing."""
    run = of(TENANT, make_run(1, PAGES))
    store(still, run)
    erase = still.nvme.erase

    def erase_behind_a_read(what: Erasure) -> object:
        tiers.bucket.known = True
        eventually(lambda: still.nvme.stats().num_pages_copied == 4, "nothing was read")
        return erase(what)

    monkeypatch.setattr(still.nvme, "erase", erase_behind_a_read)
    what = Erasure(tenant=TENANT) if takes_all else Erasure.of(run.keys[1:2])
    assert is_true(still.erase(what), TIMEOUT_S)
    tiers.until("the copy did not end", demote_backlog=0)
    left = [not takes_all and page != 1 for page in range(4)]
    assert still.contains(run.keys) == tiers.bucket.contains(run.keys) == left
    assert still.stack_stats().num_demotions_gone == left.count(False)


def test_a_new_namespace_is_not_copied_down(engine: TierStack) -> None:
    engine.set_namespace(OTHER_NAMESPACE)
    run = make_run(1, PAGES)
    store(engine, run)
    assert engine.stack_stats().demote_backlog == 0
    assert engine.lookup(run.keys).num_hits == 4


def test_no_copy_into_a_namespace_changed_while_reading(
    still: TierStack, tiers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = of(TENANT, make_run(1, PAGES))
    store(still, run)
    flush = threading.Thread(target=still.flush_to_bucket, args=(run.keys, TIMEOUT_S))
    change = tiers.bucket.set_namespace

    def change_behind_a_read(namespace: bytes) -> None:
        flush.start()
        eventually(lambda: still.nvme.stats().num_pages_copied == 4, "nothing was read")
        change(namespace)

    with monkeypatch.context() as patch:
        patch.setattr(tiers.bucket, "set_namespace", change_behind_a_read)
        still.set_namespace(OTHER_NAMESPACE)
    flush.join(TIMEOUT_S)
    assert not flush.is_alive()
    tiers.until("the copy did not end", demote_backlog=0)
    assert still.lookup(run.keys).num_hits == 0


def test_staging_is_bounded_and_awaited_without_a_lock(
    tiers: Any, monkeypatch: pytest.MonkeyPatch
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

    store(engine, *(make_run(seed, PAGES) for seed in range(3)))
    eventually(lambda: tiers.bucket.num_held == 1, "nothing was demoted")
    monkeypatch.setattr(tiers.bucket, "stats", watched)
    for _ in range(2):
        assert looked.acquire(timeout=TIMEOUT_S), "a full staging area was not looked after"
    assert tiers.bucket.num_held == 1, "more lies between the tiers than may"
    assert not any(owned)
    tiers.bucket.release()
    tiers.until("it never went on", num_demoted=12)


def test_flush_goes_first_and_says_what_is_durable(still: TierStack, tiers: Any) -> None:
    """And it outlasts a pause of NVMe."""
    run, other = of(TENANT, make_run(1, PAGES)), make_run(2, PAGES)
    store(still, select(run, [0, 1, 2]), other)
    assert isinstance(still.nvme, RegionEngine)
    still.nvme._disk.fault("a test")  # for a second
    assert still.nvme.health is not Health.RUNNING
    assert still.flush_to_bucket(run.keys, TIMEOUT_S) == [True, True, True, False]
    assert tiers.bucket.contains(other.keys) == [False] * 4


def test_flush_to_an_unreachable_tier_ends_in_time(engine: TierStack, tiers: Any) -> None:
    tiers.bucket.sick = True
    run = make_run(1, PAGES)
    store(engine, run)
    begun = time.monotonic()
    assert engine.flush_to_bucket(run.keys, 0.2) == [False] * 4
    assert time.monotonic() - begun < 5
    threading.Timer(0.1, lambda: setattr(tiers.bucket, "sick", False)).start()
    assert engine.flush_to_bucket(run.keys, TIMEOUT_S) == [True] * 4


def test_flush_ends_in_time_while_nvme_hangs(
    still: TierStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, answers = make_run(1, PAGES), threading.Event()
    store(still, run)
    assert isinstance(still.nvme, RegionEngine)
    readv = still.nvme._device.readv

    def hanging(*arguments: Any) -> int:
        assert answers.wait(TIMEOUT_S)
        return readv(*arguments)

    monkeypatch.setattr(still.nvme._device, "readv", hanging)
    begun = time.monotonic()
    assert still.flush_to_bucket(run.keys, 0.1) == [False] * 4
    assert time.monotonic() - begun < TIMEOUT_S / 2
    assert still._demoter is not None and still._demoter.in_flight_totals()[1] == 4
    answers.set()
    assert drained(still.nvme, TIMEOUT_S)
    assert still._demoter.in_flight_totals() == (0, 0)


def test_nvme_is_closed_whatever_its_bucket_does(
    engine: TierStack, tiers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(1, PAGES)
    store(engine, run)
    with monkeypatch.context() as patch:
        patch.setattr(tiers.bucket, "close", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.close()
    assert tiers.open().lookup(run.keys).num_hits == 4


def test_what_was_collected_is_not_durable(tmp_path: Path) -> None:
    """By a server of a smaller cap, or by hand: nobody lists what is gone for ten minutes."""
    bucket = open_engine((tmp_path / "shared").as_uri())
    stack, run = TierStack(open_region(tmp_path / "own"), [bucket]), make_run(1, [8192] * 4)
    store(stack, of(TENANT, run))
    assert stack.flush_to_bucket(run.keys, TIMEOUT_S) == [True] * 4
    for _ in range(2):
        paths = listed(bucket, bucket._state.layout.pages)
        assert len(paths) == 4, "what NVMe holds goes up again"
        bucket._requests.delete(paths)
        assert stack.flush_to_bucket(run.keys, TIMEOUT_S) == [True] * 4
    bucket._requests.delete(listed(bucket, bucket._state.layout.pages))
    assert is_true(stack.nvme.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
    assert stack.flush_to_bucket(run.keys, TIMEOUT_S) == [False] * 4
    stack.close()

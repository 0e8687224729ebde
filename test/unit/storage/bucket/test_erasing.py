"""Records of erasures, who is told of them, and what is stored meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.clock import Clock
from kit.request_hooks import Gate, before, listed, refuse
from kit.runs import NAMESPACE, make_run, select
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.storage.base import NO_TENANT, Erasure, Reason, Run
from sglang_tiered.storage.bucket import BucketEngine, names, state
from sglang_tiered.storage.bucket import erased as records
from sglang_tiered.storage.bucket.collect import Collector
from sglang_tiered.storage.bucket.directory import Listed
from sglang_tiered.storage.bucket.pins import pack_pin
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.pins import Pin

A, B, N, M = b"a" * 16, b"b" * 16, b"n" * 32, b"m" * 32
PAGES = [100, 200, 300]
RUN = make_run(1, PAGES)
TOLD = Erasure.of(RUN.keys)


def store(engine: BucketEngine, run: Run) -> None:
    assert set(finished(engine.submit_store(run))) <= {Reason.OK, Reason.DUPLICATE}


def test_closing_ends_erasures_that_go_on(make_engine: Any) -> None:
    """Record after record, each as slow as a request may be."""
    a, other = make_engine(), make_engine()
    gate = Gate(a, "put", "/erased/")
    first = a.erase(Erasure(tenant=A))
    assert gate.reached.wait(TIMEOUT_S)
    begun = [first, *(a.erase(Erasure(tenant=bytes([n + 1]) * 16)) for n in range(20))]
    closing = threading.Thread(target=a.close)
    closing.start()
    eventually(lambda: a._state.closed and all(each.done() for each in begun))
    gate.opened.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert not any(is_true(each, TIMEOUT_S) for each in begun)
    assert not listed(other, records.ERASED), "it goes on"


def test_the_owner_hears_before_anything_counts_as_younger(
    a: BucketEngine, b: BucketEngine, c: BucketEngine
) -> None:
    told: list[Erasure] = []

    def hear(whats: Sequence[Erasure]) -> None:
        told.extend(whats)
        # Its NVMe still has it.
        assert finished(b.submit_store(select(RUN, [0]))) == [Reason.CANCELLED]

    b.report_erased(hear)
    store(a, RUN)
    assert is_true(a.erase(Erasure.of(RUN.keys[:2])), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    assert [what.keys for what in told] == [RUN.keys[:2]]
    for engine in (a, c):
        assert engine.refresh(TIMEOUT_S, full=True)
        assert engine.contains(RUN.keys) == [False, False, True], "it is from before"
    store(b, select(RUN, [0]))
    for engine in (a, c):
        assert engine.refresh(TIMEOUT_S)
        assert engine.contains(RUN.keys) == [True, False, True]
    assert is_true(b.erase(Erasure.of(RUN.keys)), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    assert len(told) == 1, "its own tier knows what it erased itself"


def test_what_peers_tell_hides_before_its_record(a: BucketEngine, b: BucketEngine) -> None:
    what = Erasure.of(RUN.keys[:2])
    store(a, RUN)
    assert b.refresh(TIMEOUT_S)
    assert is_true(b.erase(Erasure(what.keys, None, what.id, spread=False)), TIMEOUT_S)
    assert b.contains(RUN.keys) == [False, False, True]
    assert b.refresh(TIMEOUT_S, full=True)
    assert b.contains(RUN.keys) == [False, False, True], "the listing brought it back"
    assert len(listed(b, b._state.layout.pages)) == 3, "nothing is deleted before its record"
    assert is_true(a.erase(what), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    store(b, RUN)
    assert all(b.contains(RUN.keys))


def test_ever_more_erasures_take_no_more_memory(
    a: BucketEngine, b: BucketEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_MAX_HEARD", 3)
    last = Erasure.of(RUN.keys)
    for what in (*(Erasure(tenant=bytes([n + 1]) * 16) for n in range(10)), last):
        assert is_true(a.erase(what), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    for engine in (a, b):
        assert len(engine._state.heard) == 3
        store(engine, RUN)
        engine.erase(replace(last, spread=False))
        assert all(engine.contains(RUN.keys)), "the last is forgotten"


def test_a_late_owner_is_told_before_it_stores(
    a: BucketEngine, b: BucketEngine, c: BucketEngine
) -> None:
    assert is_true(a.erase(Erasure.of(RUN.keys)), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    with b._state.lock:
        assert b._state.seen
    told, goes_on = threading.Event(), threading.Event()

    def hear(_: Sequence[Erasure]) -> None:
        told.set()
        assert goes_on.wait(TIMEOUT_S)

    b.report_erased(hear)
    assert told.wait(TIMEOUT_S)
    assert set(finished(b.submit_store(RUN))) == {Reason.CANCELLED}, "its NVMe has it from before"
    goes_on.set()
    eventually(lambda: Reason.CANCELLED not in finished(b.submit_store(RUN)))
    assert c.refresh(TIMEOUT_S)
    assert all(c.contains(RUN.keys))


def test_a_number_is_behind_all_others(make_engine: Any) -> None:
    """Another erasure comes between the look and the record, and a third server hears of that one
    alone: what it stores of this one's pages is from before."""
    a, b, c, d = (make_engine() for _ in range(4))
    run, other = make_run(1, PAGES), make_run(2, PAGES)

    def another_comes() -> None:
        assert is_true(b.erase(Erasure.of(other.keys)), TIMEOUT_S)
        assert c.refresh(TIMEOUT_S)

    asked = before(a, "put", another_comes)
    assert is_true(a.erase(Erasure.of(run.keys)), TIMEOUT_S)
    assert len(asked) == 2
    store(c, run)
    for engine in (a, d):
        assert engine.refresh(TIMEOUT_S, full=True)
        assert not any(engine.contains(run.keys))


@pytest.mark.parametrize("number", [1 << 31, (1 << 48) - 1, (1 << 31) - 1])
def test_a_record_of_an_absurd_number_stops_nothing(
    a: BucketEngine, b: BucketEngine, number: int
) -> None:
    """As somebody may put one: true is never answered of what no other server can read."""
    run, told = make_run(1, PAGES), list[Erasure]()
    b.report_erased(told.extend)
    a._requests.put(records.record_path(number, Erasure(tenant=B), N), b"")
    for engine in (a, b):
        assert engine.refresh(TIMEOUT_S)
    store(a, run)
    erased = is_true(a.erase(Erasure.of(run.keys)), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    assert any(what.keys == run.keys for what in told) == erased == (number > records.MAX_NUMBER)
    if erased:
        store(a, run)
        assert b.refresh(TIMEOUT_S)
        assert all(b.contains(run.keys))


def test_a_pin_behind_an_erasure_is_younger(a: BucketEngine, b: BucketEngine) -> None:
    before(a, "put", refuse, "/erased/")
    gate = Gate(a, "put", "/erased/")
    begun = a.erase(Erasure.of(RUN.keys))
    pinned = a.pin("p", RUN.keys)
    gate.opened.set()
    assert not is_true(begun, TIMEOUT_S)
    assert is_true(pinned, TIMEOUT_S)  # type: ignore[arg-type]
    assert is_true(a.erase(Erasure(tenant=B)), TIMEOUT_S), "and all that was asked before"
    for engine in (a, b):
        assert engine.refresh(TIMEOUT_S, full=True)
        assert engine.has_pin("p"), "it counts as older than what was erased before"


def test_records_merged_under_a_reader_are_read(a: BucketEngine, b: BucketEngine) -> None:
    """By two servers at once, one of which dies before it removes anything."""
    keys = [bytes([n, n + 1]) * 16 for n in range(100)]
    for number, key in enumerate(keys):
        what = Erasure.of([key])
        a._requests.put(records.record_path(number + 1, what, N), records.record_data(what))
    listing, remove, late = b._requests.listing, a._requests.delete, time.time() + 3600.0
    collector = Collector(a._requests, clock=lambda: late)

    def merged_behind(folder: str, *, after: str | None = None) -> Iterator[list[Listed]]:
        yield from listing(folder, after=after)
        if folder == records.ERASED:
            for delete in (lambda _: None, remove):
                a._requests.delete = delete  # type: ignore[method-assign, assignment]
                collector.run_once(N)

    b._requests.listing = merged_behind  # type: ignore[method-assign]
    assert b.refresh(TIMEOUT_S)
    with b._state.lock:
        assert all(b._state.erased.kills(N, A, key, n) for n, key in enumerate(keys))


def test_notes_of_pins_go_with_the_pages(make_engine: Any) -> None:
    """Of pins that the eraser never heard of, here and in other namespaces, and of late ones."""
    a, b, other = make_engine(), make_engine(), make_engine(namespace=M)
    run, mine = make_run(1, PAGES), make_run(2, PAGES)

    def notes() -> bytes:
        paths = [p for n in (NAMESPACE, M) for p in listed(a, names.Layout(n).pins)]
        return b"".join(bytes(a._requests.get(path, 1 << 20)) for path in paths)

    assert is_true(b.pin("p", run.keys, data=b"tokens"), TIMEOUT_S)  # type: ignore[arg-type]
    assert is_true(other.pin("q", mine.keys, A, data=b"theirs"), TIMEOUT_S)  # type: ignore[arg-type]
    assert is_true(a.erase(Erasure.of(run.keys[:1])), TIMEOUT_S)
    assert b"tokens" not in notes()
    assert is_true(a.erase(Erasure(tenant=A)), TIMEOUT_S)
    assert b"theirs" not in notes()
    assert other.refresh(TIMEOUT_S)
    assert not other.has_pin("q")
    path, late = names.Layout(NAMESPACE).pin("p"), Pin("p", NO_TENANT, run.keys, None, b"tokens")
    a._requests.put(path, pack_pin(late, 0))
    Collector(a._requests).run_once(NAMESPACE)
    assert b"tokens" not in notes()
    assert b.refresh(TIMEOUT_S)
    assert b.pins()[0].name == "p"
    assert b._state.pins.book.wanted(run.keys) == list(run.keys[1:])


@pytest.mark.parametrize("case", ["told before", "over", "refused"])
def test_no_note_outlives_an_erasure_that_is_true(make_engine: Any, case: str) -> None:
    """Whatever memory says of the pin: a record of another eraser, which died, emptied it there."""
    now = [time.time()]
    a = make_engine(wall_clock=lambda: now[0])
    until_s = now[0] + 100 if case == "over" else None
    assert is_true(a.pin("p", RUN.keys, A, until_s, b"notes"), TIMEOUT_S)  # type: ignore[arg-type]
    if case == "told before":
        lost = Erasure(tenant=A)
        a._requests.put(records.record_path(1, lost, N), records.record_data(lost))
    now[0] += 200
    assert a.refresh(TIMEOUT_S)
    if case == "refused":
        before(a, "delete", refuse, "/pins/")
        assert not is_true(a.erase(Erasure(tenant=A)), TIMEOUT_S)
    assert is_true(a.erase(Erasure(tenant=A)), TIMEOUT_S)
    assert not listed(a, a._state.layout.pins)


@pytest.mark.parametrize("change", ["unpin", "pin"])
def test_no_erasure_undoes_what_a_pins_owner_did(
    make_engine: Any, tmp_path: Path, change: str
) -> None:
    """Between another's read of the pin and its write of it."""
    owner, eraser = (make_engine(url=tmp_path.as_uri()) for _ in range(2))
    gone, kept, more = (make_run(seed, PAGES) for seed in range(3))
    assert is_true(owner.pin("p", [*gone.keys, *kept.keys]), TIMEOUT_S)  # type: ignore[arg-type]
    get, is_changed = eraser._requests.get, list[bool]()

    def changed_behind(path: str, nbytes: int) -> memoryview:
        data = get(path, nbytes)
        if "/pins/" in path and not is_changed:
            begun = owner.unpin("p") if change == "unpin" else owner.pin("p", more.keys)
            is_changed.append(is_true(begun, TIMEOUT_S))  # type: ignore[arg-type]
        return data

    eraser._requests.get = changed_behind  # type: ignore[method-assign, assignment]
    assert is_true(eraser.erase(Erasure.of(gone.keys)), TIMEOUT_S)
    assert is_changed == [True]
    assert owner.refresh(TIMEOUT_S)
    assert owner._state.pins.book.wanted(more.keys) == (list(more.keys) if change == "pin" else [])
    assert owner.has_pin("p") == (change == "pin")


def test_no_collector_deletes_a_pin_renewed_since(make_engine: Any) -> None:
    a, now = make_engine(), time.time()
    assert is_true(a.pin("p", RUN.keys, until_s=now + 100), TIMEOUT_S)  # type: ignore[arg-type]
    assert is_true(a.pin("q", RUN.keys, until_s=now + 100), TIMEOUT_S)  # type: ignore[arg-type]
    delete, gone = a._requests.delete, list[str]()

    def renewed_behind(paths: list[str]) -> None:
        delete(paths)
        gone.extend(paths)
        if gone[:1] == paths:
            name = "p" if names.Layout(NAMESPACE).pin("p") in paths else "q"
            begun = a.pin(name, RUN.keys, until_s=now + 900)
            assert is_true(begun, TIMEOUT_S)  # type: ignore[arg-type]

    a._requests.delete = renewed_behind  # type: ignore[method-assign, assignment]
    later = Collector(a._requests, clock=lambda: now + 200)
    assert later.run_once(NAMESPACE).num_removed == 2
    assert listed(a, a._state.layout.pins) == gone[:1]


def test_no_listing_brings_a_pin_back(a: BucketEngine) -> None:
    """While the record of what was erased of it is still being written."""
    assert is_true(a.pin("p", RUN.keys, data=b"notes"), TIMEOUT_S)  # type: ignore[arg-type]

    def listed_before() -> None:
        assert a.refresh(TIMEOUT_S) and not a.has_pin("p")

    before(a, "put", listed_before)
    assert is_true(a.erase(Erasure.of(RUN.keys)), TIMEOUT_S)
    assert a.refresh(TIMEOUT_S) and not a.has_pin("p")


def test_erasing_hides_what_knows_an_unread_record(a: BucketEngine, b: BucketEngine) -> None:
    """It is listed in the pass that did not read that: its stamp is above all known here. What is
    stored by others meanwhile is found, however long the erasure has no record."""

    def meanwhile() -> None:
        assert is_true(a.erase(Erasure(tenant=B)), TIMEOUT_S)
        store(a, RUN)

    before(b, "listing", meanwhile, "/pages")
    assert b.refresh(TIMEOUT_S)
    gate = Gate(b, "put", "/erased/")
    begun = b.erase(Erasure.of(RUN.keys))
    assert not any(b.contains(RUN.keys))
    assert gate.reached.wait(TIMEOUT_S)
    assert b.refresh(TIMEOUT_S, full=True)
    assert not any(b.contains(RUN.keys)), "the listing brought it back"
    other = make_run(2, PAGES)
    store(a, other)
    assert b.refresh(TIMEOUT_S)
    assert all(b.contains(other.keys))
    gate.opened.set()
    assert is_true(begun, TIMEOUT_S)
    assert not any(b.contains(RUN.keys))
    store(b, RUN)


def test_a_namespace_that_comes_brings_its_erasures(make_engine: Any) -> None:
    """Its pages may still be on NVMe: nothing of them is stored before the owner has heard."""
    a, b, told = make_engine(namespace=M), make_engine(), list[Erasure]()
    b.report_erased(told.extend)
    store(a, RUN)
    assert is_true(a.erase(Erasure()), TIMEOUT_S)
    for full in (False, True):
        assert b.refresh(TIMEOUT_S, full=full)
    assert not told, "it is of another"
    gate = Gate(b, "listing")
    b.set_namespace(M)
    assert gate.reached.wait(TIMEOUT_S)
    assert set(finished(b.submit_store(RUN))) == {Reason.CANCELLED}
    gate.opened.set()
    assert b.refresh(TIMEOUT_S)
    assert [what.is_everything for what in told] == [True]
    assert a.refresh(TIMEOUT_S, full=True)
    stored = finished(b.submit_store(RUN))
    assert set(stored) <= {Reason.OK, Reason.DUPLICATE}
    assert a.refresh(TIMEOUT_S)
    assert all(a.contains(RUN.keys))


def test_an_upload_that_was_erased_leaves_nothing(a: BucketEngine) -> None:
    gate = Gate(a, "put", "/pages/")
    job = a.submit_store(RUN)
    assert gate.reached.wait(TIMEOUT_S)
    begun = a.erase(TOLD)
    waiting = a._state.upload_done._waiters  # type: ignore[attr-defined]
    eventually(lambda: waiting, "nobody waits for it")
    gate.opened.set()
    assert set(finished(job)) == {Reason.CANCELLED}
    assert is_true(begun, TIMEOUT_S)
    assert not listed(a, a._state.layout.pages)


def test_a_waiting_erasure_hides_no_other_pages(
    a: BucketEngine, b: BucketEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a server that may not write: what others erased and stored again since is found."""
    other = make_run(2, PAGES)
    monkeypatch.setattr(b._requests._place, "write", lambda *_: refuse())
    assert not is_true(b.erase(Erasure.of(other.keys)), TIMEOUT_S)
    assert is_true(a.erase(TOLD), TIMEOUT_S)
    store(a, RUN)
    store(a, other)
    assert isinstance(durable := a.pin("p", RUN.keys), Future) and is_true(durable, TIMEOUT_S)
    assert isinstance(durable := a.pin("q", other.keys), Future) and is_true(durable, TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    assert all(b.contains(RUN.keys))
    assert b.has_pin("p") and not b.has_pin("q")
    assert not any(b.contains(other.keys)), "it may be from before"
    assert set(finished(b.submit_store(other))) == {Reason.CANCELLED}, "its record kills that"


def test_an_erasure_told_without_record_gets_one(make_engine: Any) -> None:
    """Its server may have no bucket: what it names would never be stored again, nor pinned."""
    clock = Clock(1000.0)
    a, b, c = (make_engine(clock=clock) for _ in range(3))
    store(a, RUN)
    for engine in (a, b):
        assert engine.refresh(TIMEOUT_S)
        assert is_true(engine.erase(replace(TOLD, spread=False)), TIMEOUT_S)
    assert set(finished(a.submit_store(RUN))) == {Reason.CANCELLED}
    pinned = a.pin("p", RUN.keys)
    assert isinstance(pinned, Future)
    for later in (100.0, 150.0):
        assert not listed(a, records.ERASED)
        clock.now += later
        assert a.refresh(TIMEOUT_S)
    assert is_true(pinned, TIMEOUT_S)
    assert a.has_pin("p"), "it was made behind the erasure"
    store(a, RUN)
    assert b.refresh(TIMEOUT_S)
    for engine in (b, c):
        assert engine.refresh(TIMEOUT_S, full=True)
        assert all(engine.contains(RUN.keys))
    assert len(listed(b, records.ERASED)) == 1, "another server wrote one, too"


def test_who_may_not_write_adopts_no_erasure(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it waits for a record of its own for ever, and finds nothing of that again."""
    clock = Clock(1000.0)
    a, b = (make_engine(clock=clock) for _ in range(2))
    monkeypatch.setattr(b._requests._place, "write", lambda *_: refuse())
    assert set(finished(b.submit_store(RUN))) <= {Reason.IO_ERROR, Reason.REJECTED}
    assert is_true(b.erase(replace(TOLD, spread=False)), TIMEOUT_S)
    clock.now += 300.0
    assert b.refresh(TIMEOUT_S)
    assert not b._state.orders
    assert is_true(a.erase(TOLD), TIMEOUT_S)
    store(a, RUN)
    assert b.refresh(TIMEOUT_S)
    assert all(b.contains(RUN.keys))


def test_forgets_that_keep_coming_are_answered(make_engine: Any) -> None:
    a, more, at_first = make_engine(), list["Future[bool]"](), list[int]()
    before(a, "put", lambda: more.append(a.erase(Erasure.of([bytes([len(more)]) * 32]))), times=20)
    first = a.erase(Erasure(tenant=A))
    first.add_done_callback(lambda _: at_first.append(len(more)))
    assert is_true(first, TIMEOUT_S)
    assert at_first[0] <= 2
    eventually(lambda: len(more) == 20 and all(is_true(each, TIMEOUT_S) for each in more))


def test_a_failed_record_fails_no_later_erasure(make_engine: Any) -> None:
    a, later = make_engine(), list["Future[bool]"]()
    before(a, "put", refuse)
    before(a, "put", lambda: later.append(a.erase(Erasure.of([b"k" * 32]))))
    assert not is_true(a.erase(Erasure(tenant=A)), TIMEOUT_S)
    assert is_true(later[0], TIMEOUT_S), "it was not tried"

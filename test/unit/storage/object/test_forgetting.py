"""Single pages forgotten: over servers, clocks, listings, and with everything on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.storage.base import Erasure, Reason, Run
from sglang_tiered.storage.object import forgotten, purging
from sglang_tiered.storage.object import format as fmt
from sglang_tiered.storage.object.names import Layout, parse_path
from sglang_tiered.storage.promises import is_true

if TYPE_CHECKING:
    from kit.runs import MakeRun
    from sglang_tiered.storage.object import ObjectEngine

MakeEngine = Callable[..., "ObjectEngine"]

PAGES = [100, 200, 300]
NOW = 1_000_000.0


def store(engine: ObjectEngine, run: Run) -> None:
    job = engine.submit_store(run)
    assert engine.flush(TIMEOUT_S)
    assert set(finished(job)) <= {Reason.OK, Reason.DUPLICATE}


def one(run: Run, position: int) -> Run:
    return Run(run.keys[position : position + 1], run.pages[position : position + 1])


def paths(engine: ObjectEngine, folder: str) -> list[str]:
    listing = engine._client.listing(f"{engine._state.layout.folder}/{folder}")
    return [listed.path for chunk in listing for listed in chunk]


def held(engine: ObjectEngine, run: Run) -> list[bool]:
    return engine.contains(run.keys)


@pytest.mark.parametrize("knows", [True, False])
def test_a_forgotten_page_is_gone_for_everybody(
    make_engine: MakeEngine, make_run: MakeRun, knows: bool
) -> None:
    a, b = make_engine(), make_engine()
    run = make_run(1, PAGES)
    store(a, run)
    if knows:
        assert b.refresh(TIMEOUT_S)
    assert is_true(a.erase(Erasure.of(run.keys[1:2])), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    late = make_engine()
    assert late.refresh(TIMEOUT_S)
    for engine in (a, b, late):
        assert held(engine, run) == [True, False, True]
        assert engine.refresh(TIMEOUT_S, full=True)
        assert held(engine, run) == [True, False, True]


def test_what_is_stored_again_is_found_by_all(make_engine: MakeEngine, make_run: MakeRun) -> None:
    clocks = {"wall_clock": lambda: NOW}
    a, b, c = (make_engine(clocks=clocks) for _ in range(3))
    run = make_run(1, PAGES)
    for writer in (a, b, a):
        store(writer, run)
        assert c.refresh(TIMEOUT_S)
        assert held(c, run) == [True] * 3
        assert is_true(a.erase(Erasure.of(run.keys)), TIMEOUT_S)
        assert held(a, run) == [False] * 3
        for engine in (b, c):
            assert engine.refresh(TIMEOUT_S)
            assert held(engine, run) == [False] * 3


def test_an_object_whose_pages_are_all_dead_goes(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    a = make_engine()
    gone, mixed = make_run(1, PAGES), make_run(2, PAGES)
    store(a, gone)
    store(a, mixed)
    assert is_true(a.erase(Erasure.of([*gone.keys, mixed.keys[0]])), TIMEOUT_S)
    assert len(paths(a, "objects")) == len(paths(a, "manifests")) == 1
    (path,) = paths(a, "purges")
    purge = fmt.unpack_purge(a._client.get(path, fmt.MAX_PURGE_BYTES))
    assert purge is not None
    assert purge.keys == (*gone.keys, mixed.keys[0])
    assert held(a, mixed) == [False, True, True]


def test_a_page_still_staged_never_becomes_visible(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    a = make_engine(linger_s=3600.0)
    run = make_run(1, PAGES)
    job = a.submit_store(run)
    eventually(lambda: a._state.packing is None and not a._state.stores)
    forgotten_now = a.erase(Erasure.of(run.keys[1:2]))
    assert a.flush(TIMEOUT_S)
    assert finished(job) == [Reason.OK, Reason.CANCELLED, Reason.OK]
    assert is_true(forgotten_now, TIMEOUT_S)
    assert held(a, run) == [True, False, True]
    (path,) = paths(a, "objects")
    stored = bytes(a._client.get(path))
    assert bytes(run.pages[0][0]) in stored
    assert bytes(run.pages[1][0]) not in stored, "the bytes went into the bucket"


def test_a_page_still_queued_never_becomes_visible(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    """Stored behind the forget, its object would be younger than the tombstone."""
    a, b = make_engine(), make_engine()
    run, before = make_run(1, PAGES), make_run(2, [50])
    packing, goes_on = threading.Event(), threading.Event()
    packer = next(t for t in b._threads if t.name == "object-packer")._target.__self__  # type: ignore[attr-defined]
    pack = packer._pack_page

    def slow(*arguments: Any) -> None:
        packing.set()
        assert goes_on.wait(TIMEOUT_S)
        pack(*arguments)

    packer._pack_page = slow
    first, job = b.submit_store(before), b.submit_store(run)
    assert packing.wait(TIMEOUT_S)
    assert is_true(a.erase(Erasure.of(run.keys[:2])), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    goes_on.set()
    assert finished(first) == [Reason.OK]
    assert b.flush(TIMEOUT_S)
    assert finished(job) == [Reason.CANCELLED, Reason.CANCELLED, Reason.OK]
    assert a.refresh(TIMEOUT_S)
    for engine in (a, b):
        assert held(engine, run) == [False, False, True]


def test_a_forget_waits_for_an_upload_under_way(
    make_engine: MakeEngine, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_engine(), make_engine()
    run = make_run(1, PAGES)
    putting, goes_on = threading.Event(), threading.Event()
    put = a._client.put

    def slow(path: str, data: bytes) -> None:
        if "/manifests/" in path:
            putting.set()
            assert goes_on.wait(TIMEOUT_S)
        put(path, data)

    monkeypatch.setattr(a._client, "put", slow)
    job = a.submit_store(run)
    assert putting.wait(TIMEOUT_S)
    begun = a.erase(Erasure.of(run.keys))
    again = a.submit_store(one(run, 0))
    assert again.reasons != [Reason.DUPLICATE], "the old copy is dead"
    goes_on.set()
    assert is_true(begun, TIMEOUT_S)
    assert finished(job) == [Reason.CANCELLED] * 3
    assert a.flush(TIMEOUT_S)
    assert finished(again) == [Reason.OK]
    assert b.refresh(TIMEOUT_S)
    for engine in (a, b):
        assert held(engine, run) == [True, False, False]
    assert len(paths(a, "objects")) == 1


def test_a_forget_does_not_await_lingering_neighbours(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    a = make_engine(linger_s=3600.0)
    run = make_run(1, PAGES)
    job = a.submit_store(run)
    assert is_true(a.erase(Erasure.of(run.keys[:1])), TIMEOUT_S)
    assert not job.done
    assert a.flush(TIMEOUT_S)
    assert finished(job) == [Reason.CANCELLED, Reason.OK, Reason.OK]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_forget_by_a_slow_clock_is_complete(
    make_engine: MakeEngine, make_run: MakeRun, is_known: bool
) -> None:
    behind, right = {"wall_clock": lambda: NOW - 300}, {"wall_clock": lambda: NOW}
    a, b = make_engine(clocks=behind), make_engine(clocks=right)
    run = make_run(1, PAGES)
    assert a.refresh(TIMEOUT_S)
    store(b, run)
    if is_known:
        assert a.refresh(TIMEOUT_S)
        assert held(a, run) == [True] * 3
    assert is_true(a.erase(Erasure.of(run.keys)), TIMEOUT_S)
    c = make_engine(clocks=right)
    for engine in (a, b, c):
        assert engine.refresh(TIMEOUT_S, full=True)
        assert held(engine, run) == [False] * 3
    store(a, run)
    assert c.refresh(TIMEOUT_S)
    assert held(a, run) == held(c, run) == [True] * 3, "what is stored after it stays"


def test_a_copy_stored_before_it_heard_stays_hidden(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    now = [NOW]
    clocks = {"wall_clock": lambda: now[0]}
    a, b = make_engine(clocks=clocks), make_engine(clocks=clocks)
    run = make_run(1, PAGES)
    store(a, run)
    assert is_true(a.erase(Erasure.of(run.keys)), TIMEOUT_S)
    now[0] += 5
    store(b, run)  # of its memory, say: it knows nothing yet
    for engine in (a, b, make_engine(clocks=clocks)):
        assert engine.refresh(TIMEOUT_S)
        assert held(engine, run) == [False] * 3


@pytest.mark.parametrize("is_retry", [True, False])
def test_a_forget_served_late_covers_later_copies(
    make_engine: MakeEngine, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, is_retry: bool
) -> None:
    """A bucket that hangs, or a listing that takes minutes."""
    now = [NOW]
    clocks = {"wall_clock": lambda: now[0]}
    a, b = make_engine(clocks=clocks), make_engine(clocks=clocks)
    run = make_run(1, PAGES)
    store(a, run)
    put = a._client.put

    def late(path: str, data: bytes) -> None:
        raise purging.RequestError(purging.Failure.UNAVAILABLE, "no")

    def listing(folder: str, **options: Any) -> Any:
        now[0] += 100
        monkeypatch.undo()
        return a._client.listing(folder, **options)

    if is_retry:
        monkeypatch.setattr(a._client, "put", late)
        assert not is_true(a.erase(Erasure.of(run.keys)), TIMEOUT_S)
        monkeypatch.setattr(a._client, "put", put)
        now[0] += 100
        assert a.refresh(TIMEOUT_S)
    else:
        monkeypatch.setattr(a._client, "listing", listing)
        assert is_true(a.erase(Erasure.of(run.keys)), TIMEOUT_S)
    assert len(paths(a, "purges")) == 1
    now[0] += 2
    store(b, run)  # it knows nothing yet
    for engine in (a, b, make_engine(clocks=clocks)):
        assert engine.refresh(TIMEOUT_S, full=True)
        assert held(engine, run) == [False] * 3
    store(b, run)
    assert a.refresh(TIMEOUT_S)
    assert held(a, run) == held(b, run) == [True] * 3


def test_a_tombstone_is_written_once_each(
    make_engine: MakeEngine, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every try it would hide again what was stored since."""
    now = [NOW]
    a = make_engine(clocks={"wall_clock": lambda: now[0]})
    run, other = make_run(1, PAGES), make_run(2, PAGES)
    store(a, run)
    a.set_namespace(b"\x22" * 32)
    store(a, other)
    a.set_namespace(b"\x11" * 32)
    put = a._client.put
    refused = Layout(b"\x22" * 32).purges

    def refuse(path: str, data: bytes) -> None:
        if path.startswith(refused):
            raise purging.RequestError(purging.Failure.UNAVAILABLE, "no")
        put(path, data)

    monkeypatch.setattr(a._client, "put", refuse)
    assert not is_true(a.erase(Erasure.of(run.keys)), TIMEOUT_S)
    store(a, run)
    for _ in range(2):
        now[0] += 100
        assert a.refresh(TIMEOUT_S), "what is refused keeps nothing else waiting"
        assert len(paths(a, "purges")) == 1
        assert held(a, run) == [True] * 3
    monkeypatch.setattr(a._client, "put", put)
    assert a.refresh(TIMEOUT_S)
    (there,) = (listed.path for chunk in a._client.listing(refused) for listed in chunk)
    named = parse_path(there)
    assert named is not None and named.unix_ms >= now[0] * 1000
    assert held(a, run) == [True] * 3


def test_a_purge_reaches_what_was_stored_again(make_engine: MakeEngine, make_run: MakeRun) -> None:
    """Such an object has a name ahead of the clock."""
    clocks = {"wall_clock": lambda: NOW}
    a, b = make_engine(clocks=clocks), make_engine(clocks=clocks, linger_s=3600.0)
    run, other = make_run(1, PAGES), make_run(2, PAGES)
    tenant = b"t" * 16
    mine, theirs = (Run(each.keys, each.pages, tenant) for each in (run, other))
    assert is_true(b.erase(Erasure.of(run.keys + other.keys)), TIMEOUT_S)
    assert a.refresh(TIMEOUT_S)
    store(a, theirs)
    job = b.submit_store(mine)
    eventually(lambda: b._state.packing is None and not b._state.stores)
    assert is_true(a.erase(Erasure(tenant=tenant)), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    b.flush(TIMEOUT_S)
    assert finished(job) == [Reason.CANCELLED] * 3
    c = make_engine(clocks=clocks)
    for engine in (a, b, c):
        assert engine.refresh(TIMEOUT_S)
        assert held(engine, mine) == held(engine, theirs) == [False] * 3


def test_an_old_listing_brings_nothing_back(
    make_engine: MakeEngine, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_engine(), make_engine()
    run = make_run(1, PAGES)
    store(a, run)
    assert is_true(a.erase(Erasure.of(run.keys[:1])), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    listing = b._client.listing

    def stale(folder: str, **options: Any) -> Any:
        return iter([]) if folder.endswith("/purges") else listing(folder, **options)

    monkeypatch.setattr(b._client, "listing", stale)
    with b._state.lock:
        b._state.index.clear()
    assert b.refresh(TIMEOUT_S, full=True)
    assert held(b, run) == [False, True, True]


def test_too_many_keys_hide_more_never_less(
    make_engine: MakeEngine, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [NOW]
    a = make_engine(clocks={"wall_clock": lambda: now[0]})
    a._state.forgotten = forgotten.Forgotten(max_keys=4)
    first, last = make_run(1, PAGES), make_run(2, PAGES)
    store(a, first)
    assert is_true(a.erase(Erasure.of(first.keys[:2])), TIMEOUT_S)
    now[0] += 600
    store(a, last)
    assert is_true(a.erase(Erasure.of(last.keys)), TIMEOUT_S)
    assert len(a._state.forgotten) <= 4
    assert held(a, first) == held(a, last) == [False] * 3
    b = make_engine(clocks={"wall_clock": lambda: now[0]})
    assert b.refresh(TIMEOUT_S)
    assert held(b, first) == [False, False, True], "the bucket keeps what one server cannot"
    store(a, last)
    assert held(a, last) == [True] * 3


def test_many_pages_take_several_tombstones(
    make_engine: MakeEngine, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "MAX_FORGOTTEN_PAGES", 2)
    a, b = make_engine(), make_engine()
    run = make_run(1, PAGES)
    store(a, run)
    assert is_true(a.erase(Erasure.of(run.keys)), TIMEOUT_S)
    assert len(paths(a, "purges")) == 2
    assert paths(a, "objects") == []
    assert b.refresh(TIMEOUT_S)
    assert held(b, run) == [False] * 3


def test_an_earlier_program_hides_all_before_it(make_engine: MakeEngine, make_run: MakeRun) -> None:
    """It takes a purge that it cannot read for one of everybody, up to its name."""
    a = make_engine()
    run = make_run(1, PAGES)
    store(a, run)
    assert is_true(a.erase(Erasure.of(run.keys[:1])), TIMEOUT_S)
    (path,) = paths(a, "purges")
    data = bytes(a._client.get(path, fmt.MAX_PURGE_BYTES))
    assert int.from_bytes(data[8:12], "little") == 2
    named, stored = parse_path(path), parse_path(paths(a, "manifests")[0])
    assert named is not None and stored is not None
    assert named.unix_ms >= stored.unix_ms


def test_a_failed_forget_is_tried_again(
    make_engine: MakeEngine, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_engine(), make_engine()
    run = make_run(1, PAGES)
    store(a, run)
    put = a._client.put

    def refuse(path: str, data: bytes) -> None:
        raise purging.RequestError(purging.Failure.UNAVAILABLE, "no")

    monkeypatch.setattr(a._client, "put", refuse)
    assert not is_true(a.erase(Erasure.of(run.keys)), TIMEOUT_S)
    assert held(a, run) == [False] * 3
    monkeypatch.setattr(a._client, "put", put)
    assert a.refresh(TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    assert held(b, run) == [False] * 3


def test_the_owner_hears_and_stores_nothing_meanwhile(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    a, b = make_engine(), make_engine()
    run = make_run(1, PAGES)
    told: list[Erasure] = []
    during: list[list[Reason]] = []

    def hear(whats: Sequence[Erasure]) -> None:
        told.extend(whats)
        during.append(b.submit_store(one(run, 0)).reasons)

    b.report_erased(hear)
    store(a, run)
    assert is_true(a.erase(Erasure.of(run.keys[:2])), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    assert [what.keys for what in told] == [run.keys[:2]]
    assert during == [[Reason.CANCELLED]], "it may be from before"
    store(b, one(run, 0))
    assert held(b, run) == [True, False, True]
    assert is_true(b.erase(Erasure.of(run.keys), local=b.erase(Erasure(()))), TIMEOUT_S)
    eventually(lambda: len(told) == 2, "its own is not reported")
    assert told[1].keys == ()


def test_a_start_tells_many_tombstones_at_once(make_engine: MakeEngine) -> None:
    a, b = make_engine(), make_engine()
    for number in range(20):
        assert is_true(a.erase(Erasure.of([bytes([number]) * 32])), TIMEOUT_S)
    told: list[Sequence[Erasure]] = []
    b.report_erased(told.append)
    assert b.refresh(TIMEOUT_S)
    eventually(lambda: sum(map(len, told)) == 20)
    assert len(told) <= 3, "what was read before the call, and since"

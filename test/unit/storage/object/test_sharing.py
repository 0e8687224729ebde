"""Several engines on one bucket: discovery, purges, namespaces, and foreign manifests."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import xxhash

from kit.waiting import TIMEOUT_S, finished
from sglang_tiered.codecs import make_codec
from sglang_tiered.codecs.base import PageLayout
from sglang_tiered.storage.base import Erasure, Health, Reason, Run
from sglang_tiered.storage.object.format import (
    Manifest,
    Purge,
    pack_manifest,
    pack_purge,
    page_table,
    unpack_purge,
)
from sglang_tiered.storage.object.names import Layout, ObjectId
from sglang_tiered.storage.promises import is_true

if TYPE_CHECKING:
    from kit.runs import Blank, MakeRun, PageData
    from sglang_tiered.storage.object import ObjectEngine

MakeEngine = Callable[..., "ObjectEngine"]

A, B = b"a" * 16, b"b" * 16
OLD, NEW = b"\x11" * 32, b"\x22" * 32


def of(tenant: bytes, run: Run) -> Run:
    return Run(run.keys, run.pages, tenant)


def hits(engine: ObjectEngine, run: Run) -> int:
    return engine.lookup(run.keys).num_hits


def store(engine: ObjectEngine, run: Run) -> None:
    job = engine.submit_store(run)
    assert engine.flush(TIMEOUT_S)
    assert set(finished(job)) == {Reason.OK}


def paths(engine: ObjectEngine, folder: str) -> list[str]:
    place = getattr(engine._state.layout, folder)
    return sorted(entry.path for chunk in engine._client.listing(place) for entry in chunk)


def poll_until(condition: Callable[[], bool]) -> None:
    turn = threading.Event()
    for _ in range(2000):
        if condition():
            return
        turn.wait(0.01)
    pytest.fail("it did not come to pass")


def test_what_one_stores_another_finds_and_loads(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    a, b = make_engine(), make_engine()
    assert b.refresh(TIMEOUT_S)
    runs = [of(A, make_run(seed, [4096, 100])) for seed in range(5)]
    for run in runs:
        store(a, run)
    assert hits(b, runs[0]) == 0
    assert b.refresh(TIMEOUT_S)
    for run in runs:
        assert hits(b, run) == 2
        target = blank(run)
        assert finished(b.submit_load(target)) == [Reason.OK] * 2
        assert page_data(target) == page_data(run)
        assert finished(b.submit_store(run)) == [Reason.DUPLICATE] * 2
    assert b.object_stats().discovery.num_manifests_seen == 5


def test_an_engine_that_opens_later_finds_everything(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    a = make_engine()
    runs = [make_run(seed, [100]) for seed in range(150)]
    for run in runs:
        finished(a.submit_store(run))
    b = make_engine()
    poll_until(lambda: sum(hits(b, run) for run in runs) == 150)


def test_discovery_goes_on_by_itself(make_engine: MakeEngine, make_run: MakeRun) -> None:
    a, b = make_engine(), make_engine(refresh_s=0.02)
    poll_until(lambda: b.object_stats().discovery.num_passes > 1)
    run = make_run(1, [100])
    store(a, run)
    poll_until(lambda: hits(b, run) == 1)


def test_late_manifests_are_found_within_the_look_back(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    now = [1_000_000.0]
    clocks = {"wall_clock": lambda: now[0]}
    a, b = make_engine(clocks=clocks, linger_s=3600.0), make_engine(clocks=clocks)
    late = make_run(1, [100])
    job = a.submit_store(late)  # its object is opened now
    poll_until(lambda: a._state.packing is None and not a._state.stores)
    now[0] += 30
    c = make_engine(clocks=clocks)
    store(c, make_run(2, [100]))
    assert b.refresh(TIMEOUT_S)
    assert a.flush(TIMEOUT_S)
    assert finished(job) == [Reason.OK]
    assert b.refresh(TIMEOUT_S)
    assert hits(b, late) == 1


def test_a_clock_far_ahead_leaves_the_cursor(make_engine: MakeEngine, make_run: MakeRun) -> None:
    ahead = make_engine(clocks={"wall_clock": lambda: 5_000_000_000.0})
    a, b = make_engine(), make_engine()
    store(ahead, make_run(1, [100]))
    assert b.refresh(TIMEOUT_S)
    run = make_run(2, [100])
    store(a, run)
    assert b.refresh(TIMEOUT_S)
    assert (hits(b, run), hits(b, make_run(1, [100]))) == (1, 1)


def test_a_full_listing_notices_deleted_objects(make_engine: MakeEngine, make_run: MakeRun) -> None:
    now = [1_000_000.0]
    clocks = {"wall_clock": lambda: now[0]}
    a, b = make_engine(clocks=clocks), make_engine(clocks=clocks)
    run, kept = make_run(1, [100]), make_run(2, [100])
    store(a, run)
    (path,) = paths(a, "manifests")
    store(a, kept)
    assert b.refresh(TIMEOUT_S)
    a._client.delete([path])
    now[0] += 3600  # what is young may only be missing from a listing that lags
    assert b.refresh(TIMEOUT_S, full=True)
    assert (hits(b, run), hits(b, kept)) == (0, 1)
    assert b.object_stats().discovery.num_objects_vanished == 1


def newer(data: bytes) -> bytes:
    body = bytearray(data[:-8])
    body[8:12] = struct.pack("<I", 2)
    return bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))


def test_unusable_manifests_are_counted_and_not_read_again(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    a, b = make_engine(), make_engine()
    good = make_run(1, [100])
    store(a, good)
    layout = a._state.layout
    rows = page_table([(b"k" * 32, 0, 10, 10, 1)])

    def manifest(number: int, **changes: Any) -> tuple[str, bytes]:
        made = Manifest(ObjectId(number, 1, 1, 0), OLD, bytes(16), "none", rows, 10)
        return layout.manifest(made.object_id), pack_manifest(made._replace(**changes))

    path, data = manifest(1)
    a._client.put(path, data[:-1])
    path, data = manifest(2)
    a._client.put(path, newer(data))
    a._client.put(*manifest(3, namespace=NEW))
    a._client.put(*manifest(4, codec="zstd"))
    a._client.put(*manifest(5, object_id=ObjectId(6, 1, 1, 0)))
    a._client.put(f"{layout.manifests}/notes.txt", b"hello")
    a._client.put(layout.manifest(ObjectId(7, 1, 1, 0)), b"")
    assert b.refresh(TIMEOUT_S)
    counts = b.object_stats().discovery
    assert (counts.num_manifests_seen, counts.num_manifests_bad) == (1, 3)
    assert counts.num_manifests_foreign == 3
    assert hits(b, good) == 1
    before = b.object_stats().requests["get"]
    assert b.refresh(TIMEOUT_S, full=True)
    assert b.object_stats().requests["get"] == before + 2, "damaged, or only on its way?"
    assert b.refresh(TIMEOUT_S, full=True)
    assert b.object_stats().requests["get"] == before + 2
    assert b.stats().health is Health.RUNNING


def test_a_manifest_without_object_becomes_a_miss(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank
) -> None:
    a = make_engine()
    run = make_run(1, [100])
    rows = page_table([(run.keys[0], 0, 100, 100, 1)])
    manifest = Manifest(ObjectId(5, 1, 1, 0), OLD, bytes(16), "none", rows, 100)
    a._client.put(a._state.layout.manifest(manifest.object_id), pack_manifest(manifest))
    assert a.refresh(TIMEOUT_S, full=True)
    assert hits(a, run) == 1
    assert finished(a.submit_load(blank(run))) == [Reason.MISS]
    assert a.refresh(TIMEOUT_S, full=True)
    assert hits(a, run) == 0


def test_two_writers_of_one_page_serve_each_others(
    make_engine: MakeEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    a, b = make_engine(), make_engine()
    run = make_run(1, [100, 200])
    store(a, run)
    store(b, run)
    for engine in (a, b):
        assert engine.refresh(TIMEOUT_S)
        target = blank(run)
        assert finished(engine.submit_load(target)) == [Reason.OK] * 2
        assert page_data(target) == page_data(run)


def test_a_purge_reaches_other_servers_and_open_objects(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    a, b = make_engine(), make_engine(linger_s=3600.0)
    known, other = of(A, make_run(1, [100])), of(B, make_run(2, [100]))
    for run in (known, other):
        store(a, run)
    assert b.refresh(TIMEOUT_S)
    under_way = of(A, make_run(3, [100]))
    job = b.submit_store(under_way)
    poll_until(lambda: b._state.packing is None and not b._state.stores)
    assert is_true(a.erase(Erasure(tenant=A)), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    assert (hits(b, known), hits(b, other), hits(b, under_way)) == (0, 1, 0)
    assert b.flush(TIMEOUT_S)
    assert finished(job) == [Reason.CANCELLED]
    c = make_engine()
    assert c.refresh(TIMEOUT_S)
    assert (hits(c, known), hits(c, other), hits(c, under_way)) == (0, 1, 0)
    again = of(A, make_run(1, [100]))
    store(b, again)
    assert c.refresh(TIMEOUT_S)
    assert hits(c, again) == 1


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("tenant", [A, None])
def test_a_purge_by_a_slow_clock_is_complete(
    make_engine: MakeEngine, make_run: MakeRun, tenant: bytes | None, is_known: bool
) -> None:
    behind = {"wall_clock": lambda: 1_000_000.0 - 300}
    right = {"wall_clock": lambda: 1_000_000.0}
    a, b = make_engine(clocks=behind), make_engine(clocks=right)
    run = of(A, make_run(1, [100]))
    assert a.refresh(TIMEOUT_S)
    store(b, run)
    if is_known:
        assert a.refresh(TIMEOUT_S)
        assert hits(a, run) == 1
    assert is_true(a.erase(Erasure(tenant=tenant)), TIMEOUT_S)
    c = make_engine(clocks=right)
    for engine in (a, b, c):
        assert engine.refresh(TIMEOUT_S, full=True)
        assert hits(engine, run) == 0
    store(a, run)
    assert c.refresh(TIMEOUT_S)
    assert (hits(a, run), hits(c, run)) == (1, 1), "what is stored after it is not purged"


def test_pages_stored_right_after_a_purge_stay(make_engine: MakeEngine, make_run: MakeRun) -> None:
    clocks = {"wall_clock": lambda: 1_000_000.0}
    a, b = make_engine(clocks=clocks), make_engine(clocks=clocks)
    before, after = of(A, make_run(1, [100])), of(A, make_run(2, [100]))
    for _ in range(3):
        store(a, before)
        assert is_true(a.erase(Erasure(tenant=A)), TIMEOUT_S)
        store(a, after)
        assert b.refresh(TIMEOUT_S)
        assert (hits(a, before), hits(b, before)) == (0, 0)
        assert (hits(a, after), hits(b, after)) == (1, 1)
        assert is_true(a.erase(Erasure(tenant=A)), TIMEOUT_S)


def test_a_purge_leaves_only_its_tombstone(make_engine: MakeEngine, make_run: MakeRun) -> None:
    a = make_engine()
    store(a, of(A, make_run(1, [100])))
    store(a, of(B, make_run(2, [100])))
    assert is_true(a.erase(Erasure(tenant=A)), TIMEOUT_S)
    assert len(paths(a, "objects")) == len(paths(a, "manifests")) == 1
    (path,) = paths(a, "purges")
    purge = unpack_purge(a._client.get(path))
    assert purge is not None
    assert (purge.tenant, purge.namespace) == (A, OLD)


def test_a_manifest_older_than_its_purge_stays_hidden(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    now = [1_000_000.0]
    clocks = {"wall_clock": lambda: now[0]}
    a = make_engine(clocks=clocks)
    store(a, of(A, make_run(1, [100])))
    (path,) = paths(a, "manifests")
    data = bytes(a._client.get(path))
    now[0] += 5
    assert is_true(a.erase(Erasure(tenant=A)), TIMEOUT_S)
    a._client.put(path, data)  # as by a writer that did not know yet
    b = make_engine(clocks=clocks)
    for engine in (a, b):
        assert engine.refresh(TIMEOUT_S, full=True)
        assert hits(engine, make_run(1, [100])) == 0


def test_a_purge_crosses_namespaces_and_clear_does_not(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    a, b = make_engine(namespace=OLD), make_engine(namespace=NEW)
    store(a, of(A, make_run(1, [100])))
    store(b, of(A, make_run(2, [100])))
    store(b, of(B, make_run(3, [100])))
    assert is_true(a.erase(Erasure(tenant=A)), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S)
    assert (hits(b, make_run(2, [100])), hits(b, make_run(3, [100]))) == (0, 1)
    assert is_true(a.erase(Erasure()), TIMEOUT_S)
    assert b.refresh(TIMEOUT_S, full=True)
    assert hits(b, make_run(3, [100])) == 1


def test_a_damaged_purge_forgets_too_much(make_engine: MakeEngine, make_run: MakeRun) -> None:
    a, b = make_engine(), make_engine()
    store(a, of(A, make_run(1, [100])))
    purge_id = ObjectId(int(a._state.wall_clock() * 1000) + 5, 9, 9, 0)
    data = pack_purge(Purge(OLD, B, purge_id.unix_ms))
    a._client.put(a._state.layout.purge(purge_id), data[:-1] + b"\0")
    assert b.refresh(TIMEOUT_S)
    assert hits(b, make_run(1, [100])) == 0


def test_an_oversized_purge_is_unread_and_still_forgets(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    a, b = make_engine(), make_engine()
    store(a, of(A, make_run(1, [100])))
    purge_id = ObjectId(int(a._state.wall_clock() * 1000) + 5, 9, 9, 0)
    a._client.put(a._state.layout.purge(purge_id), bytes(8 << 20))
    assert b.refresh(TIMEOUT_S)
    assert hits(b, make_run(1, [100])) == 0
    assert b._client.bytes_in < 1 << 20


def test_a_purge_waits_for_an_upload_under_way(make_engine: MakeEngine, make_run: MakeRun) -> None:
    a = make_engine()
    inner, reached, opened = a._client.put, threading.Event(), threading.Event()

    def held_manifest(path: str, data: bytes) -> None:
        if "/manifests/" in path:
            reached.set()
            assert opened.wait(TIMEOUT_S)
        inner(path, data)

    a._client.put = held_manifest  # type: ignore[method-assign]
    run = of(A, make_run(1, [100]))
    job = a.submit_store(run)
    assert reached.wait(TIMEOUT_S)
    forgetting = a.erase(Erasure(tenant=A))
    assert finished(job) == [Reason.CANCELLED]
    assert not is_true(forgetting, 0.05)
    assert not forgetting.done()
    opened.set()
    assert is_true(forgetting, TIMEOUT_S)
    assert paths(a, "manifests") == []
    assert hits(a, run) == 0


def test_stores_under_way_finish_under_the_old_namespace(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    a = make_engine(linger_s=3600.0)
    held, under_way = make_run(1, [100]), make_run(2, [100])
    store(a, held)
    job = a.submit_store(under_way)
    a.set_namespace(NEW)
    assert (hits(a, held), hits(a, under_way)) == (0, 0)
    assert finished(job) == [Reason.OK]
    assert hits(a, under_way) == 0
    store(a, held)
    assert a.refresh(TIMEOUT_S)
    assert hits(a, held) == 1
    a.set_namespace(OLD)
    assert a.refresh(TIMEOUT_S)
    assert (hits(a, held), hits(a, under_way)) == (1, 1)
    assert len(paths(a, "objects")) == 2


@pytest.mark.parametrize("name", ["zstd", "int8"])
def test_coded_pages_live_apart_from_exact_ones(
    make_engine: MakeEngine, blank: Blank, page_data: PageData, name: str
) -> None:
    layout = PageLayout.kv(dtype="bfloat16", num_layers=2, page_size=4, num_heads=2, head_dim=16)
    codec = make_codec(name, layout)
    page = (memoryview(bytes(layout.page_bytes // 2)), memoryview(bytes(layout.page_bytes // 2)))
    run = Run((b"k" * 32, b"l" * 32), (page, page))
    exact = make_engine()
    a, b = (make_engine(codec=name, page_codec=codec) for _ in range(2))
    assert a._state.namespace not in (OLD, Layout(NEW).namespace)
    store(a, run)
    for engine in (b, exact):
        assert engine.refresh(TIMEOUT_S)
    assert (hits(b, run), hits(exact, run)) == (2, 0)
    target = blank(run)
    assert finished(b.submit_load(target)) == [Reason.OK] * 2
    assert page_data(target) == page_data(run)
    short = Run(run.keys[:1], ((memoryview(bytearray(10)),),))
    assert finished(b.submit_load(short)) == [Reason.MISS]
    assert b.stats().stored_bytes < run.num_bytes

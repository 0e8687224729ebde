"""One engine: what it writes, its budgets, and namespaces that change; who may touch a load's
buffers, and who finishes it: exactly one, after the last touch. An unforeseen exception costs one
job and a while of health, but no thread."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kit.clock import Clock
from kit.faulty import fail_once
from kit.request_hooks import Gate, listed
from kit.runs import NAMESPACE, blank, make_run, make_soft_run, of, page_data, soft_encoding
from kit.tiers import load, loads, store
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.storage.base import Erasure, Health, Reason, Run
from sglang_tiered.storage.bucket import transfers
from sglang_tiered.storage.promises import is_true

A = b"a" * 16


def test_a_page_is_one_object_and_nothing_else(make_engine: Any) -> None:
    engine = make_engine(wall_clock=lambda: 1_700_000_000.0)
    engine._requests.modified = lambda _: None  # type: ignore[method-assign]
    run = of(A, make_run(1, [4096, 5000]))
    store(engine, run)
    found = listed(engine, engine._state.layout.pages)
    for key, data in zip(run.keys, page_data(run), strict=True):
        (path,) = (path for path in found if key.hex() in path)
        named = f"v2/{NAMESPACE.hex()}/pages/2023111422/1320-0-{A.hex()}-{key.hex()}-{len(data):x}-"
        checksum = xxhash.xxh3_64_intdigest(named.encode() + data)
        assert path == f"{named}{checksum:016x}"
        assert bytes(engine._requests.get(path, len(data))) == data
    assert len(found) == 2
    assert load(engine, run) == [Reason.OK] * 2
    stats = engine.object_stats()
    assert (stats.requests["put"], stats.requests["get"]) == (3, 4), "one tells the clock"
    assert stats.trouble == ""
    assert stats.refused == {"put": 0, "delete": 0}
    assert engine.stats().capacity_bytes == 1 << 40


def test_the_budgets_of_a_day_reject_stores(make_engine: Any) -> None:
    engine = make_engine(writes_per_day=500_000)  # bursts of a tenth
    store(engine, make_run(1, [40_000]))
    assert finished(engine.submit_store(make_run(2, [40_000]))) == [Reason.REJECTED]
    assert not engine.takes_stores, "or it would be read again and again"
    assert finished(engine.submit_store(make_run(3, [60_000]))) == [Reason.NO_SPACE], "of no day"
    engine = make_engine(requests_per_day=20)
    results = [finished(engine.submit_store(make_run(seed, [100])))[0] for seed in range(10, 14)]
    assert results == [Reason.OK, Reason.OK, Reason.REJECTED, Reason.REJECTED]


def test_stores_under_way_finish_under_the_old_namespace(make_engine: Any) -> None:
    a = make_engine()
    held, under_way = make_run(1, [100]), make_run(2, [100])
    finished(a.submit_store(held))
    gate = Gate(a, "put")
    job = a.submit_store(under_way)
    assert gate.reached.wait(TIMEOUT_S)
    a.set_namespace(b"\x22" * 32)
    gate.opened.set()
    assert finished(job) == [Reason.OK]
    assert a.refresh(TIMEOUT_S)
    assert a.contains([*held.keys, *under_way.keys]) == [False, False]
    finished(a.submit_store(held))
    a.set_namespace(NAMESPACE)
    assert a.refresh(TIMEOUT_S)
    assert a.contains([*held.keys, *under_way.keys]) == [True, True]


@pytest.mark.parametrize("url", ["memory", "directory"])
def test_encoded_pages_come_back_as_they_were(make_engine: Any, tmp_path: Path, url: str) -> None:
    """Beside one that is not encoded, and asked for in the length of no page."""
    place = {} if url == "memory" else {"url": tmp_path.as_uri()}
    encoding = soft_encoding()
    run = make_soft_run(1, [16_384, 32_768, 100])
    stored = tuple(encoding.encode(page) for page in run.pages[:2])
    a, b = make_engine(**place), make_engine(encoding=encoding, **place)
    finished(a.submit_store(Run(run.keys, (*stored, run.pages[2]))))
    assert b.refresh(TIMEOUT_S)
    loads(b, run)
    assert load(a, run) == [Reason.MISS, Reason.MISS, Reason.OK]
    for num_bytes in (10, 16_385):
        other = Run(run.keys[:1], ((memoryview(bytearray(num_bytes)),),))
        assert finished(b.submit_load(other)) == [Reason.MISS]
    assert b.stats().stored_bytes < run.num_bytes


def test_pages_over_age_are_found_no_more(make_engine: Any) -> None:
    """From the next look on, not from the next full listing."""
    clock = Clock(time.time())
    engine, run = make_engine(ttl_s=50.0, wall_clock=clock), make_run(1, [100])
    assert finished(engine.submit_store(run)) == [Reason.OK]
    assert engine.refresh(TIMEOUT_S)
    for later, is_found in ((30.0, True), (60.0, False)):
        clock.now += later
        assert engine.refresh(TIMEOUT_S)
        assert engine.contains(run.keys) == [is_found]


def test_a_deadline_waits_for_a_running_copy(make_engine: Any, tmp_path: Path) -> None:
    """And what came to its end meanwhile is not said to have arrived."""
    engine, run = make_engine(url=tmp_path.as_uri()), make_run(1, [4096])
    finished(engine.submit_store(run))
    gate, target = Gate(engine, "read_cached"), blank(run)
    job = engine.submit_load(target, deadline_s=0.01)
    assert gate.reached.wait(TIMEOUT_S)
    (load,) = engine._state.open_loads
    eventually(lambda: not load.is_open, "its deadline passed")
    assert not job.done, "the buffers were given back under a copy"
    gate.opened.set()
    assert finished(job) == [Reason.IO_ERROR]
    assert bytes(target.pages[0][0]) == bytes(run.pages[0][0])


@pytest.mark.parametrize("url", ["memory", "directory"])
def test_many_pages_and_a_deadline_finish_once(make_engine: Any, tmp_path: Path, url: str) -> None:
    """However many of them one thread takes."""
    place = {} if url == "memory" else {"url": tmp_path.as_uri()}
    engine, run = make_engine(num_connections=4, **place), make_run(1, [100] * 40)
    finished(engine.submit_store(run))
    seen: set[Reason] = set()
    for number in range(100):
        job = engine.submit_load(blank(run), deadline_s=number * 2e-5)
        seen.update(finished(job))  # a second end of a job is an assertion of it
    assert seen == {Reason.OK, Reason.IO_ERROR}
    engine.check_integrity()


def test_true_waits_for_loads_of_what_was_erased(make_engine: Any) -> None:
    """A load names no tenant, so any may be of one."""
    engine, run = make_engine(), make_run(1, [100])
    finished(engine.submit_store(Run(run.keys, run.pages, A)))
    gate = Gate(engine, "get")
    job = engine.submit_load(blank(run))
    assert gate.reached.wait(TIMEOUT_S)
    begun = engine.erase(Erasure(tenant=A))
    eventually(lambda: not engine._state.orders, "it is durable")
    assert not begun.done()
    gate.opened.set()
    assert is_true(begun, TIMEOUT_S)
    assert job.done


class Panic(BaseException):
    """As the library's own: none of ``Exception``."""


@pytest.mark.parametrize("error", [MemoryError(), Panic()], ids=["memory", "library"])
@pytest.mark.parametrize("name", ["page_checksum", "put", "is_page"])
def test_an_internal_error_ends_one_job_alone(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, name: str
) -> None:
    clock, run = Clock(100.0), make_run(1, [99])
    engine = make_engine(num_connections=1, clock=clock)
    assert engine.refresh(TIMEOUT_S)  # or its first pass ends the pause
    if name == "is_page":
        store(engine, run)
    fail_once(monkeypatch, engine._requests if name == "put" else transfers, name, error)
    submit = engine.submit_load if name == "is_page" else engine.submit_store
    assert finished(submit(blank(run))) == [Reason.IO_ERROR]
    assert engine.stats().queued_store_bytes == 0
    assert engine.health is Health.MISS_ONLY
    assert "internal error" in engine.stats().health_reason
    clock.now += 100.0
    assert engine.refresh(TIMEOUT_S), "the bucket answers"
    assert engine.health is Health.RUNNING
    assert finished(engine.submit_store(run))[0] in (Reason.OK, Reason.DUPLICATE)
    assert load(engine, run) == [Reason.OK]
    assert all(thread.is_alive() for thread in engine._workers._threads)


def test_an_owner_that_fails_ends_no_discovery(make_engine: Any) -> None:
    """As one whose disk or memory is full for a moment, when it is told what was erased."""
    run, fails = make_run(1, [100]), [MemoryError(), MemoryError()]
    a, clock = make_engine(), Clock(1000.0)
    b = make_engine(clock=clock)
    assert b.refresh(TIMEOUT_S)

    def told(_: object) -> None:
        if fails:
            raise fails.pop()

    b.report_erased(told)
    assert is_true(a.erase(Erasure.of([b"k" * 32])), TIMEOUT_S)
    assert finished(a.submit_store(run)) == [Reason.OK]
    assert b.refresh(TIMEOUT_S)
    assert b.contains(run.keys) == [True], "it hears of new pages all the same"
    for _ in range(2):
        assert not b._state.seen, "what it stores would count as younger"
        clock.now += 3.0
        b._wake_discovery()
        eventually(lambda: not fails, "it tells again by itself")
    eventually(lambda: b._state.seen)


def test_a_first_pass_that_fails_is_paused(make_engine: Any) -> None:
    clock, seen = Clock(1000.0), list[None]()
    engine = make_engine(clock=clock)
    assert engine.refresh(TIMEOUT_S)

    def fail(*_: object) -> None:
        seen.append(None)
        raise RuntimeError

    engine._requests.each = fail  # type: ignore[method-assign, assignment]
    engine.set_namespace(b"\x22" * 32)
    eventually(lambda: seen, "it looks at the new one")
    assert not engine.refresh(TIMEOUT_S) and not engine.refresh(TIMEOUT_S)
    assert len(seen) == 3, "it spins"
    clock.now += 1.5
    engine._wake_discovery()
    eventually(lambda: len(seen) == 4, "it gave up")


def test_erasures_are_finished_after_internal_errors(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    store(engine, of(A, make_run(1, [4096])))
    fail_once(monkeypatch, engine._requests, "folders", MemoryError())
    assert not is_true(engine.erase(Erasure(tenant=A)), TIMEOUT_S)
    eventually(lambda: not listed(engine, engine._state.layout.pages), "it is not tried again")


def test_an_upload_later_than_closing_ends_nothing_twice(make_engine: Any) -> None:
    engine = make_engine(request_timeout_s=0.1)
    gate = Gate(engine, "put", "/pages/")
    job = engine.submit_store(make_run(1, [100]))
    assert gate.reached.wait(TIMEOUT_S)
    engine.close()
    assert finished(job) == [Reason.CANCELLED]
    gate.opened.set()
    assert engine._workers.join(TIMEOUT_S)
    assert not engine._state.staged_bytes

"""One engine: what it writes, its budgets, and namespaces that change."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kit.clock import Clock
from kit.request_hooks import Gate, listed
from kit.runs import NAMESPACE, make_run, make_soft_run, of, page_data, soft_encoding
from kit.tiers import load, loads, store
from kit.waiting import TIMEOUT_S, finished
from sglang_tiered.storage.base import Reason, Run

A = b"a" * 16


def test_a_page_is_one_object_and_nothing_else(make_engine: Any) -> None:
    engine = make_engine(clocks={"wall_clock": lambda: 1_700_000_000.0})
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


def test_confirming_ends_in_time(make_engine: Any) -> None:
    """Whatever the requests under way wait for."""
    engine, run = make_engine(num_connections=1), make_run(1, [100, 200])
    store(engine, run)
    gate = Gate(engine, "modified", run.keys[1].hex())
    assert engine.confirm(run.keys, 1.0)[1] is False
    gate.opened.set()


def test_pages_over_age_are_found_no_more(make_engine: Any) -> None:
    """From the next look on, not from the next full listing."""
    clock = Clock(time.time())
    engine, run = make_engine(ttl_s=50.0, clocks={"wall_clock": clock}), make_run(1, [100])
    assert finished(engine.submit_store(run)) == [Reason.OK]
    assert engine.refresh(TIMEOUT_S)
    for later, is_found in ((30.0, True), (60.0, False)):
        clock.now += later
        assert engine.refresh(TIMEOUT_S)
        assert engine.contains(run.keys) == [is_found]

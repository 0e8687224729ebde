"""What a collector removes, what it never does, and that runs may be killed, hurried and repeated.

Ages are made by moving the collector's clock, which is the store's; nothing waits for time to pass.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bucket_engines import (
    TIMEOUT_S,
    collect,
    is_held,
    load,
    open_engine,
    opened,
    paths,
    run_of,
    store,
)
from object_proxy import FaultProxy, status

from kit.runs import NAMESPACE
from kit.waiting import eventually
from sglang_tiered.storage.base import Erasure, Reason
from sglang_tiered.storage.bucket.collect import Collector, CollectorSettings
from sglang_tiered.storage.bucket.directory import STAGED
from sglang_tiered.storage.bucket.names import ERASED
from sglang_tiered.storage.bucket.requests import BucketError, Requests
from sglang_tiered.storage.promises import is_true

OK = {Reason.OK}
TENANT, OTHER = b"\x22" * 16, b"\x33" * 16
DAY = 86_400.0
RUN_BYTES = 12_000


def records(engine: Any) -> list[str]:
    return [each.path for chunk in engine._requests.listing(ERASED) for each in chunk]


def test_what_is_over_age_goes_and_is_missed(url: str) -> None:
    with opened(url) as engine, opened(url) as reader:
        assert store(engine, run_of(1)) == OK
        assert reader.refresh(TIMEOUT_S)
        assert collect(engine, DAY - 60, ttl_s=DAY).num_removed == 0
        planned = collect(engine, DAY + 60, ttl_s=DAY, delete=False)
        assert len(paths(engine)) == len(planned.removals) == 4
        report = collect(engine, DAY + 60, ttl_s=DAY)
        assert (report.num_removed, report.removed_bytes) == (4, RUN_BYTES)
        assert [r.path for r in report.removals] == [r.path for r in planned.removals]
        assert not paths(engine)
        assert load(reader, run_of(1)) == {Reason.MISS}, "a reader that still knows of it"
        assert not is_held(reader, run_of(1))
        assert engine.refresh(TIMEOUT_S, full=True)
        assert not any(engine.contains(run_of(1).keys)), "it would never be stored again"


def test_the_cap_takes_only_the_oldest_needed(tmp_path: Path) -> None:
    url, now = tmp_path.as_uri(), [1_700_000_000.0]
    with opened(url, wall_clock=lambda: now[0]) as engine:
        engine._state.skew_s, engine._requests.modified = 0.0, lambda _: None  # type: ignore[method-assign]
        for number in range(6):
            assert store(engine, run_of(number)) == OK
            now[0] += 1500.0  # over some hours
        report = collect(engine, capacity_bytes=3 * RUN_BYTES + 3000)
        assert report.page_bytes == 6 * RUN_BYTES
        assert report.num_removed == 11
        assert engine.refresh(TIMEOUT_S, full=True)
        held = [sum(engine.contains(run_of(number).keys)) for number in range(6)]
        assert held == [0, 0, 1, 4, 4, 4]
        assert collect(engine, capacity_bytes=3 * RUN_BYTES + 3000).num_removed == 0


def test_what_was_erased_goes_and_nothing_else(url: str) -> None:
    """Whoever stored it, and whenever: as when its writer died before it heard of that."""
    mine, theirs = run_of(1, tenant=TENANT), run_of(2, tenant=OTHER)
    with opened(url) as engine, opened(url) as stale:
        assert store(engine, theirs) == OK
        assert is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
        assert is_true(engine.erase(Erasure.of(run_of(3).keys)), TIMEOUT_S)
        assert store(stale, mine, run_of(3)) == OK  # it has not heard
        report = collect(engine, delete=False)
        assert {removal.reason for removal in report.removals} == {"it was erased"}
        assert collect(engine).num_removed == 8
        assert engine.refresh(TIMEOUT_S, full=True)
        assert load(engine, theirs) == OK
        assert len(paths(engine)) == 4


def test_erasures_are_remembered_the_last_for_ever(url: str) -> None:
    with opened(url) as engine:
        for run in (run_of(1), run_of(2)):
            assert is_true(engine.erase(Erasure.of(run.keys)), TIMEOUT_S)
        first, last = records(engine)
        collect(engine, 29 * DAY)
        assert records(engine) == [first, last]
        collect(engine, 31 * DAY)
        assert records(engine) == [last], "numbers would begin anew"
        with opened(url) as fresh:
            assert is_true(fresh.erase(Erasure.of(run_of(3).keys)), TIMEOUT_S)
            assert max(records(fresh)) > last


def test_no_page_outlives_what_erased_it(url: str) -> None:
    """In a namespace that no server uses, and keeps as long as its pages may be used."""
    run, ttl_s = run_of(1), 90 * DAY
    with opened(url, namespace=b"\x66" * 32, ttl_s=ttl_s) as old:
        assert store(old, run) == OK
    with opened(url, ttl_s=ttl_s) as engine:
        for keys in (run.keys, run_of(2).keys):  # the last record stays anyhow
            assert is_true(engine.erase(Erasure.of(keys)), TIMEOUT_S)
        collect(engine, 31 * DAY, ttl_s=ttl_s)
    later = {"wall_clock": lambda: time.time() + 31 * DAY, "ttl_s": ttl_s}
    with opened(url, namespace=b"\x66" * 32, **later) as back:
        assert not any(back.contains(run.keys))


def test_a_record_that_cannot_be_read_deletes_nothing(url: str) -> None:
    with opened(url) as engine:
        assert store(engine, run_of(1)) == OK
        assert is_true(engine.erase(Erasure.of(run_of(2).keys)), TIMEOUT_S)
        engine._requests.put(records(engine)[0], b"nonsense")
        assert collect(engine).num_unreadable == 1
        assert len(paths(engine)) == 4
        with opened(url) as fresh:
            assert not any(fresh.contains(run_of(1).keys)), "rather missed than wrong"
            assert store(fresh, run_of(3)) == OK
            assert load(fresh, run_of(3)) == OK


def _marked_lately(namespace: bytes) -> Callable[[str], float | None]:
    return lambda path: time.time() + 7 * DAY if namespace.hex() in path else None


def test_namespaces_that_nobody_uses_go(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade, or with other weights. One that is read alone is collected, so it stays."""
    old, used, new = (bytes([number]) * 32 for number in (1, 2, 3))
    for namespace in (old, used):
        with opened(url, namespace=namespace) as engine:
            assert store(engine, run_of(1)) == OK
    with opened(url, namespace=new) as engine, opened(url, namespace=used) as other:
        assert store(engine, run_of(1)) == OK
        assert collect(engine, 6 * DAY).num_removed == 0
        assert collect(engine, 29 * DAY, ttl_s=30 * DAY).num_removed == 0
        monkeypatch.setattr(engine._requests, "modified", _marked_lately(used))
        report = collect(engine, 7 * DAY + 60)
        assert {removal.kind for removal in report.removals} == {"old namespace"}
        assert all(old.hex() in removal.path for removal in report.removals)
        assert len(paths(engine)) == len(paths(other)) == 4
        with opened(url, namespace=old) as again:
            assert not paths(again)


def test_only_stale_partial_files_go(tmp_path: Path) -> None:
    with opened(tmp_path.as_uri()) as engine:
        assert store(engine, run_of(1)) == OK
        folder = (tmp_path / paths(engine)[0]).parent
        for name in (f"x{STAGED}1", "notes.txt", "0" * 64):
            (folder / name).write_bytes(b"?")
        for other in (tmp_path / ERASED, folder.parents[1] / "pins"):
            other.mkdir(exist_ok=True)
            (other / f"x{STAGED}1").write_bytes(b"?")
        assert collect(engine, 5 * 3600.0).num_removed == 0
        report = collect(engine, 7 * 3600.0)
        assert [removal.kind for removal in report.removals] == ["staged file"] * 3
        assert report.num_foreign == 2
        assert sorted(os.listdir(folder))[-1] == "notes.txt"


def test_a_run_over_budget_resumes_next_time(url: str) -> None:
    with opened(url) as engine:
        assert store(engine, *(run_of(number) for number in range(3))) == OK
        collector = Collector(
            engine._requests, CollectorSettings(ttl_s=DAY), clock=lambda: time.time() + 2 * DAY
        )
        for left in (7, 2, 0):
            report = collector.run_once(NAMESPACE, 5)
            assert report.is_complete == (left == 0)
            assert len(paths(engine)) == left


def test_a_failed_run_raises_and_can_be_finished(s3_url: str, proxy: FaultProxy) -> None:
    with opened(s3_url) as engine:
        assert store(engine, run_of(1)) == OK
        for kind in ("list", "delete", "put"):
            proxy.add(kind, "", status(403, "AccessDenied"))
            with pytest.raises(BucketError, match=f"{kind} was refused"):
                collect(engine, 2 * DAY, ttl_s=DAY)
            proxy.clear()
        assert collect(engine, 2 * DAY, ttl_s=DAY).num_removed == 4


def test_collectors_at_once_do_each_others_work(url: str) -> None:
    with opened(url) as engine:
        runs = [run_of(number) for number in range(4)]
        assert store(engine, *runs) == OK
        threads = [
            threading.Thread(target=collect, args=(engine, 2 * DAY), kwargs={"ttl_s": DAY})
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert not paths(engine)


def test_servers_take_turns_and_survive_failures(
    s3_url: str, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    requests = Requests(s3_url)
    eager, patient = (
        Collector(requests, CollectorSettings(interval_s=interval_s)) for interval_s in (0.01, 600)
    )
    assert patient._is_due(NAMESPACE)
    rule = proxy.add("list", "", status(403, "AccessDenied"))
    stop = threading.Event()
    thread = threading.Thread(target=eager.run_in_background, args=(stop, lambda: NAMESPACE))
    thread.start()
    try:
        eventually(lambda: rule.num_hit > 2, "it gave up")
        proxy.clear()
        eventually(lambda: eager.last is not None)
        assert not patient._is_due(NAMESPACE), "another did it just now"
    finally:
        stop.set()
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert len([each for each in caplog.records if "collection failed" in each.message]) == 1


def test_a_collector_goes_on_until_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much was stored since its last turn, which may be ten minutes ago."""
    monkeypatch.setattr("sglang_tiered.storage.bucket.collect._FIRST_RUN_S", 0.01)
    monkeypatch.setattr("sglang_tiered.storage.bucket.collect.BUDGET", 5)
    engine = open_engine(tmp_path.as_uri(), capacity_bytes=RUN_BYTES)
    try:
        assert store(engine, *(run_of(number) for number in range(5))) == OK
        engine.start_collecting()
        eventually(lambda: len(paths(engine)) == 4, "the cap is not held")
        eventually(lambda: engine.object_stats().listed_bytes is not None)
        assert engine._collector is not None
        puts = engine._collector.requests.requests["put"]
        for _ in range(5):
            assert engine.refresh(TIMEOUT_S)
        assert engine._collector.requests.requests["put"] == puts, "it never rests"
    finally:
        engine.close()

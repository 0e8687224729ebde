"""What a collector removes, what it never does, and that runs may be killed, hurried and repeated.

Ages are made by moving the collector's clock, which is the store's; nothing waits for time to pass.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bucket_engines import collect, load, opened, paths, run_of, store
from object_proxy import FaultProxy, status

from kit.request_hooks import listed
from kit.runs import NAMESPACE
from kit.waiting import TIMEOUT_S, eventually
from sglang_tiered.storage.base import Erasure, Health, PinRefusal, Reason, Run
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.bucket.collect import Collector
from sglang_tiered.storage.bucket.directory import STAGED
from sglang_tiered.storage.bucket.names import ERASED, Layout
from sglang_tiered.storage.bucket.requests import BucketError, Requests
from sglang_tiered.storage.promises import is_true

OK = {Reason.OK}
TENANT, OTHER = b"\x22" * 16, b"\x33" * 16
DAY = 86_400.0
RUN_BYTES = 12_000


def records(engine: BucketEngine) -> list[str]:
    return listed(engine, ERASED)


def test_what_is_over_age_goes_and_is_missed(url: str) -> None:
    with opened(url) as engine, opened(url) as reader:
        assert store(engine, run_of(1)) == OK
        assert reader.refresh(TIMEOUT_S)
        assert collect(engine, DAY - 60, ttl_s=DAY).num_removed == 0
        planned = collect(engine, DAY + 60, ttl_s=DAY, delete=False)
        assert len(paths(engine)) == len(planned.removals) == 4
        assert collect(engine, DAY + 60, ttl_s=DAY).num_removed == 4
        assert not paths(engine)
        assert load(reader, run_of(1)) == {Reason.MISS}, "a reader that still knows of it"
        assert engine.refresh(TIMEOUT_S, full=True)
        assert not any(engine.contains(run_of(1).keys)), "it would never be stored again"


def test_what_was_erased_goes_and_nothing_else(url: str) -> None:
    """Whoever stored it, and whenever: as when its writer died before it heard of that. It counts
    once for the cap."""
    mine, theirs = run_of(1, tenant=TENANT), run_of(2, tenant=OTHER)
    with opened(url) as engine, opened(url) as stale:
        assert store(engine, theirs) == OK
        assert is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
        assert is_true(engine.erase(Erasure.of(run_of(3).keys)), TIMEOUT_S)
        assert store(stale, mine, run_of(3)) == OK  # it has not heard
        report = collect(engine, delete=False)
        assert {removal.reason for removal in report.removals} == {"it was erased"}
        removals = collect(engine, delete=False, capacity_bytes=RUN_BYTES // 2).removals
        assert len({removal.path for removal in removals}) == len(removals) == 8 + 2
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
        (folder / "notes.txt").write_bytes(b"?")
        for place in (folder, tmp_path / ERASED, folder.parents[1] / "pins"):
            place.mkdir(exist_ok=True)
            (place / f"x{STAGED}1").write_bytes(b"?")
        for name in ("clock", "collected"):
            (folder.parents[1] / f"{name}{STAGED}1").write_bytes(b"?")
        assert collect(engine, 5 * 3600.0).num_removed == 0
        report = collect(engine, 7 * 3600.0)
        assert [removal.kind for removal in report.removals] == ["staged file"] * 5
        assert sorted(os.listdir(folder))[-1] == "notes.txt"


def test_a_collector_goes_on_until_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much was stored since its last turn; the oldest go."""
    monkeypatch.setattr("sglang_tiered.storage.bucket.collect._FIRST_RUN_S", 0.01)
    monkeypatch.setattr("sglang_tiered.storage.bucket.collect.BUDGET", 5)
    now = [time.time()]
    with opened(tmp_path.as_uri(), capacity_bytes=RUN_BYTES, wall_clock=lambda: now[0]) as engine:
        engine._state.skew_s, engine._requests.modified = 0.0, lambda _: None  # type: ignore[method-assign]
        for number in range(5):
            assert store(engine, run_of(number)) == OK
            now[0] += 1500.0  # over some hours
        engine.start_collecting()
        eventually(lambda: len(paths(engine)) == 4, "the cap is not held")
        assert engine.refresh(TIMEOUT_S, full=True)
        assert all(engine.contains(run_of(4).keys))


def test_refused_deletes_of_the_collector_are_told(
    s3_url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or nobody hears why the bucket outgrows its cap. And they are tried again."""
    for name in ("_FIRST_RUN_S", "INTERVAL_S"):
        monkeypatch.setattr(f"sglang_tiered.storage.bucket.collect.{name}", 0.01)
    proxy.add("POST", "delete", status(403, "AccessDenied"))
    with opened(s3_url, capacity_bytes=RUN_BYTES) as engine:
        assert store(engine, run_of(1), run_of(2)) == OK
        engine.start_collecting()
        eventually(lambda: engine.object_stats().refused["delete"])
        assert engine.stats().health is Health.RUNNING
        proxy.clear()
        eventually(lambda: len(paths(engine)) == 4, "it gave up")


def test_a_collector_without_rights_stops_no_loads(s3_url: str, proxy: FaultProxy) -> None:
    """Its requests are the engine's, and so is their breaker."""
    with opened(s3_url) as engine:
        assert store(engine, run_of(1), run_of(2)) == OK
        for method, of in (("POST", "delete"), ("GET", "delimiter"), ("PUT", "")):
            proxy.add(method, of, status(403, "AccessDenied"))
            for _ in range(4):
                with pytest.raises(BucketError):
                    Collector(engine._requests, capacity_bytes=1).run_once(
                        NAMESPACE, delete=method != "GET"
                    )
            assert engine.stats().health is Health.RUNNING
        assert all(engine.contains(run_of(1).keys))


def pinned(engine: BucketEngine, name: str, run: Run, **options: Any) -> None:
    outcome = engine.pin(name, run.keys, **options)
    assert not isinstance(outcome, PinRefusal), outcome.why
    assert is_true(outcome, TIMEOUT_S)


def names(engine: BucketEngine) -> set[str]:
    return {info.name for info in engine.pins()}


def fresh(engine: BucketEngine) -> BucketEngine:
    assert engine.refresh(TIMEOUT_S, full=True)
    return engine


def test_a_pin_beyond_the_share_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path.as_uri(), capacity_bytes=8 * RUN_BYTES) as engine:
        runs = [run_of(number) for number in range(6)]
        assert store(engine, *runs) == OK
        for number in range(4):
            pinned(engine, str(number), runs[number])
        for name, refused in (("4", True), ("0", False)):  # in the place of one there is room
            outcome = engine.pin(name, runs[4].keys)
            assert isinstance(outcome, PinRefusal) == refused
        assert engine.pinned_bytes <= engine.pin_bound_bytes == 4 * RUN_BYTES


def test_a_pin_holds_while_the_bucket_refuses(s3_url: str, proxy: FaultProxy) -> None:
    """It says that it is not durable, and is written later."""
    with opened(s3_url) as first, opened(s3_url) as second:
        assert store(first, run_of(1)) == OK
        proxy.add("put", "/pins/", status(503))
        begun = first.pin("a", run_of(1).keys)
        assert not isinstance(begun, PinRefusal) and not is_true(begun, TIMEOUT_S)
        assert names(first) == {"a"} and names(fresh(second)) == set()
        proxy.clear()
        eventually(lambda: names(fresh(second)) == {"a"})


@pytest.mark.parametrize("is_stored_first", [True, False])
def test_a_pin_outlives_cap_and_age_everywhere(url: str, is_stored_first: bool) -> None:
    kept, gone = run_of(0), run_of(1, num_pages=8)
    with opened(url, ttl_s=DAY) as first, opened(url, ttl_s=DAY) as second:
        if is_stored_first:
            assert store(first, kept) == OK
        pinned(first, "a", kept, data=b"note")
        assert store(second, gone) == OK
        if not is_stored_first:
            assert store(first, kept) == OK
        assert [(i.name, i.num_pages, i.data) for i in first.pins()] == [("a", 4, b"note")]
        size = collect(first).page_bytes * 2 // 3
        assert names(fresh(second)) == {"a"}
        for settings in ({"capacity_bytes": size}, {"ttl_s": DAY}):
            collect(second, 2 * DAY, **settings)
        assert len(paths(first)) == 4
        later = {"wall_clock": lambda: time.time() + 2 * DAY, "ttl_s": DAY}
        with opened(url, **later) as third:
            for engine in (first, second, third):
                assert load(fresh(engine), kept) == OK
                assert load(engine, gone) == {Reason.MISS}
            assert is_true(third.unpin("a"), TIMEOUT_S)
            assert names(fresh(first)) == set()
            collect(first, 2 * DAY, ttl_s=DAY)
            assert load(fresh(third), kept) == {Reason.MISS}


def test_a_pin_expires_everywhere(tmp_path: Path) -> None:
    url, now = tmp_path.as_uri(), [time.time()]
    run = run_of(1)
    clock = {"wall_clock": lambda: now[0]}
    with opened(url, **clock) as first, opened(url, **clock) as second:
        assert store(first, run) == OK
        pinned(first, "a", run, until_s=now[0] + 100)
        assert fresh(second).has_pin("a")
        now[0] += 101
        assert not first.has_pin("a")
        assert names(second) == names(first) == set()
        collect(second, 2 * DAY, ttl_s=DAY)
        assert paths(first, "pins") == paths(first) == []


@pytest.mark.parametrize(("later_s", "runs"), [(60.0, False), (660.0, True), (-60.0, True)])
def test_servers_take_turns(tmp_path: Path, later_s: float, runs: bool) -> None:
    """A marker from ahead of a clock stops no collector for ever."""
    requests = Requests(tmp_path.as_uri())
    requests.put(Layout(NAMESPACE).collected, b"collected")
    collector = Collector(requests, clock=lambda: time.time() + later_s)
    collector._take_turn(NAMESPACE)
    assert (collector.last is not None) == runs

"""Forgotten pages in a real store: kills, servers that join late, and the collector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from object_bucket import Bucket
from object_child import ObjectChild, child_run
from object_engines import TIMEOUT_S, load, opened, run_of, store
from object_proxy import hang, status

from kit.runs import NAMESPACE
from kit.waiting import eventually
from sglang_tiered.storage.base import Erasure, Reason
from sglang_tiered.storage.object import old_tombstones
from sglang_tiered.storage.object.collection import store_clock
from sglang_tiered.storage.object.collector import Collector, CollectorReport, CollectorSettings
from sglang_tiered.storage.promises import is_true

if TYPE_CHECKING:
    from pathlib import Path

    from object_proxy import FaultProxy

OK = {Reason.OK}
DAY = 86_400.0
SETTINGS = CollectorSettings(grace_s=60.0, orphan_grace_s=3600.0, purge_keep_s=DAY)


@pytest.fixture(params=["directory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return tmp_path.as_uri()
    found: str = request.getfixturevalue("s3_url")
    return found


def collect(bucket: Bucket, after_s: float, **changes: float) -> CollectorReport:
    settings = msgspec.structs.replace(SETTINGS, **changes)
    now = store_clock(bucket.client, bucket.layout) + after_s
    return Collector(bucket.client, NAMESPACE, settings, clock=lambda: now).run_once()


def test_a_forget_reaches_running_and_starting_servers(url: str) -> None:
    run = run_of(1)
    with opened(url) as first, opened(url) as second:
        assert store(first, run) == OK
        assert second.refresh(TIMEOUT_S)
        assert is_true(first.erase(Erasure.of(run.keys[2:])), TIMEOUT_S)
        assert second.refresh(TIMEOUT_S)
        with opened(url) as third:
            for engine in (first, second, third):
                assert engine.contains(run.keys) == [True, True, False, False]
                assert load(engine, run) == {Reason.OK, Reason.MISS}
            assert store(third, run) <= {Reason.OK, Reason.DUPLICATE}
            for engine in (first, second):
                assert engine.refresh(TIMEOUT_S)
                assert load(engine, run) == OK


def test_a_forget_without_the_bucket_is_not_durable(s3_url: str, proxy: FaultProxy) -> None:
    run = run_of(1)
    with opened(s3_url) as first, opened(s3_url) as second:
        assert store(first, run) == OK
        proxy.add("put", "/purges/", status(503))
        assert not is_true(first.erase(Erasure.of(run.keys)), TIMEOUT_S)
        assert not any(first.contains(run.keys))
        proxy.clear()
        assert is_true(first.erase(Erasure.of(run.keys)), TIMEOUT_S)
        assert second.refresh(TIMEOUT_S)
        assert not any(second.contains(run.keys))


def test_a_killed_writer_leaves_nothing_forgotten(tmp_path: Path) -> None:
    """What it had stored is forgotten while it goes on; it is killed before it can know."""
    url = tmp_path.as_uri()
    keys = [key for number in range(2) for key in child_run(number).keys]
    with ObjectChild(url, 0, "paced") as child, opened(url) as engine:
        assert child.line() == "open"
        for _ in range(8):
            child.go_on()
        eventually(lambda: engine.refresh(TIMEOUT_S) and all(engine.contains(keys)))
        assert is_true(engine.erase(Erasure.of(keys)), TIMEOUT_S)
        for _ in range(8):
            child.go_on()
        late = child_run(8).keys
        eventually(lambda: engine.refresh(TIMEOUT_S) and all(engine.contains(late)))
        child.kill()
        assert engine.refresh(TIMEOUT_S, full=True)
        assert not any(engine.contains(keys))
    with opened(url) as fresh:
        assert not any(fresh.contains(keys))
        assert all(fresh.contains(late)), "what is not meant stays"


def test_a_tombstone_stays_while_an_object_needs_it(tmp_path: Path) -> None:
    bucket = Bucket.in_directory(tmp_path)
    needed, dead = bucket.make(), bucket.make()
    bound = bucket.opened_ms
    later = bucket.make()
    keys = (bucket.keys_of(needed)[0], *bucket.keys_of(dead), *bucket.keys_of(later))
    tombstone = bucket.forget(keys, bound)
    other = bucket.forget((b"x" * 32,), bound)  # of nothing that is left
    collect(bucket, DAY / 2)
    assert bucket.purges() == {tombstone, other}
    assert bucket.objects() == {needed, dead, later}
    collect(bucket, 2 * DAY)
    assert bucket.objects() == bucket.manifests() == {needed, later}
    assert bucket.purges() == {tombstone}, "a page would be served again"
    collect(bucket, 3 * DAY, ttl_s=DAY)
    collect(bucket, 3 * DAY + 100, ttl_s=DAY)
    assert bucket.objects() == bucket.purges() == set()


def test_an_object_still_unannounced_keeps_tombstones(tmp_path: Path) -> None:
    bucket = Bucket.in_directory(tmp_path)
    bucket.make(announced=False)
    tombstone = bucket.forget((b"x" * 32,), bucket.opened_ms)
    collect(bucket, 2 * DAY, orphan_grace_s=3 * DAY)
    assert bucket.purges() == {tombstone}
    collect(bucket, 4 * DAY)
    collect(bucket, 4 * DAY)
    assert bucket.purges() == set()


def test_with_too_many_older_objects_tombstones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_tombstones, "_MAX_READ", 2)
    bucket = Bucket.in_directory(tmp_path)
    for _ in range(3):
        bucket.make()
    tombstone = bucket.forget((b"x" * 32,), bucket.opened_ms)
    report = collect(bucket, 2 * DAY)
    assert bucket.purges() == {tombstone}
    assert report.requests.get("get", 0) <= 1, "manifests were read for nothing"
    size = report.live_bytes // 3
    collect(bucket, 2 * DAY, capacity_bytes=2 * size)
    collect(bucket, 2 * DAY, capacity_bytes=2 * size)
    assert bucket.purges() == set()


def test_a_collector_beside_engines_hides_nothing_else(url: str) -> None:
    run, other = run_of(1), run_of(2)
    with opened(url) as first, opened(url) as second:
        assert store(first, run, other) == OK
        assert is_true(first.erase(Erasure.of(run.keys[:1])), TIMEOUT_S)
        collector = Collector(second._client, second.namespace, SETTINGS)
        report = collector.run_once()
        assert report.num_removed == 0, "a tombstone of pages is no purge of everyone"
        assert second.refresh(TIMEOUT_S, full=True)
        assert load(second, other) == OK
        assert second.contains(run.keys) == [False, True, True, True]


def test_a_hanging_bucket_does_not_hold_up_hiding(s3_url: str, proxy: FaultProxy) -> None:
    run = run_of(1)
    with opened(s3_url, request_timeout_s=0.5) as engine:
        assert store(engine, run) == OK
        proxy.add("put", "/purges/", hang())
        begun = engine.erase(Erasure.of(run.keys))
        assert not any(engine.contains(run.keys))
        proxy.clear()
        eventually(begun.done, "the forget never ended")

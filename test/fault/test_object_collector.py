"""The collector alone with a bucket: what it removes, what it never does, and how it is killed.

Ages are made by moving the collector's clock, which is the store's; nothing waits for time to pass.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
from object_bucket import Bucket
from object_proxy import hide, replay, status
from object_server import s3_environment

from kit.runs import NAMESPACE
from sglang_tiered.storage.object.collection import store_clock
from sglang_tiered.storage.object.collector import Collector, CollectorReport, CollectorSettings
from sglang_tiered.storage.object.failures import RequestError
from sglang_tiered.storage.object.listings import Entry, IdFilter, Oldest
from sglang_tiered.storage.object.names import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from object_proxy import FaultProxy
    from object_server import ObjectServer

    from sglang_tiered.storage.object.client import ObjectClient

HOUR = 3600.0
SETTINGS = CollectorSettings(grace_s=60.0, orphan_grace_s=HOUR, purge_keep_s=24 * HOUR)
TENANT, OTHER = b"\x22" * 16, b"\x33" * 16


@pytest.fixture(params=["directory", "s3"])
def bucket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bucket:
    if request.param == "directory":
        return Bucket.in_directory(tmp_path)
    server: ObjectServer = request.getfixturevalue("object_server")
    return s3_bucket(server, server.url, monkeypatch)


@pytest.fixture
def mistreated(
    object_server: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> Bucket:
    """A bucket whose collector comes by way of the proxy."""
    return s3_bucket(object_server, proxy.url, monkeypatch)


def s3_bucket(server: ObjectServer, url: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in s3_environment(url).items():
        monkeypatch.setenv(name, value)
    return Bucket.in_s3(server, server.make_bucket())


def collector(bucket: Bucket, *, after_s: float = 0.0, **changes: float) -> Collector:
    """One that runs ``after_s`` from now, by the store's clock."""
    settings = msgspec.structs.replace(SETTINGS, **changes)
    return Collector(
        bucket.client,
        NAMESPACE,
        settings,
        clock=lambda: store_clock(bucket.client, bucket.layout) + after_s,
    )


def collect(bucket: Bucket, *, after_s: float = 0.0, **changes: float) -> CollectorReport:
    return collector(bucket, after_s=after_s, **changes).run_once()


def test_without_a_limit_nothing_goes_however_old(bucket: Bucket) -> None:
    ids = {bucket.make() for _ in range(3)}
    report = collect(bucket, after_s=1e8)
    assert (bucket.objects(), bucket.manifests()) == (ids, ids)
    assert (report.num_objects, report.num_manifests, report.num_removed) == (3, 3, 0)
    assert report.live_bytes == report.object_bytes > 6000


def test_expired_objects_outlive_their_manifests_by_the_grace(
    bucket: Bucket,
) -> None:
    old = bucket.make()
    report = collect(bucket, after_s=HOUR + 10, ttl_s=HOUR)
    assert (bucket.objects(), bucket.manifests()) == ({old}, set())
    assert (report.num_buried, report.num_removed) == (1, 0)
    collect(bucket, after_s=30, ttl_s=HOUR)
    assert bucket.objects() == {old}, "its grace is not over"
    report = collect(bucket, after_s=70, ttl_s=HOUR)
    assert bucket.objects() == set()
    assert report.num_removed == 1
    assert bucket.rest() == {f"{bucket.layout.folder}/collected/last"}


def test_what_is_not_too_old_stays(bucket: Bucket) -> None:
    bucket.make()
    collect(bucket, after_s=HOUR - 10, ttl_s=HOUR)
    assert len(bucket.manifests()) == 1


def test_the_byte_cap_takes_only_the_oldest_needed(bucket: Bucket) -> None:
    ids = [bucket.make(page_bytes=5000) for _ in range(6)]
    size = collect(bucket).live_bytes // 6
    for _ in range(3):  # again: what waits for its grace must not count
        collect(bucket, capacity_bytes=4 * size)
        assert bucket.manifests() == set(ids[2:])
    collect(bucket, after_s=70, capacity_bytes=4 * size)
    assert bucket.objects() == set(ids[2:])


def test_two_collectors_at_once_do_not_remove_twice(bucket: Bucket) -> None:
    ids = [bucket.make(page_bytes=5000) for _ in range(12)]
    size = collect(bucket).live_bytes // 12
    threads = [
        threading.Thread(target=collect, args=(bucket,), kwargs={"capacity_bytes": 8 * size})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert bucket.manifests() == set(ids[4:])


def test_a_fresh_upload_is_no_orphan(bucket: Bucket) -> None:
    uploaded = bucket.make(announced=False)
    report = collect(bucket, after_s=HOUR - 10, capacity_bytes=1, ttl_s=1.0)
    assert bucket.objects() == {uploaded}
    assert report.num_orphans == 1


def test_an_orphan_goes_after_the_longer_grace(bucket: Bucket) -> None:
    bucket.make(announced=False)
    kept = bucket.make()
    collect(bucket, after_s=HOUR + 10)
    assert bucket.objects() == bucket.manifests() == {kept}


def test_a_manifest_without_object_goes_after_the_grace(bucket: Bucket) -> None:
    kept = bucket.make()
    lonely = bucket.make(uploaded=False)
    collect(bucket, after_s=30)
    assert bucket.manifests() == {kept, lonely}
    collect(bucket, after_s=70)
    assert bucket.objects() == bucket.manifests() == {kept}


def test_a_purge_removes_only_its_tenants_older_objects(bucket: Bucket) -> None:
    bucket.make(tenant=TENANT)
    others = {bucket.make(tenant=OTHER), bucket.make()}
    purge = bucket.purge(TENANT, bucket.opened_ms)
    later = bucket.make(tenant=TENANT)
    collect(bucket)
    assert bucket.objects() == bucket.manifests() == {*others, later}
    assert bucket.purges() == {purge}


def test_a_purge_of_everyone(bucket: Bucket) -> None:
    for tenant in (TENANT, OTHER, bytes(16)):
        bucket.make(tenant=tenant)
    bucket.purge(None, bucket.opened_ms)
    later = bucket.make()
    collect(bucket)
    assert bucket.objects() == bucket.manifests() == {later}


def test_a_purge_outlives_the_objects_it_covers(bucket: Bucket) -> None:
    purge = bucket.purge(TENANT, bucket.opened_ms + 10)
    collect(bucket, after_s=23 * HOUR)
    assert bucket.purges() == {purge}
    bucket.make(tenant=TENANT, announced=False)
    collect(bucket, after_s=25 * HOUR, orphan_grace_s=30 * HOUR)
    assert bucket.purges() == {purge}, "an object of it may still be announced"
    collect(bucket, after_s=25 * HOUR)
    collect(bucket, after_s=25 * HOUR)
    assert (bucket.purges(), bucket.objects()) == (set(), set())


def test_the_byte_cap_ignores_purged_objects(bucket: Bucket) -> None:
    bucket.make(tenant=TENANT, page_bytes=50_000)
    kept = {bucket.make(page_bytes=5000) for _ in range(3)}
    bucket.purge(TENANT, bucket.opened_ms)
    collect(bucket, capacity_bytes=60_000)
    assert bucket.manifests() == kept


def test_a_dry_run_plans_alike_and_changes_nothing(bucket: Bucket) -> None:
    for _ in range(3):
        bucket.make()
    bucket.make(announced=False)
    bucket.make(uploaded=False)
    before = bucket.objects(), bucket.manifests(), bucket.rest()
    now = store_clock(bucket.client, bucket.layout) + 2 * HOUR
    settings = CollectorSettings(ttl_s=HOUR, grace_s=60, orphan_grace_s=HOUR)
    dry = Collector(bucket.client, NAMESPACE, settings, clock=lambda: now)
    planned = dry.run_once(delete=False).removals
    assert (bucket.objects(), bucket.manifests(), bucket.rest()) == before
    done = dry.run_once().removals
    assert [(r.path, r.reason) for r in planned] == [(r.path, r.reason) for r in done]
    assert not any(r.is_done for r in planned)
    assert all(r.is_done for r in done)


def test_a_run_over_budget_resumes_next_time(bucket: Bucket) -> None:
    ids = [bucket.make() for _ in range(5)]
    old = collector(bucket, after_s=2 * HOUR, ttl_s=HOUR)
    assert old.run_once(2).is_complete is False
    assert bucket.manifests() == set(ids[2:]), "the oldest first"
    while bucket.objects():
        old.run_once(2)
    assert bucket.manifests() == set()


def test_names_that_are_not_ours_stay(bucket: Bucket) -> None:
    paths = [
        f"{bucket.layout.folder}/{folder}/{name}"
        for folder in ("objects", "manifests", "purges", "graves")
        for name in ("README", "018bcfe56800-DEADBEEF-000007-276d2001", "a/018b")
    ]
    for path in paths:
        bucket.store.put(path, b"mine")
    report = collect(bucket, after_s=1e8, ttl_s=1.0, capacity_bytes=1)
    assert report.num_foreign == len(paths)
    for path in paths:
        assert bucket.store.head(path)["size"] == 4


def test_another_namespace_stays(bucket: Bucket) -> None:
    other = Bucket(bucket.store, bucket.client, layout=Layout(b"\x44" * 32))
    kept = other.make()
    collect(bucket, after_s=1e8, ttl_s=1.0, capacity_bytes=1)
    assert other.objects() == other.manifests() == {kept}


def test_only_stale_partial_files_go(tmp_path: Path) -> None:
    bucket = Bucket.in_directory(tmp_path)
    kept = bucket.make()
    staged = tmp_path / bucket.layout.objects / (kept[:-1] + "f#1")
    foreign = tmp_path / bucket.layout.objects / "notes#1"
    for file in (staged, foreign):
        file.write_bytes(b"half")
    collect(bucket, after_s=HOUR - 10)
    assert staged.exists()
    collect(bucket, after_s=HOUR + 10)
    assert not staged.exists()
    assert foreign.exists()
    assert bucket.objects() == {kept}


# -- killed anywhere ----------------------------------------------------------------------------


class _Killed(Exception):
    pass


class _Dying:
    """A client that ends its user at the n-th change, before or after it is done."""

    def __init__(self, client: ObjectClient, at: int, *, done: bool) -> None:
        self._client, self._left, self._done = client, at, done

    def __getattr__(self, name: str) -> object:
        method: Callable[..., object] = getattr(self._client, name)
        if name not in ("put", "delete"):
            return method

        def change(*arguments: object, **options: object) -> object:
            self._left -= 1
            if self._left == 0:
                if self._done:
                    method(*arguments, **options)
                raise _Killed
            return method(*arguments, **options)

        return change


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_killed_run_is_finished_by_the_next(tmp_path: Path, done: bool) -> None:
    for at in range(1, 100):
        bucket = Bucket.in_directory(tmp_path / f"{at}")
        doomed = {bucket.make(), bucket.make()}
        bucket.make(tenant=TENANT)
        bucket.make(announced=False)
        bucket.make(uploaded=False)
        bucket.purge(TENANT, bucket.opened_ms)
        settings = CollectorSettings(ttl_s=HOUR, grace_s=60, orphan_grace_s=HOUR)
        now = store_clock(bucket.client, bucket.layout) + 2 * HOUR
        dying: ObjectClient = _Dying(bucket.client, at, done=done)  # type: ignore[assignment]
        try:
            Collector(dying, NAMESPACE, settings, clock=lambda now=now: now).run_once()
        except _Killed:
            assert bucket.manifests() - doomed or bucket.objects() >= bucket.manifests()
        else:
            assert at > 8, "there were more requests than that"
            return
        for hours in (2, 5):
            later = now + (hours - 2) * HOUR
            Collector(bucket.client, NAMESPACE, settings, clock=lambda t=later: t).run_once()
        assert (bucket.objects(), bucket.manifests()) == (set(), set()), f"killed at {at}"
    raise AssertionError("it never came to an end")


# -- a store that misbehaves --------------------------------------------------------------------


def test_a_lagging_listing_splits_no_object_from_manifest(
    mistreated: Bucket, proxy: FaultProxy
) -> None:
    ids = {mistreated.make() for _ in range(4)}
    victim = sorted(ids)[1]
    for folder in ("manifests", "objects"):
        proxy.clear()
        proxy.add("list", folder, hide(victim))
        collect(mistreated, after_s=100 * HOUR)
        proxy.clear()
        assert mistreated.objects() == mistreated.manifests() == ids


def test_a_listing_of_long_ago_does_no_harm(mistreated: Bucket, proxy: FaultProxy) -> None:
    old = {mistreated.make() for _ in range(3)}
    proxy.add("list", "manifests", replay(manifests := []))
    proxy.add("list", "objects", replay(objects := []))
    collect(mistreated)
    assert manifests
    assert objects
    for object_id in old:
        mistreated.store.delete(mistreated.layout.manifest(object_id))
        mistreated.store.delete(mistreated.layout.object(object_id))
    fresh = {mistreated.make() for _ in range(3)}
    size = mistreated.store.head(mistreated.layout.object(min(fresh)))["size"]
    collect(mistreated, after_s=100 * HOUR, capacity_bytes=3 * size)
    proxy.clear()
    assert mistreated.objects() == mistreated.manifests() == fresh


def test_a_failed_run_raises_and_can_be_finished(mistreated: Bucket, proxy: FaultProxy) -> None:
    for _ in range(3):
        mistreated.make()
    proxy.add("delete", "", status(503, "SlowDown"), skip=2)  # the clock, one manifest
    with pytest.raises(RequestError):
        collect(mistreated, after_s=2 * HOUR, ttl_s=HOUR)
    proxy.clear()
    collect(mistreated, after_s=2 * HOUR, ttl_s=HOUR)
    collect(mistreated, after_s=4 * HOUR, ttl_s=HOUR)
    assert (mistreated.objects(), mistreated.manifests()) == (set(), set())


# -- in the background --------------------------------------------------------------------------


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_servers_take_turns(bucket: Bucket) -> None:
    assert collector(bucket).is_due()
    collect(bucket)
    assert not collector(bucket).is_due()
    assert collector(bucket, after_s=700).is_due()


def test_the_background_collector_survives_failures_and_stops(
    mistreated: Bucket, proxy: FaultProxy, stop: threading.Event
) -> None:
    mistreated.make()
    rule = proxy.add("list", "manifests", status(500), count=2)
    ran, failures = threading.Event(), []
    runner = collector(mistreated, after_s=2 * HOUR, ttl_s=HOUR, interval_s=0.02)
    thread = threading.Thread(
        target=runner.run_in_background,
        args=(stop,),
        kwargs={"ran": lambda _: ran.set(), "failed": failures.append},
    )
    thread.start()
    assert ran.wait(20)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert (rule.num_hit, len(failures)) == (2, 2)
    assert mistreated.manifests() == set()


def test_told_to_stop_a_run_ends_between_requests(bucket: Bucket, stop: threading.Event) -> None:
    for _ in range(3):
        bucket.make()
    stop.set()
    report = collector(bucket, after_s=2 * HOUR, ttl_s=HOUR).run_once(stop=stop)
    assert not report.is_complete
    assert len(bucket.manifests()) == 3


# -- bounded memory -----------------------------------------------------------------------------


def test_the_filter_never_forgets_nor_grows() -> None:
    seen = IdFilter(1 << 14)
    for number in range(5000):
        seen.add(f"{number:012x}")
    assert all(f"{number:012x}" in seen for number in range(5000))
    wrong = sum(f"x{number}" in seen for number in range(5000))
    assert wrong < 50
    assert len(seen._bits) == 1 << 14


def test_the_oldest_are_found_in_any_order() -> None:
    oldest = Oldest(10)
    for number in range(1000):
        age = number * 7919 % 1000
        oldest.add(Entry(-age, f"{age}", 1))
        assert len(oldest._kept) <= 20
    assert [entry.name for entry in oldest.take()] == [f"{age}" for age in range(999, 989, -1)]

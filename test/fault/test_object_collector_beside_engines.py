"""The collector beside engines that store, load and purge, and what each of them sees of it."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from object_bucket import Bucket
from object_engines import TIMEOUT_S, is_held, load, open_engine, opened, run_of, store
from object_proxy import hang
from object_server import s3_environment

from kit.waiting import eventually
from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.object.collection import store_clock
from sglang_tiered.storage.object.collector import Collector, CollectorReport, CollectorSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from object_proxy import FaultProxy
    from object_server import ObjectServer

    from sglang_tiered.storage.base import Job
    from sglang_tiered.storage.object import ObjectEngine

OK = {Reason.OK}
HOUR = 3600.0
TENANT = b"\x22" * 16


@pytest.fixture(params=["directory", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Bucket]:
    if request.param == "directory":
        return tmp_path.as_uri(), Bucket.in_directory(tmp_path)
    server: ObjectServer = request.getfixturevalue("object_server")
    for name, value in s3_environment(server.url).items():
        monkeypatch.setenv(name, value)
    bucket = server.make_bucket()
    return f"s3://{bucket}/tier", Bucket.in_s3(server, bucket)


def collect(bucket: Bucket, *, after_s: float = 0.0, **settings: float) -> CollectorReport:
    return Collector(
        bucket.client,
        bucket.layout.namespace,
        CollectorSettings(**settings),  # type: ignore[arg-type]
        clock=lambda: store_clock(bucket.client, bucket.layout) + after_s,
    ).run_once()


@contextmanager
def about_to_announce(engine: ObjectEngine, proxy: FaultProxy) -> Iterator[Job]:
    """A store whose object is uploaded and whose manifest is on its way until the end."""
    released = threading.Event()
    rule = proxy.add("put", "/manifests/", hang(released, before=True), count=1)
    job = engine.submit_store(run_of(1))
    flushing = threading.Thread(target=engine.flush, args=(TIMEOUT_S,))
    flushing.start()
    try:
        assert rule.hit.wait(TIMEOUT_S)
        yield job
    finally:
        released.set()
        flushing.join(TIMEOUT_S)
    assert job.wait(TIMEOUT_S)


def test_a_reader_misses_only_after_the_grace(place: tuple[str, Bucket]) -> None:
    url, bucket = place
    with opened(url) as reader:
        assert store(reader, run_of(1)) == OK
        collect(bucket, after_s=2 * HOUR, ttl_s=HOUR)
        assert bucket.manifests() == set()
        assert load(reader, run_of(1)) == OK, "it knew the object, which is still there"
        with opened(url) as fresh:
            assert not is_held(fresh, run_of(1))
        collect(bucket, after_s=4 * HOUR, ttl_s=HOUR)
        assert bucket.objects() == set()
        assert load(reader, run_of(1)) == {Reason.MISS}
        assert store(reader, run_of(1)) == OK
        reader.check_integrity()


def test_the_collector_finishes_an_engines_purge(place: tuple[str, Bucket]) -> None:
    """The engine that ordered it died before it could delete anything."""
    url, bucket = place
    mine, theirs = run_of(1, tenant=TENANT), run_of(2)
    with opened(url) as engine:
        assert store(engine, mine, theirs) == OK
    (name,) = [n for n in bucket.objects() if not n.endswith("-00000000")]
    bucket.purge(TENANT, int(name[:12], 16))
    collect(bucket)
    assert len(bucket.objects()) == len(bucket.manifests()) == 1
    with opened(url) as fresh:
        assert not is_held(fresh, mine)
        assert load(fresh, theirs) == OK


def test_unannounced_uploads_survive_every_collector(
    s3_url: str, proxy: FaultProxy, object_server: ObjectServer
) -> None:
    bucket = Bucket.in_s3(object_server, s3_url.split("/")[2])
    with opened(s3_url, request_timeout_s=20.0) as engine:
        with about_to_announce(engine, proxy) as job:
            assert (len(bucket.objects()), len(bucket.manifests())) == (1, 0)
            for after_s in (0, HOUR):
                collect(bucket, after_s=after_s, capacity_bytes=1, ttl_s=1.0)
        assert set(job.reasons) == OK
        assert load(engine, run_of(1)) == OK


def test_a_writer_stalled_beyond_grace_announces_nothing_served(
    s3_url: str, proxy: FaultProxy, object_server: ObjectServer
) -> None:
    bucket = Bucket.in_s3(object_server, s3_url.split("/")[2])
    with (
        opened(s3_url, request_timeout_s=20.0) as engine,
        about_to_announce(engine, proxy),
    ):
        collect(bucket, after_s=7 * HOUR)
        assert bucket.objects() == set(), "an orphan for longer than any writer takes"
    with opened(s3_url) as fresh:
        assert load(fresh, run_of(1)) == {Reason.MISS}
    collect(bucket, after_s=HOUR)
    assert bucket.manifests() == set()


def test_clocks_a_day_off_cost_no_objects(
    place: tuple[str, Bucket],
) -> None:
    url, bucket = place
    engines = []
    try:
        for number, skew_s in enumerate((-24 * HOUR, 0.0, 24 * HOUR)):
            engine = open_engine(url, wall_clock=lambda skew_s=skew_s: time.time() + skew_s)
            engines.append(engine)
            assert store(engine, run_of(number)) == OK
        report = collect(bucket, ttl_s=12 * HOUR, orphan_grace_s=12 * HOUR)
        assert (report.num_removed, report.num_buried) == (0, 0)
        assert len(bucket.manifests()) == len(bucket.objects()) == 3
    finally:
        for engine in engines:
            engine.close()


def test_the_cap_holds_beside_a_writer(place: tuple[str, Bucket]) -> None:
    url, bucket = place
    cap = 60_000
    with opened(url) as writer:
        for number in range(12):
            assert store(writer, run_of(number)) == OK
            collect(bucket, capacity_bytes=cap, grace_s=0.0)
        collect(bucket, capacity_bytes=cap, grace_s=0.0)
        report = collect(bucket, after_s=10, capacity_bytes=cap, grace_s=0.0)
        assert report.live_bytes <= cap
        assert load(writer, run_of(11)) == OK
        assert load(writer, run_of(0)) == {Reason.MISS}
        writer.check_integrity()


def test_a_collector_beside_engines_costs_misses_only(
    place: tuple[str, Bucket],
) -> None:
    url, bucket = place
    stop = threading.Event()
    reports: list[CollectorReport] = []
    failures: list[Exception] = []
    settings = CollectorSettings(capacity_bytes=100_000, grace_s=0.0, interval_s=0.01)
    collectors = [
        threading.Thread(
            target=Collector(bucket.client, bucket.layout.namespace, settings).run_in_background,
            args=(stop,),
            kwargs={"ran": reports.append, "failed": failures.append},
        )
        for _ in range(2)
    ]
    with opened(url) as writer, opened(url, refresh_s=0.02) as reader:
        for thread in collectors:
            thread.start()
        try:
            for number in range(25):
                assert store(writer, run_of(number)) == OK
                assert load(writer, run_of(number)) == OK, "the newest is never beyond the cap"
                for recent in range(max(number - 5, 0), number):
                    assert load(reader, run_of(recent)) <= {Reason.OK, Reason.MISS}
            eventually(lambda: any(report.num_removed for report in reports), "it removed some")
            assert reader.refresh(TIMEOUT_S)
            assert load(reader, run_of(24)) == OK
        finally:
            stop.set()
            for thread in collectors:
                thread.join(TIMEOUT_S)
        assert not failures, failures
        writer.check_integrity()
        reader.check_integrity()

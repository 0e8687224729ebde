"""Two servers and one bucket: what one stores, purges or loses, the other sees or misses, and never
takes for something else."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from bucket_engines import TIMEOUT_S, is_held, load, open_engine, opened, run_of, start_load, store
from object_proxy import FaultProxy, expire, hang, status
from object_server import ObjectServer

from kit.waiting import eventually
from sglang_tiered.storage.base import Erasure, Health, Reason
from sglang_tiered.storage.bucket.requests import BucketError, Requests
from sglang_tiered.storage.promises import is_true

OK = {Reason.OK}
SUCCESS = {Reason.OK, Reason.DUPLICATE}
TENANT, OTHER = b"\x22" * 16, b"\x33" * 16


def objects_of(object_server: ObjectServer, url: str, folder: str) -> list[str]:
    bucket = url.split("/")[2]
    listed = object_server.client.list_objects_v2(Bucket=bucket).get("Contents", [])
    return [entry["Key"] for entry in listed if f"/{folder}/" in entry["Key"]]


def test_deleting_an_older_copy_leaves_the_newer(
    s3_url: str, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the collector does; a server that knows both must not depend on the older."""
    run = run_of(1)
    with opened(s3_url) as first, opened(s3_url, wall_clock=lambda: time.time() + 9) as second:
        assert store(first, run) == OK
        monkeypatch.setattr(second._requests, "modified", lambda _: None)  # it keeps its clock
        assert store(second, run) == OK
    with opened(s3_url) as reader:
        for older in sorted(objects_of(object_server, s3_url, "pages"))[: run.num_pages]:
            object_server.client.delete_object(Bucket=s3_url.split("/")[2], Key=older)
        assert load(reader, run) == OK
        assert reader.refresh(TIMEOUT_S, full=True)
        assert load(reader, run) == OK
        reader.check_integrity()


# -- purges -------------------------------------------------------------------------------------


def test_a_late_store_of_another_is_dead(
    s3_url: str, proxy: FaultProxy, object_server: ObjectServer
) -> None:
    """It was read before the erasure, whatever its writer's clock says, and whether or not it lives
    to hear of it."""
    mine = run_of(1, tenant=TENANT)
    released = threading.Event()
    ahead = {"wall_clock": lambda: time.time() + 300, "request_timeout_s": 20.0}
    late = open_engine(s3_url, **ahead)
    with opened(s3_url) as engine:
        assert late.refresh(TIMEOUT_S)
        rule = proxy.add("put", "/pages/", hang(released), count=1)
        late.submit_store(mine)
        assert rule.hit.wait(TIMEOUT_S)
        assert is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
        proxy.clear()
        released.set()
        eventually(lambda: is_held(late, mine), "it has not heard of it")
        with opened(s3_url) as third:
            assert engine.refresh(TIMEOUT_S, full=True)
            for other in (engine, third):
                assert not any(other.contains(mine.keys)), "what was erased came back"
            eventually(lambda: not objects_of(object_server, s3_url, "pages"), "it stays there")
        assert late.refresh(TIMEOUT_S)
        assert not any(late.contains(mine.keys))
        assert store(late, mine) == OK
        assert engine.refresh(TIMEOUT_S)
        assert load(engine, mine) == OK, "what is stored since counts"
    late.close()


def test_erasures_at_the_same_time_are_all_heard(url: str) -> None:
    """Each is numbered behind the others, so whoever stores in the knowledge of one alone stores
    nothing that another names."""
    runs = [run_of(number, tenant=bytes([number]) * 16) for number in range(1, 5)]
    engines = [open_engine(url) for _ in runs]
    try:
        for engine, run in zip(engines, runs, strict=True):
            assert engine.refresh(TIMEOUT_S)
            assert store(engine, run) == OK
        begun = [
            engine.erase(Erasure(tenant=run.tenant))
            for engine, run in zip(engines, runs, strict=True)
        ]
        assert all(is_true(each, TIMEOUT_S) for each in begun)
        numbers = [n for n in engines[0]._state.erased.known.values() if n]
        for engine in engines:
            assert engine.refresh(TIMEOUT_S)
            assert engine._state.seen >= max(numbers)
            for run in runs:
                assert not any(engine.contains(run.keys))
        for engine, run in zip(engines, runs, strict=True):
            assert store(engine, run) == OK
        for engine in engines:
            assert engine.refresh(TIMEOUT_S, full=True)
            assert all(is_held(engine, run) for run in runs)
    finally:
        for engine in engines:
            engine.close()


def test_what_cannot_be_recorded_is_not_stored_again(s3_url: str, proxy: FaultProxy) -> None:
    run = run_of(1)
    with opened(s3_url) as first, opened(s3_url) as second:
        assert store(first, run) == OK
        proxy.add("put", "/erased/", status(403, "AccessDenied"))
        begun = first.erase(Erasure.of(run.keys))
        assert store(first, run) == {Reason.REJECTED}
        assert not is_true(begun, TIMEOUT_S)
        assert not any(first.contains(run.keys))
        assert first.object_stats().refused == {"put": 1, "delete": 0}
        proxy.clear()
        assert is_true(first.erase(Erasure.of(run.keys)), TIMEOUT_S)
        assert second.refresh(TIMEOUT_S)
        assert not any(second.contains(run.keys))
        assert store(first, run) == OK


@pytest.mark.parametrize(
    "what", [Erasure(tenant=TENANT), Erasure.of(run_of(1).keys)], ids=["tenant", "pages"]
)
def test_refused_deletes_hold_up_nothing_else(
    s3_url: str, proxy: FaultProxy, what: Erasure
) -> None:
    mine, theirs = run_of(1, tenant=TENANT), run_of(2, tenant=OTHER)
    with opened(s3_url, refresh_s=0.05) as first, opened(s3_url, refresh_s=0.05) as second:
        assert store(first, mine) == OK
        proxy.add("delete", "", status(403, "AccessDenied"))
        assert not is_true(first.erase(what), TIMEOUT_S), "its bytes are there"
        assert "delete was refused" in first.object_stats().trouble
        assert first.object_stats().refused["delete"] == 1
        assert store(second, theirs) == OK
        eventually(lambda: load(first, theirs) == OK, "discovery stopped")
        assert not any(second.contains(mine.keys))
        seen = proxy.seen["list"]
        passes = first.object_stats().num_passes
        eventually(lambda: first.object_stats().num_passes > passes + 5)
        assert proxy.seen["list"] - seen < 100, "it lists without pause"
        proxy.clear()
        assert is_true(first.erase(what), TIMEOUT_S)
        assert not first.object_stats().trouble


def test_without_bulk_deletes_all_are_single(
    s3_url: str, proxy: FaultProxy, object_server: ObjectServer
) -> None:
    mine, theirs = run_of(1, tenant=TENANT), run_of(2, tenant=OTHER)
    proxy.add("POST", "delete", status(501, "NotImplemented"))
    with opened(s3_url) as engine:
        assert store(engine, mine, theirs) == OK
        assert is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
        assert not engine.object_stats().trouble
        assert len(objects_of(object_server, s3_url, "pages")) == 4
        assert load(engine, theirs) == OK


def test_a_throttled_bulk_delete_stays_in_bulk(s3_url: str, proxy: FaultProxy) -> None:
    requests = Requests(s3_url)
    for answer in (status(503, "SlowDown"), status(400, "ExpiredToken")):
        failed = proxy.add("POST", "delete", answer)
        with pytest.raises(BucketError):
            requests.delete(["a", "b"])
        assert failed.hit.is_set()
        proxy.clear()
    seen = proxy.seen["delete"]
    requests.delete(["a", "b"])
    assert proxy.seen["delete"] == seen + 1


def test_bulk_reads_hold_up_no_discovery(s3_url: str, proxy: FaultProxy) -> None:
    runs = [run_of(number) for number in range(3, 9)]
    with opened(s3_url) as first, opened(s3_url, request_timeout_s=20.0) as second:
        assert store(first, *runs) == OK
        assert second.refresh(TIMEOUT_S)
        hanging = proxy.add("get", "/pages/", hang())
        jobs = [start_load(second, run, deadline_s=60.0)[0] for run in runs]
        assert hanging.hit.wait(TIMEOUT_S)
        assert is_true(first.erase(Erasure.of(runs[0].keys)), TIMEOUT_S)
        assert second.refresh(TIMEOUT_S)
        assert not any(second.contains(runs[0].keys))
        assert not any(job.done for job in jobs), "nothing was being read"
        proxy.close()


# -- credentials --------------------------------------------------------------------------------


def test_a_refused_user_gets_one_warning_without_secret(
    s3_url: str,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-mine")
    proxy.add("*", "", expire(["token-of-mine"]))
    engine = open_engine(s3_url)
    try:
        for _ in range(5):
            assert not engine.refresh(TIMEOUT_S)
        assert engine.stats().health is Health.MISS_ONLY
        assert not is_held(engine, run_of(1))
        assert set(engine.submit_store(run_of(1)).reasons) == {Reason.REJECTED}
        job, _ = start_load(engine, run_of(1))
        assert set(job.reasons) == {Reason.MISS}
        proxy.clear()
        assert engine.refresh(TIMEOUT_S), "they are renewed"
        assert store(engine, run_of(1)) == OK
    finally:
        engine.close()
    ours = [one for one in caplog.records if one.name.startswith("sglang_tiered.storage.bucket")]
    # Another test may have set a level that shows what is no warning too.
    warnings = [record.getMessage() for record in ours if record.levelno >= logging.WARNING]
    assert len(warnings) == 1, warnings
    assert "credentials" in warnings[0]
    for secret in ("token-of-mine", "not-a-secret", "key-of-tests"):
        assert secret not in caplog.text + engine.stats().health_reason

"""One engine and an S3 API that fails in every way a request can: never wrong bytes, every job
ends, and it works again once the fault is gone."""

from __future__ import annotations

import gc

import pytest
from bucket_engines import TIMEOUT_S, is_held, load, open_descriptors, opened, run_of, store
from object_proxy import (
    Fault,
    FaultProxy,
    drop_upload,
    flip,
    lose_response,
    reset,
    shorten,
    status,
    truncate,
)
from object_server import ObjectServer

from kit.clock import Clock
from kit.waiting import eventually
from sglang_tiered.storage.base import Health, Reason

OK = {Reason.OK}
SUCCESS = {Reason.OK, Reason.DUPLICATE}

PASSING = {
    "500": status(500),
    "503 slow down": status(503, "SlowDown"),
    "429": status(429, "TooManyRequests"),
    "reset": reset(),
    "truncated at once": truncate(0),
    "truncated": truncate(100),
}


LASTING = {
    **PASSING,
    "404 without a body": status(404, "NoSuchKey"),
    "403": status(403, "AccessDenied"),
    "fewer bytes than asked for": shorten(1000),
    "no bytes": shorten(0),
    "first bit flipped": flip(0),
    "last bit flipped": flip(-1, 7),
    "200 instead of the range": status(200),
}
WRITES = {
    "throttled": status(503, "SlowDown"),
    "reset": reset(),
    "response lost": lose_response(),
    "half sent": drop_upload(20),
}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [*(("get", fault) for fault in PASSING.values()), *(("put", each) for each in WRITES.values())],
    ids=[*PASSING, *WRITES],
)
def test_what_fails_once_is_tried_again(
    s3_url: str, proxy: FaultProxy, kind: str, fault: Fault
) -> None:
    rule = proxy.add(kind, "/pages/", fault, count=1)
    with opened(s3_url) as engine:
        assert store(engine, run_of(1)) == OK
        assert load(engine, run_of(1)) == OK
        assert rule.num_hit == 1
    with opened(s3_url) as other:
        assert load(other, run_of(1)) == OK


@pytest.mark.parametrize("fault", LASTING.values(), ids=LASTING)
def test_a_read_failing_on_serves_no_bytes(s3_url: str, proxy: FaultProxy, fault: Fault) -> None:
    with opened(s3_url) as engine:
        assert store(engine, run_of(1), run_of(2)) == OK
        proxy.add("get", "/pages/", fault)
        for _ in range(5):
            load(engine, run_of(1))  # asserts the bytes of what it says is OK
        assert load(engine, run_of(1)) != OK
        proxy.clear()
        assert engine.refresh(TIMEOUT_S, full=True)
        # Whatever was forgotten can be stored again, and the rest is there.
        assert store(engine, run_of(1), run_of(2)) <= SUCCESS
        assert load(engine, run_of(1)) == load(engine, run_of(2)) == OK
        engine.check_integrity()


@pytest.mark.parametrize("fault", [status(403, "AccessDenied"), *WRITES.values()])
def test_a_write_failing_on_leaves_loads_working(
    s3_url: str, proxy: FaultProxy, fault: Fault
) -> None:
    clock = Clock(1000.0)
    with opened(s3_url, clock=clock) as engine:
        assert store(engine, run_of(1)) == OK
        proxy.add("put", "/pages/", fault)
        assert store(engine, run_of(2)) <= {Reason.IO_ERROR, Reason.REJECTED}
        assert not is_held(engine, run_of(2))
        assert load(engine, run_of(1)) == OK
        assert engine.stats().health is Health.RUNNING
        proxy.clear()
        assert store(engine, run_of(3)) == {Reason.REJECTED}, "stores pause after a failure"
        clock.now += 60.0
        assert store(engine, run_of(3)) == OK
        engine.check_integrity()
    with opened(s3_url) as other:
        assert is_held(other, run_of(1))
        load(other, run_of(2))  # announced or not: never other bytes


def test_a_broken_upload_is_never_seen_in_part(
    s3_url: str, proxy: FaultProxy, object_server: ObjectServer
) -> None:
    large = run_of(1, num_pages=1, page_bytes=65 << 20)
    with opened(s3_url, staging_bytes=256 << 20, request_timeout_s=10.0) as engine:
        once = proxy.add("part", "", drop_upload(1 << 20), count=1)
        assert store(engine, large) == OK
        assert once.num_hit == 1
        assert load(engine, large) == OK
        proxy.add("part", "partNumber=2", drop_upload(1 << 20))
        other = run_of(2, num_pages=1, page_bytes=65 << 20)
        assert store(engine, other) == {Reason.IO_ERROR}
        assert not is_held(engine, other)
    proxy.clear()
    bucket = s3_url.split("/")[2]
    listed = object_server.client.list_objects_v2(Bucket=bucket)
    assert sum("/pages/" in entry["Key"] for entry in listed["Contents"]) == 1
    uploads = object_server.client.list_multipart_uploads(Bucket=bucket)
    assert not uploads.get("Uploads"), "it was not aborted either"


def test_closed_engines_leave_no_descriptors(s3_url: str) -> None:
    with opened(s3_url) as engine:
        assert store(engine, run_of(1)) == OK
    before = open_descriptors()
    for _ in range(5):
        with opened(s3_url) as engine:
            eventually(lambda engine=engine: load(engine, run_of(1)) == OK, "it is not found")
    del engine
    gc.collect()
    eventually(lambda: open_descriptors() <= before + 2, "connections are closed with the engine")

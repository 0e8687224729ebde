"""One engine and an S3 API that fails in every way a request can: never wrong bytes, every job
ends, and it works again once the fault is gone.

Requests that never end: jobs finish by their deadline, lookups never wait, closing is bounded, and
what arrives late touches nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_engines import is_held, load, open_engine, opened, paths, run_of, store
from object_proxy import (
    Exchange,
    Fault,
    FaultProxy,
    Request,
    drop_upload,
    flip,
    hang,
    lose_response,
    reset,
    shorten,
    status,
    truncate,
)
from object_server import ObjectServer

from kit.clock import Clock
from kit.runs import NAMESPACE, blank
from kit.waiting import TIMEOUT_S, eventually
from sglang_tiered.storage.base import Erasure, Health, PinRefusal, Reason
from sglang_tiered.storage.bucket.collect import Collector
from sglang_tiered.storage.bucket.requests import Requests
from sglang_tiered.storage.promises import is_true

OK = {Reason.OK}
SUCCESS = {Reason.OK, Reason.DUPLICATE}
TENANT, OTHER = b"\x22" * 16, b"\x33" * 16
ALGORITHM = "x-amz-server-side-encryption"
KEY = f"{ALGORITHM}-aws-kms-key-id"
KEY_NAME = "arn:aws:kms:us-east-1:123456789012:key/of-tests"

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
        assert not is_held(engine, other) and len(paths(engine)) == 1
    proxy.clear()
    uploads = object_server.client.list_multipart_uploads(Bucket=s3_url.split("/")[2])
    assert not uploads.get("Uploads"), "it was not aborted either"


def test_an_open_breaker_asks_nothing_until_it_closes(s3_url: str, proxy: FaultProxy) -> None:
    with opened(s3_url) as engine:
        assert store(engine, run_of(1)) == OK
        away = proxy.add("*", "", status(503, "SlowDown"))
        eventually(lambda: load(engine, run_of(1)) and engine.health is Health.MISS_ONLY)
        seen = away.num_hit
        for _ in range(50):
            assert load(engine, run_of(1)) == {Reason.MISS} and not is_held(engine, run_of(1))
            assert set(engine.submit_store(run_of(2)).reasons) == {Reason.REJECTED}
        assert away.num_hit - seen <= 4, "only probes"
        proxy.clear()
        eventually(lambda: engine.health is Health.RUNNING, "it closes by itself")
        assert load(engine, run_of(1)) == store(engine, run_of(2)) == OK


def test_closed_engines_leave_no_descriptors(s3_url: str) -> None:
    with opened(s3_url) as engine:
        assert store(engine, run_of(1)) == OK
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with opened(s3_url) as engine:
            eventually(lambda engine=engine: load(engine, run_of(1)) == OK, "it is not found")
    del engine
    gc.collect()
    eventually(
        lambda: len(os.listdir("/proc/self/fd")) <= before + 2, "a connection outlives the engine"
    )


def test_everything_that_is_written_asks_for_it(
    s3_url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages in one put and in parts, records, pins, and what the collector writes. A part
    carries none: its upload does, and S3 refuses them there."""
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
    monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", KEY_NAME)
    seen: list[Request] = []

    def note(exchange: Exchange) -> None:
        seen.append(exchange.request)
        exchange.answer(exchange.forward())

    for kind in ("put", "begin multipart", "part", "complete multipart"):
        proxy.add(kind, "", note)
    large = run_of(1, num_pages=1, page_bytes=65 << 20)
    with opened(s3_url, staging_bytes=256 << 20) as engine:
        assert store(engine, large, run_of(2, tenant=TENANT)) == {Reason.OK}
        assert is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
        pinned = engine.pin("a", large.keys)
        assert not isinstance(pinned, PinRefusal)
        assert is_true(pinned, TIMEOUT_S)
    Collector(Requests(s3_url)).run_once(NAMESPACE)
    asking = [request for request in seen if request.kind in ("put", "begin multipart")]
    written = " ".join(request.target for request in asking)
    assert all(what in written for what in ("/pages/", "/erased/", "/pins/", "/collected"))
    for request in seen:
        asked = ("aws:kms", KEY_NAME) if request in asking else (None, None)
        assert (request.headers[ALGORITHM], request.headers[KEY]) == asked, request.target
    assert {request.kind for request in seen} > {"part", "complete multipart"}


def test_a_late_store_of_another_is_dead(s3_url: str, proxy: FaultProxy) -> None:
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
            eventually(lambda: not paths(engine), "it stays there")
        assert late.refresh(TIMEOUT_S)
        assert not any(late.contains(mine.keys))
        assert store(late, mine) == OK
        assert engine.refresh(TIMEOUT_S)
        assert load(engine, mine) == OK, "what is stored since counts"
    late.close()


def test_without_bulk_deletes_all_are_single(s3_url: str, proxy: FaultProxy) -> None:
    mine, theirs = run_of(1, tenant=TENANT), run_of(2, tenant=OTHER)
    proxy.add("POST", "delete", status(501, "NotImplemented"))
    with opened(s3_url) as engine:
        assert store(engine, mine, theirs) == OK
        assert is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
        assert not engine.object_stats().trouble
        assert len(paths(engine)) == 4
        assert load(engine, theirs) == OK


REQUEST_TIMEOUT_S = 1.0
CLOSE_S = REQUEST_TIMEOUT_S + 4.0  # and what a busy machine takes


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("after_head", [False, True], ids=["silent", "head only"])
def test_late_bytes_touch_no_ended_load(
    s3_url: str, proxy: FaultProxy, released: threading.Event, after_head: bool
) -> None:
    run = run_of(1)
    with opened(s3_url, request_timeout_s=20.0) as engine:
        assert store(engine, run) == OK
        rule = proxy.add("get", "/pages/", hang(released, after_head=after_head))
        begun = time.monotonic()
        job = engine.submit_load(target := blank(run), deadline_s=0.2)
        assert job.wait(TIMEOUT_S)
        assert time.monotonic() - begun < 5, "it waited for its request"
        assert set(job.reasons) == {Reason.IO_ERROR}
        assert rule.hit.wait(TIMEOUT_S)
        for (buffer,) in target.pages:  # they are somebody else's now
            buffer[:] = b"\x5a" * len(buffer)
        proxy.remove(rule)
        released.set()
        assert load(engine, run) == OK  # behind the late ones on the same threads
        assert all(set(page[0]) == {0x5A} for page in target.pages), "a late page was delivered"
        assert is_held(engine, run), "being slow is no reason to be forgotten"
        engine.check_integrity()


def test_lookups_never_wait_whatever_hangs(
    s3_url: str, proxy: FaultProxy, released: threading.Event
) -> None:
    with opened(s3_url, request_timeout_s=TIMEOUT_S) as engine:
        assert store(engine, run_of(1)) == OK
        rule = proxy.add("*", "", hang(released))
        load_job = engine.submit_load(blank(run_of(1)), deadline_s=TIMEOUT_S)
        store_job = engine.submit_store(run_of(2))
        thread = threading.Thread(target=engine.refresh, args=(TIMEOUT_S,))
        thread.start()
        assert rule.hit.wait(TIMEOUT_S)
        for _ in range(100):
            engine.lookup(run_of(1).keys)
            engine.contains(run_of(1).keys)
            engine.stats()
        assert not load_job.done, "what hangs was waited for"
        released.set()
        for job in (load_job, store_job):
            assert job.wait(TIMEOUT_S)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize(("kind", "folder"), [("put", "/pages/"), ("*", "")], ids=["put", "all"])
def test_closing_is_bounded_and_ends_every_job(
    s3_url: str, proxy: FaultProxy, kind: str, folder: str
) -> None:
    with opened(s3_url) as engine:
        assert store(engine, run_of(1)) == OK
    with opened(s3_url, request_timeout_s=REQUEST_TIMEOUT_S) as engine:
        eventually(lambda: engine.refresh(TIMEOUT_S) and is_held(engine, run_of(1)))
        rule = proxy.add(kind, folder, hang())
        jobs = [engine.submit_load(blank(run_of(1))), engine.submit_store(run_of(3))]
        erased = Erasure(tenant=TENANT)
        waiting = [
            threading.Thread(target=engine.refresh, args=(TIMEOUT_S,)),
            threading.Thread(target=lambda: is_true(engine.erase(erased), TIMEOUT_S)),
            threading.Thread(target=engine.flush, args=(TIMEOUT_S,)),
        ]
        for thread in waiting:
            thread.start()
        assert rule.hit.wait(TIMEOUT_S), "the request was never made"
        begun = time.monotonic()
        engine.close()
        assert time.monotonic() - begun < CLOSE_S
        assert all(job.wait(TIMEOUT_S) for job in jobs)
        for thread in waiting:
            thread.join(TIMEOUT_S)
        assert not any(thread.is_alive() for thread in waiting)


HANGING_PROCESS = """
import sys, threading
from bucket_engines import open_engine, run_of, store
from kit.waiting import TIMEOUT_S
from sglang_tiered.storage.bucket import directory

engine = open_engine(sys.argv[1], request_timeout_s=0.2)
assert engine.refresh(TIMEOUT_S)
store(engine, run_of(1))
reached, inner = threading.Event(), directory._open

def hangs(*arguments):
    if not threading.current_thread().name.startswith("bucket-"):
        reached.set()
        threading.Event().wait()
    return inner(*arguments)

directory._open = hangs
assert engine.confirm(run_of(1).keys, 0.2) == [False] * 4
assert reached.wait(TIMEOUT_S), "no page was asked for"
engine.close()
"""


def test_a_hung_directory_keeps_no_process_alive(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", HANGING_PROCESS, tmp_path.as_uri()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=2 * TIMEOUT_S,
        check=True,
    )

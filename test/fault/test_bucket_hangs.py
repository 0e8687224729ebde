"""Requests that never end: jobs finish by their deadline, lookups never wait, closing is bounded,
and what arrives late touches nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_engines import TIMEOUT_S, is_held, load, open_engine, opened, run_of, start_load, store
from object_proxy import FaultProxy, hang
from object_server import ObjectServer

from kit.waiting import eventually
from sglang_tiered.storage.base import Erasure, Health, Reason
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.promises import is_true

OK = {Reason.OK}
TENANT = b"\x22" * 16
REQUEST_TIMEOUT_S = 1.0
CLOSE_S = REQUEST_TIMEOUT_S + 4.0  # and what a busy machine takes


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@contextlib.contextmanager
def holding(url: str) -> Iterator[BucketEngine]:
    """One of short requests that knows what a patient one stored, however busy the machine is."""
    with opened(url) as writer:
        assert store(writer, run_of(1)) == OK
    with opened(url, request_timeout_s=REQUEST_TIMEOUT_S) as engine:
        eventually(lambda: engine.refresh(TIMEOUT_S) and is_held(engine, run_of(1)))
        yield engine


@pytest.mark.parametrize("after_head", [False, True], ids=["silent", "head only"])
def test_late_bytes_touch_no_ended_load(
    s3_url: str, proxy: FaultProxy, released: threading.Event, after_head: bool
) -> None:
    run = run_of(1)
    with opened(s3_url, request_timeout_s=20.0) as engine:
        assert store(engine, run) == OK
        rule = proxy.add("get", "/pages/", hang(released, after_head=after_head))
        begun = time.monotonic()
        job, buffers = start_load(engine, run, deadline_s=0.2)
        assert job.wait(TIMEOUT_S)
        assert time.monotonic() - begun < 5, "it waited for its request"
        assert set(job.reasons) == {Reason.IO_ERROR}
        assert rule.hit.wait(TIMEOUT_S)
        for buffer in buffers:  # they are somebody else's now
            buffer[:] = b"\x5a" * len(buffer)
        proxy.remove(rule)
        released.set()
        assert load(engine, run) == OK  # behind the late ones on the same threads
        assert all(set(buffer) == {0x5A} for buffer in buffers), "a late page was delivered"
        assert is_held(engine, run), "being slow is no reason to be forgotten"
        engine.check_integrity()


def test_deadlines_are_kept_while_all_connections_hang(s3_url: str, proxy: FaultProxy) -> None:
    runs = [run_of(number) for number in range(12)]
    with opened(s3_url, request_timeout_s=20.0, num_connections=2) as engine:
        assert store(engine, *runs) == OK
        proxy.add("get", "/pages/", hang())
        begun = time.monotonic()
        jobs = [start_load(engine, run, deadline_s=0.1)[0] for run in runs]
        assert all(job.wait(TIMEOUT_S) for job in jobs)
        assert time.monotonic() - begun < 5
        proxy.close()  # or the engine would wait for its requests to time out


def test_lookups_never_wait_whatever_hangs(
    s3_url: str, proxy: FaultProxy, released: threading.Event
) -> None:
    with opened(s3_url, request_timeout_s=TIMEOUT_S) as engine:
        assert store(engine, run_of(1)) == OK
        rule = proxy.add("*", "", hang(released))
        load_job, _ = start_load(engine, run_of(1), deadline_s=TIMEOUT_S)
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


@pytest.mark.parametrize(
    ("kind", "folder"), [("put", "/pages/"), ("*", "")], ids=["put of a page", "everything"]
)
def test_closing_is_bounded_and_ends_every_job(
    s3_url: str, proxy: FaultProxy, kind: str, folder: str
) -> None:
    with opened(s3_url) as writer:
        assert store(writer, run_of(1)) == OK
        engine = open_engine(s3_url, request_timeout_s=REQUEST_TIMEOUT_S)
        eventually(lambda: engine.refresh(TIMEOUT_S) and is_held(engine, run_of(1)))
        assert store(writer, run_of(4, tenant=TENANT)) == OK  # for it to purge
        rule = proxy.add(kind, folder, hang())
        jobs = [start_load(engine, run_of(1))[0], engine.submit_store(run_of(3))]
        waiting = [
            threading.Thread(target=engine.refresh, args=(TIMEOUT_S,)),
            threading.Thread(
                target=lambda: is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
            ),
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
        assert not is_held(engine, run_of(1))
        eventually(
            lambda: not any(thread.is_alive() for thread in engine._workers._threads),
            "its threads end with their requests",
        )


def test_a_host_that_stalls_with_its_connections_open(
    object_server: ObjectServer, s3_url: str
) -> None:
    """Not by way of a rule: the process of the server is stopped."""
    with holding(s3_url) as engine:
        object_server.pause()
        try:
            for _ in range(6):
                load(engine, run_of(1), deadline_s=0.3)
            begun = time.monotonic()
            eventually(lambda: engine.stats().health is Health.MISS_ONLY, "it gives up")
            assert load(engine, run_of(1)) == {Reason.MISS}
            assert time.monotonic() - begun < 10
        finally:
            object_server.resume()
        eventually(lambda: engine.refresh(TIMEOUT_S) and is_held(engine, run_of(1)), "it is back")
        assert load(engine, run_of(1)) == OK


HANGING_PROCESS = """
import sys, threading
from bucket_engines import TIMEOUT_S, open_engine, run_of, store
from sglang_tiered.storage.bucket import directory
from sglang_tiered.storage.promises import is_true

url, keys = sys.argv[1], run_of(1).keys
asking = open_engine(url, request_timeout_s=0.2)
assert asking.refresh(TIMEOUT_S)
store(asking, run_of(1))
assert is_true(asking.pin("a", keys), TIMEOUT_S)
reached, inner = threading.Semaphore(0), directory._open

def hangs(*arguments):
    if not threading.current_thread().name.startswith("bucket-"):
        reached.release()
        threading.Event().wait()
    return inner(*arguments)

directory._open = hangs
reading = open_engine(url, request_timeout_s=0.2)
assert reached.acquire(timeout=TIMEOUT_S), "no pin was read"
assert asking.confirm(keys, 0.2) == [False] * 4
assert reached.acquire(timeout=TIMEOUT_S), "no page was asked for"
asking.close()
reading.close()
"""


def test_a_hung_directory_keeps_no_process_alive(tmp_path: Path) -> None:
    """Which has closed its engines, and ends."""
    subprocess.run(
        [sys.executable, "-c", HANGING_PROCESS, tmp_path.as_uri()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=2 * TIMEOUT_S,
        check=True,
    )

"""Requests that never end: jobs finish by their deadline, lookups never wait, closing is bounded,
and what arrives late touches nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_engines import TIMEOUT_S, is_held, load, opened, run_of, start_load, store
from object_proxy import FaultProxy, hang

from kit.waiting import eventually
from sglang_tiered.storage.base import Erasure, Reason
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


@pytest.mark.parametrize(("kind", "folder"), [("put", "/pages/"), ("*", "")], ids=["put", "all"])
def test_closing_is_bounded_and_ends_every_job(
    s3_url: str, proxy: FaultProxy, kind: str, folder: str
) -> None:
    with opened(s3_url) as engine:
        assert store(engine, run_of(1)) == OK
    with opened(s3_url, request_timeout_s=REQUEST_TIMEOUT_S) as engine:
        eventually(lambda: engine.refresh(TIMEOUT_S) and is_held(engine, run_of(1)))
        rule = proxy.add(kind, folder, hang())
        jobs = [start_load(engine, run_of(1))[0], engine.submit_store(run_of(3))]
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
from bucket_engines import TIMEOUT_S, open_engine, run_of, store
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

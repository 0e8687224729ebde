"""Two servers and one bucket: what one stores, purges or loses, the other sees or misses, and never
takes for something else."""

from __future__ import annotations

import contextlib
import threading
import time

from bucket_engines import TIMEOUT_S, is_held, load, open_engine, opened, run_of, store
from object_proxy import FaultProxy, hang, status
from object_server import ObjectServer

from kit.waiting import eventually
from sglang_tiered.storage.base import Erasure, Reason
from sglang_tiered.storage.promises import is_true

OK = {Reason.OK}
TENANT, OTHER = b"\x22" * 16, b"\x33" * 16


def objects_of(object_server: ObjectServer, url: str, folder: str) -> list[str]:
    bucket = url.split("/")[2]
    listed = object_server.client.list_objects_v2(Bucket=bucket).get("Contents", [])
    return [entry["Key"] for entry in listed if f"/{folder}/" in entry["Key"]]


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
    with contextlib.ExitStack() as stack:
        pairs = [(stack.enter_context(opened(url)), run) for run in runs]
        for engine, run in pairs:
            assert store(engine, run) == OK
        begun = [engine.erase(Erasure(tenant=run.tenant)) for engine, run in pairs]
        assert all(is_true(each, TIMEOUT_S) for each in begun)
        for engine, _ in pairs:
            assert engine.refresh(TIMEOUT_S)
            assert not any(any(engine.contains(run.keys)) for run in runs)
        for engine, run in pairs:
            assert store(engine, run) == OK
        for engine, _ in pairs:
            assert engine.refresh(TIMEOUT_S, full=True)
            assert all(is_held(engine, run) for run in runs)


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

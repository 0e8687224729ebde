"""Two servers and one bucket: what one stores, purges or loses, the other sees or misses, and never
takes for something else. Listings that lag, objects that are gone, credentials that expire."""

from __future__ import annotations

import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
from object_engines import TIMEOUT_S, is_held, load, open_engine, opened, run_of, start_load, store
from object_proxy import HOST, expire, hang, hide, replay

from kit.waiting import eventually
from sglang_tiered.storage.base import Erasure, Health, Reason
from sglang_tiered.storage.promises import is_true

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from object_proxy import FaultProxy
    from object_server import ObjectServer

OK = {Reason.OK}
SUCCESS = {Reason.OK, Reason.DUPLICATE}
TENANT, OTHER = b"\x22" * 16, b"\x33" * 16


@pytest.fixture(params=["directory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return tmp_path.as_uri()
    found: str = request.getfixturevalue("s3_url")
    return found


def objects_of(object_server: ObjectServer, url: str, folder: str) -> list[str]:
    bucket = url.split("/")[2]
    listed = object_server.client.list_objects_v2(Bucket=bucket).get("Contents", [])
    return [entry["Key"] for entry in listed if f"/{folder}/" in entry["Key"]]


def test_two_writers_of_the_same_pages_at_once(url: str) -> None:
    runs = [run_of(number) for number in range(6)]
    with opened(url) as first, opened(url) as second, opened(url) as reader:
        jobs = [engine.submit_store(run) for run in runs for engine in (first, second)]
        assert first.flush(TIMEOUT_S)
        assert second.flush(TIMEOUT_S)
        assert {reason for job in jobs for reason in job.reasons} == OK
        for engine in (first, second, reader):
            assert engine.refresh(TIMEOUT_S)
            for run in runs:
                assert load(engine, run) == OK
            engine.check_integrity()


def test_deleting_an_older_copy_leaves_the_newer(s3_url: str, object_server: ObjectServer) -> None:
    """As the collector does; a server that knows both must not depend on the older."""
    run = run_of(1)
    with opened(s3_url) as first, opened(s3_url) as second:
        assert store(first, run) == store(second, run) == OK
    with opened(s3_url) as reader:
        older = min(objects_of(object_server, s3_url, "objects"))
        for key in (older.replace("/objects/", "/manifests/"), older):
            object_server.client.delete_object(Bucket=s3_url.split("/")[2], Key=key)
        assert load(reader, run) == OK
        assert reader.refresh(TIMEOUT_S, full=True)
        assert load(reader, run) == OK
        reader.check_integrity()


def test_both_copies_of_a_page_are_deleted(s3_url: str, object_server: ObjectServer) -> None:
    run = run_of(1)
    with opened(s3_url) as first, opened(s3_url) as second:
        assert store(first, run) == store(second, run) == OK
    with opened(s3_url) as reader:
        for folder in ("manifests", "objects"):
            for key in objects_of(object_server, s3_url, folder):
                object_server.client.delete_object(Bucket=s3_url.split("/")[2], Key=key)
        assert load(reader, run) == {Reason.MISS}
        assert not is_held(reader, run)
        assert store(reader, run) == OK
        assert load(reader, run) == OK


def test_a_manifest_without_object_is_a_miss_forgotten(
    s3_url: str, object_server: ObjectServer, proxy: FaultProxy
) -> None:
    with opened(s3_url) as writer:
        assert store(writer, run_of(1)) == OK
        assert store(writer, run_of(2)) == OK
    first = min(objects_of(object_server, s3_url, "objects"))
    with opened(s3_url) as reader:
        object_server.client.delete_object(Bucket=s3_url.split("/")[2], Key=first)
        assert load(reader, run_of(1)) == {Reason.MISS}
        assert not is_held(reader, run_of(1))
        assert load(reader, run_of(2)) == OK
        seen = proxy.seen["get"]
        assert reader.refresh(TIMEOUT_S)
        assert reader.refresh(TIMEOUT_S, full=True)
        assert not is_held(reader, run_of(1)), "its manifest brought it back"
        assert proxy.seen["get"] == seen, "its manifest is read again and again"
        assert store(reader, run_of(1)) == OK
        assert load(reader, run_of(1)) == OK


def test_an_object_without_its_manifest_is_nobodys(
    s3_url: str, object_server: ObjectServer
) -> None:
    with opened(s3_url) as writer:
        assert store(writer, run_of(1)) == OK
    (manifest,) = objects_of(object_server, s3_url, "manifests")
    object_server.client.delete_object(Bucket=s3_url.split("/")[2], Key=manifest)
    with opened(s3_url) as reader:
        assert not is_held(reader, run_of(1))
        assert store(reader, run_of(1)) == OK


def test_a_lagging_listing_is_a_miss_meanwhile(s3_url: str, proxy: FaultProxy) -> None:
    with opened(s3_url) as writer, opened(s3_url) as reader:
        assert store(writer, run_of(1)) == OK
        rule = proxy.add("list", "manifests", hide(""))
        for full in (False, True):
            assert reader.refresh(TIMEOUT_S, full=full)
            assert not is_held(reader, run_of(1))
        # Its own, which it knows better than any listing.
        assert store(reader, run_of(2)) == OK
        assert reader.refresh(TIMEOUT_S, full=True)
        assert load(reader, run_of(2)) == OK
        proxy.remove(rule)
        assert reader.refresh(TIMEOUT_S)
        assert load(reader, run_of(1)) == OK


def test_a_stale_listing_serves_nothing_gone(
    s3_url: str, proxy: FaultProxy, object_server: ObjectServer
) -> None:
    with opened(s3_url) as writer, opened(s3_url) as reader:
        assert store(writer, run_of(1)) == OK
        proxy.add("list", "manifests", replay([]))
        assert reader.refresh(TIMEOUT_S, full=True)
        for folder in ("objects", "manifests"):
            for key in objects_of(object_server, s3_url, folder):
                object_server.client.delete_object(Bucket=s3_url.split("/")[2], Key=key)
        assert store(writer, run_of(2)) == OK
        for _ in range(3):
            assert reader.refresh(TIMEOUT_S, full=True)
            assert load(reader, run_of(1)) == {Reason.MISS}
        assert not is_held(reader, run_of(1))


# -- purges -------------------------------------------------------------------------------------


def test_a_purge_reaches_running_and_starting_servers(url: str) -> None:
    mine, theirs = run_of(1, tenant=TENANT), run_of(2, tenant=OTHER)
    with opened(url) as first, opened(url) as second:
        assert store(first, mine, theirs) == OK
        assert second.refresh(TIMEOUT_S)
        assert load(second, mine) == OK
        assert is_true(first.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
        assert not is_held(first, mine)
        assert second.refresh(TIMEOUT_S)
        for engine in (first, second):
            assert load(engine, mine) == {Reason.MISS}
            assert load(engine, theirs) == OK
        with opened(url) as third:
            assert not is_held(third, mine)
            assert load(third, theirs) == OK
        # What is stored after the purge is there for everyone.
        assert store(second, mine) == OK
        assert first.refresh(TIMEOUT_S)
        assert load(first, mine) == OK


def test_a_purge_hides_while_the_bucket_is_away(s3_url: str, proxy: FaultProxy) -> None:
    mine = run_of(1, tenant=TENANT)
    with opened(s3_url) as engine:
        assert store(engine, mine) == OK
        rule = proxy.add("put", "/purges/", hang(), count=1)
        assert not is_true(engine.erase(Erasure(tenant=TENANT)), 0.2), "it cannot be durable"
        assert not is_held(engine, mine)
        assert rule.hit.wait(TIMEOUT_S)
        proxy.clear()
        eventually(
            lambda: (
                engine.refresh(TIMEOUT_S)
                and any(
                    kind == "put" and "/purges/" in target for kind, target in proxy.targets[-20:]
                )
            ),
            "it is tried again",
        )
        assert is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
    with opened(s3_url) as fresh:
        assert not is_held(fresh, mine)


def test_a_tombstone_read_late_spares_newer_pages(url: str) -> None:
    """A server that has yet to hear of a purge stores on; the purge must not take that too."""
    before, since, unsent = (run_of(number, tenant=TENANT) for number in range(3))
    theirs = run_of(3, tenant=OTHER)
    now = [1_000_000.0]
    clocks = {"wall_clock": lambda: now[0]}
    with opened(url, **clocks) as first, opened(url, linger_s=3600.0, **clocks) as second:
        assert store(first, before, theirs) == OK
        assert second.refresh(TIMEOUT_S)
        assert is_true(first.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
        now[0] += 1.0
        assert store(second, since) == OK
        job = second.submit_store(unsent)
        eventually(lambda: second._state.packing is None and not second._state.stores)
        assert second.refresh(TIMEOUT_S)
        assert second.flush(TIMEOUT_S)
        assert job.wait(TIMEOUT_S)
        with opened(url, **clocks) as third:
            for engine in (second, third):
                assert load(engine, before) == {Reason.MISS}
                assert [load(engine, run) for run in (since, unsent, theirs)] == [OK] * 3


def test_a_store_in_flight_never_lands_behind_purge(s3_url: str, proxy: FaultProxy) -> None:
    for number, folder in enumerate(("objects", "manifests")):
        mine = run_of(number, tenant=TENANT)
        released = threading.Event()
        with opened(s3_url, request_timeout_s=20.0) as engine:
            rule = proxy.add("put", f"/{folder}/", hang(released), count=1)
            job = engine.submit_store(mine)
            threading.Thread(target=engine.flush, args=(0.0,)).start()
            assert rule.hit.wait(TIMEOUT_S)
            forgetting = engine.erase(Erasure(tenant=TENANT))
            released.set()
            assert is_true(forgetting, TIMEOUT_S)
            assert job.wait(TIMEOUT_S)
            assert set(job.reasons) == {Reason.CANCELLED}
            assert not is_held(engine, mine)
        with opened(s3_url) as fresh:
            assert not is_held(fresh, mine), f"its {folder} landed behind the purge"


def test_a_damaged_tombstone_hides_older_pages_only(
    s3_url: str, object_server: ObjectServer
) -> None:
    with opened(s3_url) as writer:
        assert store(writer, run_of(1, tenant=TENANT), run_of(2, tenant=OTHER)) == OK
        assert is_true(writer.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
    bucket = s3_url.split("/")[2]
    (tombstone,) = objects_of(object_server, s3_url, "purges")
    object_server.client.put_object(Bucket=bucket, Key=tombstone, Body=b"nonsense")
    with opened(s3_url) as reader:
        assert not is_held(reader, run_of(1, tenant=TENANT))
        assert store(reader, run_of(3, tenant=OTHER)) == OK
        assert load(reader, run_of(3, tenant=OTHER)) == OK


# -- credentials --------------------------------------------------------------------------------


class _Credentials:
    """The endpoint from which a container gets its credentials: a new token each time it asks,
    which is to be renewed before long."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.expired: set[str] = set()
        numbers = itertools.count()
        outer = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                token = f"token-{next(numbers)}"
                outer.tokens.append(token)
                body = json.dumps(
                    {
                        "AccessKeyId": "key",
                        "SecretAccessKey": "not-a-secret",
                        "Token": token,
                        "Expiration": "2020-01-01T00:00:00Z",
                    }
                ).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, 0), Answer)
        self.url = f"http://{HOST}:{self._server.server_port}/credentials"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(TIMEOUT_S)


@pytest.fixture
def credentials() -> Iterator[_Credentials]:
    server = _Credentials()
    yield server
    server.close()


def test_expired_credentials_are_misses_until_renewed(
    s3_url: str,
    proxy: FaultProxy,
    credentials: _Credentials,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "token").write_text("for the endpoint")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", credentials.url)
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    proxy.add("*", "", expire(credentials.expired))
    with opened(s3_url) as engine:
        assert store(engine, run_of(1)) == OK
        assert load(engine, run_of(1)) == OK
        # All tokens so far and to come: it cannot but miss.
        proxy.add("*", "", expire(_Everything()))
        eventually(
            lambda: load(engine, run_of(1)) != OK and engine.stats().health is Health.MISS_ONLY,
            "it gives up",
        )
        assert "credentials" in engine.stats().health_reason
        assert load(engine, run_of(1)) == {Reason.MISS}
        proxy.clear()
        credentials.expired.update(credentials.tokens)
        proxy.add("*", "", expire(credentials.expired))
        assert engine.refresh(TIMEOUT_S)
        assert engine.stats().health is Health.RUNNING
        assert load(engine, run_of(1)) == OK
        said = caplog.text + repr(engine.object_stats()) + repr(engine._client)
        for secret in (*credentials.tokens, "not-a-secret"):
            assert secret not in said


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


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
    finally:
        engine.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "credentials" in warnings[0]
    for secret in ("token-of-mine", "not-a-secret", "key-of-tests"):
        assert secret not in caplog.text + engine.stats().health_reason

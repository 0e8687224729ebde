"""The client: what comes from the environment, real requests over HTTP, causes, and no secrets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from sglang_tiered.errors import ConfigError
from sglang_tiered.storage.bucket.requests import BucketError, Failure, Requests, explain

KEY_ID, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMIbPxRfiCYEXAMPLEKEY"


def opened(url: str, **changes: Any) -> Requests:
    return Requests(url, **{"timeout_s": 5.0, **changes})


def failure(call: Any, *arguments: Any, **named: Any) -> BucketError:
    with pytest.raises(BucketError) as caught:
        call(*arguments, **named)
    return caught.value


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ALLOW_HTTP", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return monkeypatch


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, environment: pytest.MonkeyPatch) -> Iterator[Any]:
    environment.setenv("AWS_ENDPOINT_URL", server)
    made = boto3.resource("s3", endpoint_url=server).create_bucket(Bucket="tier-test")
    yield made
    made.objects.delete()
    made.delete()


@pytest.mark.parametrize("kind", ["memory", "directory", "s3"])
def test_the_same_requests_everywhere(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "s3":
        request.getfixturevalue("bucket")
    urls = {
        "memory": f"memory://{tmp_path}",
        "directory": (tmp_path / "a folder").as_uri(),
        "s3": "s3://tier-test/some/prefix",
    }
    client, other = opened(urls[kind]), opened(urls[kind])
    names = [f"v1/x/objects/{number:02d}" for number in range(5)]
    for name in names:
        client.put(name, name.encode() * 10)
    assert bytes(other.get(names[1], 150)) == names[1].encode() * 10
    view = other.get(names[1], 9)
    assert (bytes(view), view.format, view.ndim) == ((names[1].encode() * 10)[:9], "B", 1)
    assert len(other.get(names[0], 10_000)) == 150
    assert failure(other.get, "v1/x/objects/99", 5).failure is Failure.NOT_FOUND
    assert other.modified("v1/x/objects/99") is None
    written = other.modified(names[0])
    assert written is not None and abs(written - time.time()) < 60
    listed = sorted(entry.path for chunk in other.listing("v1/x/objects") for entry in chunk)
    assert listed == names
    after = [e.path for chunk in other.listing("v1/x/objects", after=names[2]) for e in chunk]
    assert sorted(after) == names[3:]
    assert other.folders("v1") == ["v1/x"]
    assert other.folders("v2") == []
    client.delete([*names[:2], "v1/x/objects/99"])
    client.delete(["v1/x/objects/99"])
    listed = sorted(entry.path for chunk in other.listing("v1/x/objects") for entry in chunk)
    assert listed == names[2:]
    last = [each for chunk in other.listing("v1/x") for each in chunk][-1]
    assert client.replace(last, b"new") and not client.replace(last, b"newer")
    assert bytes(other.get(last.path, 5)) == b"new"
    assert not client.replace(last._replace(path="v1/x/objects/99"), b"1")
    assert client.troubles == {}


def test_plain_http_only_where_the_endpoint_says_so(
    server: str, environment: pytest.MonkeyPatch
) -> None:
    host = server.removeprefix("http://")
    environment.setenv("AWS_ENDPOINT_URL", f"https://{host}")
    found = failure(opened("s3://tier-test").get, "v1/x", 1)
    assert found.failure is Failure.UNAVAILABLE
    environment.setenv("AWS_CA_BUNDLE", "/no/such/file")
    with pytest.raises(ConfigError, match="AWS_CA_BUNDLE /no/such/file cannot be read"):
        opened("s3://tier-test")


def test_a_silent_server_fails_in_time(environment: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        client = opened("s3://tier-test", timeout_s=0.3)
        began = time.monotonic()
        found = failure(client.get, "v1/x", 10)
        assert time.monotonic() - began < 8.0
        assert "not answered in time" in found.clause


def test_no_secret_is_in_anything_that_is_shown(
    bucket: Any, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    client = opened("s3://tier-test/prefix")
    found = failure(client.get, "v1/x", 1)
    shown = repr(client) + repr(found) + str(found) + caplog.text
    assert KEY_ID not in shown
    assert SECRET not in shown
    assert "127.0.0.1" not in shown
    assert found.__cause__ is None
    assert found.__suppress_context__


class GenericError(Exception):
    """As the library's."""


SHOWN = "AKIAEXAMPLE http://192.0.2.7:9000/bucket"


def status(code: int, rest: str = "") -> GenericError:
    return GenericError(f"{SHOWN} - Server returned non-2xx status code: {code} {rest}")


@pytest.mark.parametrize(
    ("error", "failure", "says"),
    [
        (FileNotFoundError(SHOWN), Failure.NOT_FOUND, "no such object"),
        (FileNotFoundError("<Code>NoSuchBucket</Code>"), Failure.DENIED, "no such bucket"),
        (status(416, "Range Not Satisfiable"), Failure.BAD_RANGE, "beyond the end"),
        (status(403, "AccessDenied"), Failure.DENIED, "no permission"),
        (status(503, "SlowDown"), Failure.UNAVAILABLE, "status 503"),
        (status(400, "<Code>ExpiredToken</Code>"), Failure.DENIED, "wrong or expired"),
        (PermissionError(13, SHOWN), Failure.DENIED, "no permission"),
        (GenericError("kind: Timeout " + SHOWN), Failure.UNAVAILABLE, "in time"),
        (GenericError("kind: Connect, " + SHOWN), Failure.UNAVAILABLE, "no connection"),
        (GenericError("PUT http://192.0.2.1/latest/api/token"), Failure.DENIED, "no credentials"),
        (GenericError("source: BadScheme"), Failure.DENIED, "not https"),
        (OSError(5, "Input/output error", SHOWN), Failure.UNAVAILABLE, "Input/output error"),
        (GenericError(SHOWN), Failure.UNAVAILABLE, "failed (GenericError)"),
    ],
)
def test_a_cause_is_recognized_without_showing_secrets(
    error: Exception, failure: Failure, says: str
) -> None:
    found = explain(error, "get")
    assert found.failure is failure
    assert found.clause.startswith("get ")
    assert says in found.clause
    assert "AKIA" not in repr(found) + found.clause
    assert "192.0.2" not in found.clause

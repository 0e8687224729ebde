"""Fixtures of the fault tests: one S3 server for all, a bucket for each test; a Redis for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from object_proxy import FaultProxy
from object_server import ObjectServer, s3_environment
from peer_servers import Servers
from redis_server import RedisServer
from route_mocks import Mocks
from transfer_pair import Shape, decode, prefill
from transfer_strangers import StrangePrefill

from server_process import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transfer_pair import Decode, Prefill


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        yield server


@pytest.fixture
def proxy(object_server: ObjectServer) -> Iterator[FaultProxy]:
    with FaultProxy(object_server.address) as proxy:
        yield proxy


@pytest.fixture
def s3_url(object_server: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of the test's own; the environment leads there by way of the proxy."""
    for name, value in s3_environment(proxy.url).items():
        monkeypatch.setenv(name, value)
    return f"s3://{object_server.make_bucket()}/tier"


@pytest.fixture(params=["directory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A bucket of either kind."""
    if request.param == "directory":
        return tmp_path.as_uri()
    found: str = request.getfixturevalue("s3_url")
    return found


@pytest.fixture(scope="module")
def mocks() -> Iterator[Mocks]:
    """Three servers that fail as they are told."""
    made = Mocks([free_port() for _ in range(3)])
    yield made
    made.close()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis of the test's own, which it may kill."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def sender(request: pytest.FixtureRequest) -> Iterator[Prefill]:
    """A prefill endpoint of the module's ``SETTINGS`` and ``SHAPE``."""
    with prefill(**_endpoint(request)) as one:
        yield one


@pytest.fixture
def receiver(request: pytest.FixtureRequest) -> Iterator[Decode]:
    with decode(**_endpoint(request)) as one:
        yield one


@pytest.fixture
def stranger() -> Iterator[StrangePrefill]:
    with StrangePrefill() as one:
        yield one


def _endpoint(request: pytest.FixtureRequest) -> dict[str, Any]:
    module = request.module
    return {"shape": getattr(module, "SHAPE", Shape()), "settings": module.SETTINGS}


@pytest.fixture
def servers() -> Iterator[Servers]:
    with Servers() as servers:
        yield servers

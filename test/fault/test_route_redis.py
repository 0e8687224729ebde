"""A picker finds servers in a real Redis, and keeps them when that is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis_server import RedisServer
from route_front import Front
from route_mocks import Mock, Mocks

from kit.waiting import eventually
from sglang_tiered.sharing.addresses import Role, Serving
from sglang_tiered.sharing.index_url import parse_index_url
from sglang_tiered.sharing.membership import Membership

pytestmark = pytest.mark.timeout(120)


def name_in(redis: RedisServer, server: Mock) -> None:
    member = Membership(
        parse_index_url(redis.url),
        namespace=lambda: bytes(32),
        server=f"{server.port:032x}",
        host="127.0.0.1",
        port=7000,
        timeout_s=1.0,
        expiry_s=60.0,
    )
    member.serve(lambda _: Serving(server.url, Role.AGGREGATED, 0))
    member.exchange()


def test_servers_stay_when_their_redis_is_gone(
    redis_server: RedisServer, mocks: Mocks, tmp_path: Path
) -> None:
    name_in(redis_server, mocks[0])
    front = Front.start(tmp_path, [], "--servers", redis_server.url, "--envoy", "off")
    try:
        front.wait_until_ready(1)
        redis_server.kill()
        eventually(lambda: "the servers stay as they are" in front.log, "it asks again")
        assert [row["url"] for row in front.servers() if row["ready"]] == [mocks[0].url]
        redis_server.start()  # it has forgotten
        name_in(redis_server, mocks[1])
        front.wait_until_ready(2)
        assert {row["url"] for row in front.servers()} == {mocks[0].url, mocks[1].url}
        mocks.run(mocks[0].die())
        eventually(lambda: [row["url"] for row in front.servers()] == [mocks[1].url])
        redis_server.client.flushall()
        eventually(lambda: "names no server" in front.log)
        assert [row["url"] for row in front.servers() if row["ready"]] == [mocks[1].url]
    finally:
        front.close()

"""A picker finds servers in a real Redis, and keeps them when that is gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from sglang_tiered.route import fleet as fleets
from sglang_tiered.route.fleet import Fleet
from sglang_tiered.route.source import Source
from sglang_tiered.sharing.index_url import parse_index_url
from sglang_tiered.sharing.membership import Membership
from sglang_tiered.sharing.serving import Role, Serving

if TYPE_CHECKING:
    from redis_server import RedisServer

pytestmark = pytest.mark.timeout(120)

DEADLINE_S = 30.0


def test_servers_stay_when_their_redis_is_gone(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "RESOLVE_S", 0.05)
    monkeypatch.setattr(fleets, "LOOK_S", 0.05)

    def name(number: int) -> None:
        member = Membership(
            parse_index_url(redis_server.url),
            namespace=lambda: bytes(32),
            server=f"{number:032x}",
            host="127.0.0.1",
            port=7000 + number,
            timeout_s=1.0,
            expiry_s=60.0,
        )
        member.serve(lambda _: Serving(f"http://127.0.0.1:{number}", Role.AGGREGATED, 0))
        member.exchange()

    async def run() -> None:
        source = Source(redis_server.url)
        asked, resolved = 0, source.resolved

        async def count() -> dict[str, str]:
            nonlocal asked
            asked += 1
            return await resolved()

        monkeypatch.setattr(source, "resolved", count)
        fleet = Fleet(source)
        work = asyncio.create_task(fleet.run())

        async def until_it_has(*addresses: str) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while set(fleet.members) != set(addresses):
                    await asyncio.sleep(0.01)

        try:
            await until_it_has("127.0.0.1:1")
            redis_server.kill()
            before = asked
            async with asyncio.timeout(DEADLINE_S):
                while asked < before + 3:
                    await asyncio.sleep(0.01)
            assert set(fleet.members) == {"127.0.0.1:1"}
            redis_server.start()
            name(2)
            await until_it_has("127.0.0.1:2")
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await fleet.close()

    name(1)
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(run())

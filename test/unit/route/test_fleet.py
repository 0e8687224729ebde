"""Servers that answer the picker with too much, with nonsense, or with somebody else's address: it
goes on asking them, and keeps none of it."""

from __future__ import annotations

import asyncio
import gzip
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from kit.cost_records import record_of
from sglang_tiered.policy.cost_model import CostModel, PrefillCost
from sglang_tiered.policy.server_costs import EventSource, ServerCosts, costs_key
from sglang_tiered.route.fleet import Fleet
from sglang_tiered.route.source import Source

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    import pytest

DEADLINE_S = 20.0
ENOUGH_BYTES = 32 << 20
"""More than the picker may take of any answer, less than a server can send before its deadline."""
MODEL = CostModel(
    page_tokens=64,
    bytes_per_token=1000,
    prefill=PrefillCost((1e-3, 1e-4, 1e-9), token_bytes=1000),
)


class Server:
    """``costs`` and ``info`` are what it answers; a function answers itself."""

    def __init__(self) -> None:
        self.costs: Any = self.told(0)
        self.info = b"{}"
        self.tokenize: Any = None
        self.num_asked = self.num_ready = self.num_sent = 0
        self.keys: set[str | None] = set()

    @staticmethod
    def told(*ranks: int, **more: Any) -> bytes:
        records = tuple(record_of(MODEL, rank=rank) for rank in ranks)
        return msgspec.json.encode(ServerCosts(draining=False, num_ranks=8, ranks=records, **more))

    async def answer_costs(self, request: web.Request) -> web.StreamResponse:
        self.num_asked += 1
        self.keys.add(request.headers.get("Authorization"))
        if callable(self.costs):
            answer: web.StreamResponse = await self.costs(request)
            return answer
        return web.Response(body=self.costs)

    async def answer_ready(self, request: web.Request) -> web.StreamResponse:
        self.num_ready += 1
        assert "Authorization" not in request.headers
        return web.Response()

    async def answer_info(self, request: web.Request) -> web.StreamResponse:
        assert "Authorization" not in request.headers
        return web.Response(body=self.info)

    async def endless(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while self.num_sent < 4 * ENOUGH_BYTES:
            await answer.write(b" " * (1 << 20))
            self.num_sent += 1 << 20
        return answer


async def serve(server: Server) -> web.AppRunner:
    app = web.Application()
    app.router.add_get("/tier/costs", server.answer_costs)
    app.router.add_get("/ready", server.answer_ready)
    app.router.add_get("/server_info", server.answer_info)
    if server.tokenize is not None:
        app.router.add_post("/v1/tokenize", server.tokenize)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


def follow(
    folder: Path,
    server: Server,
    steps: Callable[[Fleet, Callable[..., Any]], Awaitable[None]],
    *others: Server,
) -> None:
    """Have a fleet of these servers, and take ``steps`` with it."""

    async def until(is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not is_so():
                await asyncio.sleep(0.01)

    async def run() -> None:
        runners = [await serve(one) for one in (server, *others)]
        file = folder / "servers"
        file.write_text("".join(f"http://127.0.0.1:{one.addresses[0][1]}\n" for one in runners))
        fleet = Fleet(Source(str(file)), key="secret")
        work = asyncio.create_task(fleet.run())
        try:
            await until(lambda: server.num_asked)
            await steps(fleet, until)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await fleet.close()
            for one in runners:
                await one.cleanup()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(run())


def only(fleet: Fleet) -> Any:
    (member,) = fleet.members.values()
    return member


def test_endless_answer_is_cut_off(tmp_path: Path) -> None:
    server = Server()
    server.costs = server.endless

    async def steps(fleet: Fleet, until: Callable[..., Any]) -> None:
        await until(lambda: server.num_sent)
        sent = -1
        while sent != server.num_sent:  # until nobody reads on
            sent = server.num_sent
            await asyncio.sleep(0.2)
        assert sent < ENOUGH_BYTES
        await until(lambda: "more than" in only(fleet).problem)

    follow(tmp_path, server, steps)


def test_packed_answer_is_not_unpacked(tmp_path: Path) -> None:
    server = Server()
    packed = gzip.compress(server.costs)

    async def costs(_: web.Request) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    server.costs = costs

    async def steps(fleet: Fleet, until: Callable[..., Any]) -> None:
        await until(lambda: server.num_asked > 1)
        assert "no answer of" in only(fleet).problem

    follow(tmp_path, server, steps)


def test_half_without_costs_tells_its_part(tmp_path: Path) -> None:
    async def none(_: web.Request) -> web.Response:
        return web.Response(status=404)

    server = Server()
    server.costs = none
    server.info = b'{"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998}'

    async def steps(fleet: Fleet, until: Callable[..., Any]) -> None:
        await until(lambda: only(fleet).role == "prefill")
        assert only(fleet).bootstrap_port == 8998

    follow(tmp_path, server, steps)


def test_restarted_server_keeps_no_role_or_price(tmp_path: Path) -> None:
    """One that told costs comes back without, as the other half."""
    server = Server()
    server.info = b'{"disaggregation_mode": "decode"}'

    async def none(_: web.Request) -> web.Response:
        return web.Response(status=404)

    async def steps(fleet: Fleet, until: Callable[..., Any]) -> None:
        await until(lambda: only(fleet).replicas)
        server.costs = none
        await until(lambda: server.num_ready)
        assert (only(fleet).role, only(fleet).replicas) == ("decode", {})

    follow(tmp_path, server, steps)


def test_server_cannot_send_the_picker_elsewhere(tmp_path: Path) -> None:
    """The answer there would count as its own."""
    server = Server()

    async def costs(_: web.Request) -> web.Response:
        raise web.HTTPFound("/ready")

    server.costs = costs

    async def steps(fleet: Fleet, until: Callable[..., Any]) -> None:
        await until(lambda: server.num_asked > 2)
        assert server.num_ready == 0 and "302" in only(fleet).problem

    follow(tmp_path, server, steps)


def test_replica_that_returns_is_asked_on(tmp_path: Path) -> None:
    server = Server()
    server.costs = server.told(0, 1)

    async def steps(fleet: Fleet, until: Callable[..., Any]) -> None:
        await until(lambda: len(only(fleet).replicas) == 2)
        for ranks in ((1,), (0, 1), (1, 1), (0,)):
            server.costs = server.told(*ranks)
            await until(lambda ranks=ranks: set(only(fleet).replicas) == set(ranks))
        asked = server.num_asked
        await until(lambda: server.num_asked > asked + 1)
        assert len(fleet.view.states) == 2, "places are used again"

    follow(tmp_path, server, steps)


def test_ranks_without_end_are_refused(tmp_path: Path) -> None:
    server = Server()
    server.costs = server.told(1 << 40)

    async def steps(fleet: Fleet, until: Callable[..., Any]) -> None:
        await until(lambda: "no answer of" in only(fleet).problem)
        assert not fleet.view.states

    follow(tmp_path, server, steps)


def test_nonsense_about_events_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sglang_tiered.route.fleet.EVENTS_AGAIN_S", 0.05)
    server = Server()
    server.costs = server.told(0, events=EventSource("\0", 1))

    async def steps(fleet: Fleet, until: Callable[..., Any]) -> None:
        await until(lambda: caplog.text.count("cannot be followed") > 2)
        assert only(fleet).is_up

    follow(tmp_path, server, steps)


def test_servers_learn_no_operators_key(tmp_path: Path) -> None:
    """Who takes the address of one, or can name it, would have what purges the others."""
    server = Server()

    async def steps(_: Fleet, until: Callable[..., Any]) -> None:
        async def none(_: web.Request) -> web.Response:
            return web.Response(status=404)

        await until(lambda: server.num_asked > 1)
        server.costs = none
        await until(lambda: server.num_ready)
        assert server.keys == {f"Bearer {costs_key('secret')}"} != {"Bearer secret"}

    follow(tmp_path, server, steps)


def test_slow_answers_leave_a_server_ready(tmp_path: Path) -> None:
    """At overload the process that tells costs is busy with prompts."""
    server = Server()

    async def costs(_: web.Request) -> web.Response:
        await asyncio.sleep(1.2)
        return web.Response(body=server.told(0))

    async def steps(fleet: Fleet, until: Callable[..., Any]) -> None:
        await until(lambda: only(fleet).is_up)
        server.costs = costs
        asked = server.num_asked
        while server.num_asked < asked + 4:
            assert only(fleet).is_ready(fleet._clock())
            await asyncio.sleep(0.02)

    follow(tmp_path, server, steps)


def test_refused_connection_is_believed_at_once(tmp_path: Path) -> None:
    server = Server()

    async def steps(fleet: Fleet, until: Callable[..., Any]) -> None:
        await until(lambda: only(fleet).is_up)
        only(fleet).url = "http://127.0.0.1:1"
        await until(lambda: not only(fleet).is_up)
        assert only(fleet).problem.startswith("does not answer")

    follow(tmp_path, server, steps)


def test_tokens_are_asked_of_whoever_answers(tmp_path: Path) -> None:
    servers = Server(), Server()
    asked = [0, 0]

    def tokenizer(number: int, status: int) -> Any:
        async def answer(_: web.Request) -> web.Response:
            asked[number] += 1
            return web.json_response({"tokens": [number]}, status=status)

        return answer

    async def steps(fleet: Fleet, until: Callable[..., Any]) -> None:
        await until(lambda: len(fleet.members) == 2)
        await until(lambda: all(one.is_up for one in fleet.members.values()))
        for _ in range(20):
            assert await fleet.ask("/v1/tokenize", {}, {}) == {"tokens": [1]}
        assert asked[0] > 0 and asked[1] == 20, "another is first each time"

    servers[0].tokenize, servers[1].tokenize = tokenizer(0, 500), tokenizer(1, 200)
    follow(tmp_path, servers[0], steps, servers[1])

"""Servers that answer as SGLang does, and fail as they are told: the head of a chat's answer comes
with the first token. All of them live on one thread."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from kit.cost_records import record_of
from sglang_tiered.policy.cost_model import CostModel, PrefillCost
from sglang_tiered.policy.server_costs import RankCosts, ServerCosts

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

__all__ = ["PAGE", "Mock", "Mocks"]

PAGE = 64
NUM_TOKENS = 5
NUM_GATHERED = 20
TOKEN_S = 0.05
START_S = 20.0
_MODEL = CostModel(
    page_tokens=PAGE,
    bytes_per_token=1000,
    prefill=PrefillCost((1e-3, 1e-4, 1e-9), token_bytes=1000),
)


@dataclass(eq=False)
class Mock:
    """``fails``: how it treats requests: ``503``, ``reset``, ``late`` (a moment after they came),
    ``at-head``, ``mid-stream``, ``hang``, ``gather`` (503 to all together). ``costs``: fields of
    its record, None without tiers."""

    port: int
    fails: str = ""
    is_draining: bool = False
    costs: dict[str, Any] | None = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)
    runner: web.AppRunner | None = None
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def num_seen(self) -> int:
        return len(self.seen)

    def record(self) -> RankCosts:
        more = {"boot": f"{self.port:032x}", **(self.costs or {})}
        return record_of(_MODEL, **more)

    # ---- What it answers ----

    async def _costs(self, _: web.Request) -> web.Response:
        if self.costs is None:
            return web.Response(status=404)
        told = ServerCosts(draining=self.is_draining, num_ranks=1, ranks=(self.record(),))
        return web.Response(body=msgspec.json.encode(told), content_type="application/json")

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_draining else 200)

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json()).get("prompt", "")
        return web.json_response({"tokens": list(text.encode())})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append({"length": len(body), "headers": headers, "path": request.path})
        assert isinstance(request.transport, asyncio.Transport)
        if self.fails == "503":
            return web.json_response({"error": "full"}, status=503)
        if self.fails == "gather":  # and fail together
            if self.num_seen >= NUM_GATHERED:
                self.let_go.set()
            await self.let_go.wait()
            return web.json_response({"error": "full"}, status=503)
        if self.fails == "hang":
            await self.let_go.wait()
        if self.fails == "late":
            await asyncio.sleep(0.02)
        if self.fails in ("reset", "late"):
            request.transport.abort()
            return web.Response()
        answer = web.StreamResponse(headers={"x-served-by": self.address})
        await answer.prepare(request)
        for number in range(NUM_TOKENS):
            await answer.write(b"data: %d\n\n" % number)
            if self.fails == "mid-stream":
                await asyncio.sleep(TOKEN_S)
            if (self.fails, number) in (("mid-stream", 2), ("at-head", 0)):
                request.transport.abort()
                return answer
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/tier/costs", self._costs)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/v1/tokenize", self._tokenize)
        for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            app.router.add_post(path, self._chat)
        app.router.add_get("/v1/models", self._ready)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def die(self) -> None:
        """As by ``kill -9``: connections are reset, and nobody listens."""
        assert self.runner is not None and self.runner.server is not None
        for connection in list(self.runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self.runner.cleanup()
        self.runner = None


class Mocks:
    """``run`` runs what mocks do on their thread."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._loop = asyncio.SelectorEventLoop()  # whatever SGLang's import made the default
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.all = [Mock(port) for port in ports]
        for mock in self.all:
            self.run(mock.start())

    def __getitem__(self, number: int) -> Mock:
        return self.all[number]

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    def well(self) -> None:
        """Have all of them work, and forget what they saw."""
        for mock in self.all:
            mock.fails, mock.is_draining, mock.costs = "", False, {}
            mock.seen.clear()
            self._loop.call_soon_threadsafe(mock.let_go.set)
            if mock.runner is None:
                self.run(mock.start())
            mock.let_go = asyncio.Event()

    def close(self) -> None:
        for mock in self.all:
            if mock.runner is not None:
                self.run(mock.die())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

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
from sglang_tiered.policy.server_costs import ABANDONED, EventSource, ServerCosts

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator


PAGE = 64
NUM_TOKENS = 5
TOKEN_S = 0.05
START_S = 20.0
MODEL = CostModel(
    page_tokens=PAGE,
    bytes_per_token=1000,
    prefill=PrefillCost((1e-3, 1e-4, 1e-9), token_bytes=1000),
)


@dataclass(eq=False)
class Mock:
    """``fails``: how it treats requests: ``503``, ``reset``, ``late`` (a moment after they came),
    ``at-head``, ``mid-stream``, ``hang``. ``costs``: fields of
    its records, one of each of ``ranks``; a status instead; or a function that answers. ``seen``
    are its requests, ``asked`` the headers with which its costs were asked for."""

    port: int = 0
    fails: str = ""
    is_draining: bool = False
    costs: Any = field(default_factory=dict)
    ranks: tuple[int, ...] = (0,)
    events: EventSource | None = None
    info: Any = field(default_factory=dict)
    switch: Any = None
    """Answers an order to take another role; without it the order is carried out."""
    orders: list[dict[str, Any]] = field(default_factory=list)
    """Those to take another role, with the keys that came with them."""
    tokens: int = 200
    """The status with which it tells tokens."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
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

    @property
    def abandoned(self) -> set[str]:
        """Rooms of which it was told that nobody will ask it for them."""
        told = (one.get(ABANDONED, "") for one in self.asked)
        return {room for line in told for room in line.split(",") if room}

    # ---- What it answers ----

    async def _costs(self, request: web.Request) -> web.StreamResponse:
        self.asked.append({name.lower(): value for name, value in request.headers.items()})
        if callable(self.costs):
            answer: web.StreamResponse = await self.costs(request)
            return answer
        if isinstance(self.costs, int):
            return web.json_response({"error": "as it was told"}, status=self.costs)
        return web.Response(body=self.told(), content_type="application/json")

    def told(self) -> bytes:
        more = self.costs if isinstance(self.costs, dict) else {}
        records = (
            record_of(MODEL, **{"boot": f"{self.port:032x}", "rank": rank, **more})
            for rank in self.ranks
        )
        costs = ServerCosts(
            draining=self.is_draining, num_ranks=8, ranks=tuple(records), events=self.events
        )
        return msgspec.json.encode(costs)

    async def _ready(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.Response(status=503 if self.is_draining else 200)

    async def _info(self, request: web.Request) -> web.Response:
        self._note(request)
        if isinstance(self.info, int):
            return web.Response(status=self.info)
        return web.json_response(self.info)

    async def _role(self, request: web.Request) -> web.StreamResponse:
        order = await request.json()
        self.orders.append({**order, "key": request.headers.get("Authorization", "")})
        if self.switch is not None:
            answer: web.StreamResponse = await self.switch(request)
            return answer
        self.costs = {**self.costs, "role": order["new_role"]}
        return web.json_response({"success": True, "message": "ok", "safe_to_restore": True})

    def _note(self, request: web.Request) -> None:
        assert "Authorization" not in request.headers, "of an operator"
        self.paths.append(request.path)

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        if self.fails == "hang":
            await self.let_go.wait()
        text = (await request.json()).get("prompt", "")
        return web.json_response({"tokens": list(text.encode())}, status=self.tokens)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append({"length": len(body), "headers": headers, "path": request.path})
        assert isinstance(request.transport, asyncio.Transport)
        if self.fails == "503":
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
        for path, answer in (
            ("/tier/costs", self._costs),
            ("/ready", self._ready),
            ("/v1/models", self._ready),
            ("/server_info", self._info),
        ):
            app.router.add_get(path, answer)
        app.router.add_post("/v1/tokenize", self._tokenize)
        app.router.add_post("/pd_role_switch", self._role)
        for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            app.router.add_post(path, self._chat)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self.runner.addresses[0][1]

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

    def __init__(self, ports: Iterable[int]) -> None:
        self._loop = asyncio.SelectorEventLoop()  # whatever SGLang's import made the default
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.all = [Mock(port) for port in ports]
        for mock in self.all:
            self.run(mock.start())

    def __getitem__(self, number: int) -> Mock:
        return self.all[number]

    def __iter__(self) -> Iterator[Mock]:
        return iter(self.all)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    def well(self) -> None:
        """Have all of them work, and forget what they saw."""
        for mock in self.all:
            mock.fails, mock.is_draining, mock.costs = "", False, {}
            mock.seen.clear()
            mock.asked.clear()
            self.release(mock)
            if mock.runner is None:
                self.run(mock.start())

    def release(self, mock: Mock) -> None:
        """Have it answer what hangs."""
        self._loop.call_soon_threadsafe(mock.let_go.set)
        mock.let_go = asyncio.Event()

    def close(self) -> None:
        for mock in self.all:
            if mock.runner is not None:
                self.run(mock.die())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

"""A modelled fleet behind HTTP, in real time: each server answers requests, costs and events as a
real one does, and takes as long as the simulator of ``docs/routing.md`` says.

The simulation is that of ``bench_routing``; only who serves a request is decided outside, by the
front that sends it here. Everything is of one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import json
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from sglang_tiered.policy.server_costs import EventSource, ServerCosts
from sglang_tiered.route.prompt import page_keys
from sglang_tiered_lab.trace.cluster.records import Reporter
from sglang_tiered_lab.trace.cluster.residency import DEVICE, HOST, NVME
from sglang_tiered_lab.trace.cluster.server import Job
from sglang_tiered_lab.trace.cluster.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered_lab.trace.cluster.plan import Plan
    from sglang_tiered_lab.trace.replay.server import Request


UNIT_TOKENS = 512
MEDIA = {DEVICE: "GPU", HOST: "CPU_PINNED", NVME: "DISK"}
_MASK = (1 << 16) - 1


def ids_of(request: Request) -> list[int]:
    """A prompt of tokens in which equal units are equal, and others are not. A unit's name stands
    in its first tokens."""
    ids: list[int] = []
    for unit in request.units:
        name = [unit >> shift & _MASK for shift in (0, 16, 32, 48)]
        ids += [*name, *range(UNIT_TOKENS - len(name))]
    return ids[: max(1, request.input_tokens)]


def text_of(request: Request) -> str:
    """The same as text, for a router that compares letters: 64 of each unit."""
    return "".join(f"{unit & (1 << 64) - 1:064x}" for unit in request.units)


class ModelledFleet(Simulation):
    """``start`` it, then send requests to ``ports``; the field ``user`` of a body is the request's
    number. ``is_priced``: whether servers tell costs and events. ``close`` it."""

    def __init__(
        self, plan: Plan, requests: Sequence[Request], ports: Sequence[int], *, is_priced: bool
    ) -> None:
        super().__init__(plan, requests)
        self._known, self.ports, self._is_priced = requests, ports, is_priced
        self._wanted = 0
        self.router.choose = lambda *_: self._wanted  # type: ignore[method-assign]
        self._reporters = [Reporter(server, server.costs) for server in self.servers]
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._keys: dict[int, int] = {}  # of units, which name all before them too
        self._sent: list[int] = [0] * len(ports)
        self.num_served: list[int] = [0] * len(ports)
        self.cached_tokens = self.prompt_tokens = 0
        self._runners: list[web.AppRunner] = []
        self._context = zmq.asyncio.Context()
        self._events: list[Any] = []
        self._ticking: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._began_s = 0.0

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    async def start(self) -> None:
        """Listen, with a port for events above each server's."""
        self._began_s = asyncio.get_running_loop().time()
        for number, port in enumerate(self.ports):
            app = web.Application(client_max_size=1 << 26)
            for path, answer in (
                ("/tier/costs", self._costs),
                ("/server_info", self._info),
                ("/get_server_info", self._info),
                ("/model_info", self._info),
                ("/get_model_info", self._info),
                ("/v1/models", self._models),
                ("/ready", self._ready),
                ("/health", self._ready),
            ):
                app.router.add_get(path, self._of(number, answer))
            app.router.add_post("/v1/completions", self._of(number, self._complete))
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
            self._runners.append(runner)
            socket = self._context.socket(zmq.PUB)
            socket.set(zmq.LINGER, 0)
            socket.bind(f"tcp://127.0.0.1:{port + 1}")
            self._events.append(socket)
        self._ticking = asyncio.create_task(self._tick())

    @staticmethod
    def _of(number: int, answer: Any) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            found: web.StreamResponse = await answer(number, request)
            return found

        return handle

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        for runner in self._runners:
            await runner.cleanup()
        self._context.destroy(linger=0)

    # ---- Time ----

    async def _tick(self) -> None:
        """Let happen what is due."""
        heap = self._heap
        while True:
            while heap and heap[0][0] <= self.now_s:
                self._event()
            self._wake.clear()
            try:
                async with asyncio.timeout(heap[0][0] - self.now_s if heap else None):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _push(self, at_s: float, what: int, payload: object, version: int = 0) -> None:
        super()._push(at_s, what, payload, version)
        if heapq.nsmallest(1, self._heap)[0][0] == at_s and hasattr(self, "_wake"):
            self._wake.set()

    def _answer(self, job: Job, now_s: float) -> None:
        super()._answer(job, now_s)
        found = self._waiting.pop(job.number, None)
        if found is not None and not found.done():
            found.set_result(None)

    def _note_stored(self, server: Any, job: Job, gone: list[list[int]], now_s: float) -> None:
        units = server.stored_units(job)
        super()._note_stored(server, job, gone, now_s)
        keys = [self._keys[unit] for unit in units if unit in self._keys]
        told: list[Any] = [
            {"type": "BlockStored", "block_hashes": keys, "medium": MEDIA[tier]}
            for tier in self._stored_in
        ]
        for tier, dropped in zip((DEVICE, HOST, NVME), gone, strict=True):
            lost = [self._keys[unit] for unit in dropped if unit in self._keys]
            told.append({"type": "BlockRemoved", "block_hashes": lost, "medium": MEDIA[tier]})
        number, at = server.number, self._sent[server.number]
        self._sent[number] += 1
        frames = [b"", at.to_bytes(8, "big"), msgspec.msgpack.encode([now_s, told])]
        asyncio.ensure_future(self._events[number].send_multipart(frames))

    # ---- HTTP ----

    async def _complete(self, number: int, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        at = int(body["user"])
        one = self._known[at]
        if isinstance(body["prompt"], list):
            for unit, key in zip(
                one.units, page_keys(array("I", body["prompt"]), UNIT_TOKENS), strict=False
            ):
                self._keys[unit] = key
        now_s = self.now_s
        job = Job(at, one, 0, now_s)
        self._waiting[at] = answered = asyncio.get_running_loop().create_future()
        self._wanted = number
        self._send(job, now_s)
        self._wake.set()
        await answered
        self.num_served[number] += 1
        self.prompt_tokens += job.tokens
        self.cached_tokens += sum(job.hits)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        text = json.dumps({"choices": [{"index": 0, "text": "a"}]})
        await answer.write(f"data: {text}\n\ndata: [DONE]\n\n".encode())
        await answer.write_eof()
        return answer

    async def _costs(self, number: int, _: web.Request) -> web.Response:
        if not self._is_priced:
            return web.Response(status=404)
        record = self._reporters[number].take(max(self.now_s, self.servers[number].last_s))
        record = msgspec.structs.replace(
            record, boot=f"{number:032x}", namespace="aa", server=f"{number:032x}"
        )
        events = EventSource("127.0.0.1", self.ports[number] + 1)
        told = ServerCosts(draining=False, num_ranks=1, ranks=(record,), events=events)
        return web.Response(body=msgspec.json.encode(told), content_type="application/json")

    async def _info(self, _: int, __: web.Request) -> web.Response:
        return web.json_response({"model_path": "m"})

    async def _models(self, _: int, __: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def _ready(self, _: int, __: web.Request) -> web.Response:
        return web.json_response({})

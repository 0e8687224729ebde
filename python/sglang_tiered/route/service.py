"""The picker's process: its two ports, and what stands behind them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from aiohttp import web

from sglang_tiered.errors import ConfigError
from sglang_tiered.policy.server_costs import ROLES
from sglang_tiered.route.balancer import Balancer
from sglang_tiered.route.classes import Classes
from sglang_tiered.route.ext_proc import (
    MAX_MESSAGE_BYTES,
    Decider,
    ExtProc,
    refusal_body,
    subset_of,
)
from sglang_tiered.route.fleet import Fleet
from sglang_tiered.route.numbers import Numbers
from sglang_tiered.route.picker import Picked, Picker, Refused
from sglang_tiered.route.record import Recorder
from sglang_tiered.route.source import Source
from sglang_tiered.route.tokens import LocalTokenizer, TokenReader

if TYPE_CHECKING:
    from typing import Any

    from sglang_tiered.route.fleet import Member
    from sglang_tiered.route.settings import RouteConfig


PARENT_S = 0.5
MAX_BODY_BYTES = 64 << 20
IDLE = "is sent nothing: a server that does both halves is ready, and gets all requests"


class PickerService:
    """Raises ``ConfigError`` for what cannot work, before anything is opened."""

    def __init__(self, config: RouteConfig) -> None:
        self._config = config
        self._source, self._classes = Source(config.servers), Classes(config.classes)
        self._key = read_key(config.key_file)
        self._tokenizer = LocalTokenizer(Path(config.tokenizer)) if config.tokenizer else None
        self._recorder = Recorder(Path(config.record)) if config.record else None
        self._numbers = Numbers()

    async def run(self, parent: int | None = None) -> None:
        """Serve until SIGTERM, or until the parent is another process. Raises ``ConfigError`` for a
        port that is taken."""
        config = self._config
        members = None if config.members is None else Path(config.members)
        self.fleet = Fleet(self._source, key=self._key, members_directory=members)
        self.reader = TokenReader(
            self._tokenizer, self.fleet.tokenize, config.pick_s / 2, self.fleet.page_sizes
        )
        self.decider = Decider(
            self.reader, Picker(self.fleet), self._classes, self._numbers, self._recorder
        )
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
        ExtProc(self.decider).add_to(server)
        runner = web.AppRunner(self._app(), access_log=None)
        following, ended = map(asyncio.create_task, (self.fleet.run(), _stopped(parent)))
        tasks = [following, ended]
        if self._recorder is not None:
            tasks.append(asyncio.create_task(self._recorder.run()))
        if config.with_balance:
            tasks.append(asyncio.create_task(Balancer(self.fleet, self._numbers, config).run()))
        try:
            await self._listen(server, runner)
            await asyncio.wait({ended, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.stop(1.0)
            await runner.cleanup()
            await self.fleet.close()
            self.reader.close()

    async def _listen(self, server: Any, runner: web.AppRunner) -> None:
        config = self._config
        host = f"[{config.picker_host}]" if ":" in config.picker_host else config.picker_host
        try:
            server.add_insecure_port(f"{host}:{config.grpc_port}")
            await runner.setup()
            await web.TCPSite(runner, config.picker_host, config.http_port).start()
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"ports {config.grpc_port} and {config.http_port} of {config.picker_host} "
                f"cannot be listened at ({error}); stop what listens there, or pass --port."
            ) from error
        await server.start()

    # ---- HTTP ----

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/pick", self._pick)
        app.router.add_get("/servers", self._servers)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _pick(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        headers[":path"] = headers.get("x-original-path", "/v1/chat/completions")
        body, subset = await request.read(), subset_of(headers)
        answer = await self.decider.decide(headers, body, subset, is_awaited=False)
        if isinstance(answer, Refused):
            again = {"Retry-After": str(answer.retry_after_s)}
            body = refusal_body(answer)
            return web.Response(
                status=answer.status, body=body, headers=again, content_type="application/json"
            )
        return web.json_response(_told(answer))

    async def _servers(self, _: web.Request) -> web.Response:
        members = sorted(self.fleet.members.values(), key=lambda one: one.url)
        now = time.monotonic()
        rows = [self._row(one, now) for one in members]
        if any(row["ready"] and row["role"] == ROLES[0] for row in rows):
            for row in rows:
                if row["role"] != ROLES[0]:
                    row["problem"] = row["problem"] or IDLE
        return web.json_response({"servers": rows})

    def _row(self, member: Member, now: float) -> dict[str, Any]:
        view, index = self.fleet.view, self.fleet.index
        return {
            "url": member.url,
            "address": member.address,
            "role": member.role,
            "ready": member.is_ready(now),
            "draining": member.is_draining,
            "problem": member.problem or None,
            "tells_tenants_apart": member.events.by_tenant if member.events else None,
            "tokens_sent": member.tokens_sent,
            "replicas": [
                {
                    "rank": rank,
                    "boot": one.record.boot,
                    "queue_s": round(view.states[one.place].queue_s(now), 6),
                    "slowdown": round(view.states[one.place].slowdown, 4),
                    "pages": index.num_pages(one.place),
                    "stored": one.known.num_pages if one.known and one.known.is_loaded else None,
                }
                for rank, one in sorted(member.replicas.items())
            ],
        }

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.fleet.usable(time.monotonic()) else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        text = self._numbers.text(self.fleet, self.reader, time.monotonic())
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})


def _told(picked: Picked) -> dict[str, Any]:
    """``server`` and the headers come first, each a text: a small reader finds them by pattern."""
    return {
        "server": picked.targets[0].address,
        **picked.headers(),
        "by": picked.by,
        "class": picked.klass.name,
        "num_tokens": picked.prompt.num_tokens,
        "predicted_ttft_s": picked.predicted_s or None,
        "held": dataclasses.asdict(picked.held),
    }


def read_key(path: str | None) -> str | None:
    """Return the key in a file. Raises ``ConfigError``."""
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--server-key-file {path} cannot be read ({error}); name a file with the key."
        ) from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"--server-key-file {path} holds no key; write it there, on one line.")
    return key


def run_picker(config: RouteConfig, *, with_parent: bool) -> int:
    """Serve until SIGTERM, or until the process that started this one ends. Returns the exit
    code."""
    asyncio.run(PickerService(config).run(os.getppid() if with_parent else None))
    return 0


async def _stopped(parent: int | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    while parent in (None, os.getppid()):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PARENT_S):
                await stop.wait()
                return

"""The picker's process: its two ports and what stands behind them, and ``Balancer``, which has
servers change their roles."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import grpc
import msgspec
from aiohttp import web

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import GiB
from sglang_tiered.policy.balance import HALVES, HOLDS, LOOK_S, RoleBalance
from sglang_tiered.policy.server_costs import IN_PROGRESS, NOT_IDLE, ROLES
from sglang_tiered.route.ext_proc import (
    MAX_MESSAGE_BYTES,
    Decider,
    add_to,
    refusal_body,
    subset_of,
)
from sglang_tiered.route.fleet import MAYBE_S, Fleet
from sglang_tiered.route.picker import Picked, Picker, Refused
from sglang_tiered.route.prompt import LocalTokenizer, TokenReader
from sglang_tiered.route.record import Numbers, Recorder
from sglang_tiered.route.settings import Classes, Source, read_key

if TYPE_CHECKING:
    from typing import Any

    from sglang_tiered.policy.balance import RoleSwitch
    from sglang_tiered.route.fleet import Member
    from sglang_tiered.route.settings import RouteConfig


PARENT_S = 0.5
MAX_BODY_BYTES = 64 << 20
IDLE = "is sent nothing: a server that does both halves is ready, and gets all requests"

SWITCH_S = 300.0
"""A server drains for 120 s at most, and may then capture CUDA graphs."""

TOLD_S = 60.0
"""A reason is logged no more often."""

ENDS = {
    "switched": (logging.INFO, "%s has taken its new role: %s"),
    "refused": (logging.WARNING, "%s keeps its role for now: %s"),
    "lost": (logging.WARNING, "whether %s takes its new role will show: %s"),
    "given-up": (logging.ERROR, "%s is asked no more until it restarts: %s"),
}
"""How an order ends, for people."""

_REFUSALS = {
    401: "it answers 401: another operator's key, an earlier program, or a clock five minutes off"
}

logger = logging.getLogger(__name__)


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
        add_to(server, self.decider)
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
                    "queue_s": round(one.state.queue_s(now), 6),
                    "slowdown": round(one.state.slowdown, 4),
                    "pages": len(one.pages),
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


class _Answer(msgspec.Struct):
    """SGLang's, to ``/pd_role_switch``."""

    success: bool
    message: str


class Balancer:
    """``run`` until cancelled."""

    def __init__(self, fleet: Fleet, numbers: Numbers, config: RouteConfig) -> None:
        self._fleet, self._numbers = fleet, numbers
        self._graph_gb = config.balance_graph_memory / GiB
        self._policy = RoleBalance(
            cooldown_s=config.balance_cooldown_s,
            floor=config.balance_floor,
            tpot_s=config.balance_tpot_s,
        )
        self._drains: dict[str, float] = {}  # and since when
        self._told = ""
        self._told_s: dict[str, float] = {}

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except Exception:  # picks go on, and it may pass
                self._numbers.balance.state("failed")
                if self._told != "failed":
                    logger.exception("internal error: roles stay as they are for now")
                self._told = "failed"

    async def _look(self) -> None:
        now = time.monotonic()
        members = self._members(now)
        drains = [name for name, member in members.items() if member.is_draining]
        self._drains = {name: self._drains.get(name, now) for name in drains}
        boots = Counter(member.boot for member in self._fleet.members.values())
        switch = self._policy.look(
            now,
            {
                # One that names another's start could pass the key of its own order on to that.
                name: [one.record for one in member.replicas.values() if boots[member.boot] == 1]
                for name, member in members.items()
                if not member.is_draining
            },
            {name for name, member in members.items() if not member.is_ready(now)},
            is_switching=any(now - since_s < SWITCH_S for since_s in self._drains.values()),
        )
        self._numbers.balanced(self._policy)
        if switch is not None:
            await self._switch(switch, members[switch.server])
        else:
            untold = [one.url for one in members.values() if not one.boot or boots[one.boot] > 1]
            self._tell(", ".join(untold), now)

    def _tell(self, untold: str, now: float) -> None:
        """Log why there is no order where that has changed; each reason once a minute at most."""
        why = self._policy.why
        told = f"{why}: {untold:.300}" if why == "unmeasured" else why
        if told == self._told or {told, self._told} == {"calm", "balanced"}:
            return
        if now - self._told_s.get(why, -math.inf) >= TOLD_S:
            self._told, self._told_s[why] = told, now
            logger.info("roles stay: %s%s", HOLDS[why], told.removeprefix(why))

    def _members(self, now: float) -> dict[str, Member]:
        """Return those that take requests, or will again, by names. At overload all may be late
        with their costs, and roles are wanted then; one refused connection is no end either. One
        that was started again has another name."""
        return {
            f"{one.url} {one.boot}": one
            for one in self._fleet.members.values()
            if one.role in HALVES and now - one.seen_s < MAYBE_S
        }

    async def _switch(self, switch: RoleSwitch, member: Member) -> None:
        logger.info("%s is to take the role %s: %s", member.url, switch.role, switch.reason)
        self._told = "switching"
        member.is_draining = True  # it tells that itself once the order has come
        end, said = "lost", ""
        try:
            end, said = await self._order(switch, member)
        finally:
            self._policy.ended(
                switch, time.monotonic(), switched=end == "switched", again=end != "given-up"
            )
        level, text = ENDS[end]
        logger.log(level, text, member.url, f"{said!r:.200}")
        self._numbers.switches.labels(switch.role, end).inc()

    async def _order(self, switch: RoleSwitch, member: Member) -> tuple[str, str]:
        """Return which of ``ENDS`` an order has, and what was said. Where the answer was lost, or
        is a proxy's, the server may still drain and switch, and tells that with its costs."""
        try:
            status, body = await self._fleet.switch(member, switch.role, self._graph_gb, SWITCH_S)
        except (aiohttp.ClientError, OSError) as error:
            return "lost", str(error) or type(error).__name__
        except ValueError as error:
            return "given-up", str(error)
        if status not in (200, 400):
            return "lost" if status >= 500 else "given-up", _REFUSALS.get(
                status, f"it answers {status}"
            )
        try:
            answer = msgspec.json.decode(body, type=_Answer)
        except (ValueError, RecursionError) as error:
            return "given-up", str(error)
        if answer.success:
            return "switched", answer.message
        is_passing = any(word in answer.message for word in (NOT_IDLE, IN_PROGRESS))
        return "refused" if is_passing else "given-up", answer.message

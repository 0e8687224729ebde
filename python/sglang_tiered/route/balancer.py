"""``Balancer``: has servers change their roles, as ``policy.balance`` decides. One picker's."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from sglang_tiered.flags import GiB
from sglang_tiered.policy.balance import HALVES, HOLDS, LOOK_S, RoleBalance
from sglang_tiered.policy.server_costs import IN_PROGRESS, NOT_IDLE
from sglang_tiered.route.fleet import MAYBE_S

if TYPE_CHECKING:
    from sglang_tiered.policy.balance import RoleSwitch
    from sglang_tiered.route.fleet import Fleet, Member
    from sglang_tiered.route.numbers import Numbers
    from sglang_tiered.route.settings import RouteConfig


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

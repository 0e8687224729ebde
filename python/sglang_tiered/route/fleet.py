"""``Fleet``: the servers that there are, what each costs, and what each holds.

A source names them; each is then asked for its costs again and again, and its events are followed.
Everything here is learnt anew after a restart, and is of one event loop. Nothing that a server
answers ends that, and of no answer more is taken than the largest true one has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import msgspec
import zmq.asyncio

from sglang_tiered.policy.routing import ServerState
from sglang_tiered.policy.server_costs import (
    ABANDONED,
    FRESH_S,
    ROLES,
    SWITCH_CALL,
    EventSource,
    RankCosts,
    call_key,
    costs_key,
    parse_server_costs,
    switch_key,
)
from sglang_tiered.route.envoy import CLUSTERS, read_members, write_members
from sglang_tiered.route.replicas import PageFollower, Replica, follow_events

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from sglang_tiered.route.settings import Source


LOOK_S, RESOLVE_S = 0.5, 5.0
POLL_S, MANY_SERVERS, POLL_MANY_S = 0.25, 50, 1.0
EMPTY = "the Redis of --servers names no server; those that serve stay, and no other is known"
ANSWER_S = 5.0
MAX_COSTS_BYTES, MAX_INFO_BYTES, MAX_TOKENS_BYTES = 2 << 20, 4 << 20, 8 << 20
MAYBE_S = 60.0
"""A server that was silent for longer than ``FRESH_S`` is not ready. For so long it may only be
slow: then it is picked where none is ready."""
EVENTS_AGAIN_S = 5.0
ABANDONED_S, MAX_ABANDONED = 2.0, 256
"""For how long a server is told of a request that nobody will ask it for, and of how many."""
ORDER_S = 300
"""For how long a key for one order opens that: clocks differ by less."""
NEVER = float("-inf")
NOT_ASKED = "not asked yet"

logger = logging.getLogger(__name__)


class _Untold(msgspec.Struct):
    """What a server says of itself where it tells no costs, in SGLang's words."""

    disaggregation_mode: Literal["null", "prefill", "decode"] = "null"
    disaggregation_bootstrap_port: int | None = None
    draining: bool = False


@dataclass(eq=False, slots=True)
class Member:
    """One server. ``replicas`` by their numbers; none of a server without costs, of which only its
    part and the requests that it was sent are known."""

    url: str
    address: str
    replicas: dict[int, Replica] = field(default_factory=dict)
    num_ranks: int = 1
    """Its replicas, with those that have published nothing, or never will."""
    is_draining: bool = False
    is_up: bool = False
    """It refused no connection, and nothing was wrong with its last answer."""
    seen_s: float = NEVER
    problem: str = NOT_ASKED
    tokens_sent: int = 0
    """Of prompts without a first token yet."""
    polling: asyncio.Task[None] | None = None
    events: EventSource | None = None
    abandoned: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_ABANDONED))
    """Rooms of handoffs whose decode half is gone, and until when it is told so."""
    role: str = "aggregated"
    """In a handoff; this one does both halves."""
    bootstrap_port: int | None = None
    """Where its other half asks for a handoff, of a prefill server."""
    cluster_before: str | None = None
    """Where an earlier picker had it, until it tells its role."""

    @property
    def cluster(self) -> str | None:
        """Envoy's cluster for its role, None before it is known."""
        if self.seen_s == NEVER:
            return self.cluster_before
        return "pool" if self.role == "aggregated" else self.role

    @property
    def boot(self) -> str:
        """Of this start of a server that tells costs."""
        return next((one.record.boot for one in self.replicas.values()), "")

    def is_ready(self, now_s: float, fresh_s: float = FRESH_S) -> bool:
        """Whether it takes requests, as far as is known of one that answered so lately."""
        return self.is_up and not self.is_draining and now_s - self.seen_s < fresh_s


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Fleet:
    """``run`` until cancelled, then ``close``. ``members`` is by ``IP:PORT``. ``key``: the
    operator's, of which servers are sent what opens their costs, or one order, and nothing else."""

    def __init__(
        self,
        source: Source,
        *,
        key: str | None = None,
        members_directory: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._directory, self._clock = source, members_directory, clock
        self._asks_with = {} if key is None else _bearer(costs_key(key))
        if key is not None:
            call_key(key, SWITCH_CALL)  # it takes a while, and is kept
        self._key = key
        self.members: dict[str, Member] = {}
        self.stored = PageFollower()
        self._session: aiohttp.ClientSession | None = None
        self._context = zmq.asyncio.Context()

    async def run(self) -> None:
        """Follow the source, and each server of it; before it is read, those that Envoy has."""
        headers = {"Accept-Encoding": "identity"}
        self._session = aiohttp.ClientSession(headers=headers, auto_decompress=False)
        before = {} if self._directory is None else read_members(self._directory)
        self._follow({address: f"http://{address}" for address in before}, before)
        last, due, told = None, NEVER, ""
        while True:
            problem = ""
            try:
                now_read = self._source.read()
                if now_read != last or self._clock() >= due:
                    last, due = now_read, self._clock() + RESOLVE_S
                    found = await self._source.resolved()
                    if self._source.is_redis:  # it forgets in seconds where it takes no writes
                        problem = "" if found else EMPTY
                        found = self._forgotten(found) | found
                    self._follow(found)
            except Exception as error:  # a file, the DNS or a Redis that fails may come back
                problem = f"the servers stay as they are: {error}"
            if problem and problem != told:
                logger.warning("%s", problem)
            told = problem
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """End everything that was started. Envoy goes on with the servers that it has."""
        self._directory = None
        self._follow({})
        if self._session is not None:
            await self._session.close()
        self._context.destroy(linger=0)
        self.stored.close()

    async def tokenize(self, asked: dict[str, Any], authorization: str) -> list[Any] | None:
        """Ask one ready server after another for the tokens of a text, another first each time,
        until one tells them, or that it has none. Returns None where none does in time."""
        headers = {"Authorization": authorization} if authorization else {}
        until_s = self._clock() + ANSWER_S
        ready = [one for one in self.members.values() if one.is_ready(until_s - ANSWER_S)]
        for member in random.sample(ready, len(ready)):
            if (left_s := until_s - self._clock()) <= 0:
                break
            with contextlib.suppress(Exception):  # whatever is wrong with one, others are asked
                status, answer = await self._call(
                    member, "/v1/tokenize", MAX_TOKENS_BYTES, headers, asked, left_s
                )
                if status == 200:
                    tokens: list[Any] = msgspec.json.decode(answer)["tokens"]
                    return tokens
                if status < 500:  # a picture, or a key that is none
                    break
        return None

    async def switch(
        self, member: Member, role: str, graph_gb: float, within_s: float
    ) -> tuple[int, bytes]:
        """Have a server that tells costs take another role. It drains before it answers."""
        asked = {"new_role": role, "decode_cuda_graph_memory_gb": graph_gb}
        until_s, key = int(time.time()) + ORDER_S, self._key
        headers = {} if key is None else _bearer(switch_key(key, member.boot, role, until_s))
        path = SWITCH_CALL.partition(" ")[2]
        return await self._call(member, path, MAX_INFO_BYTES, headers, asked, within_s)

    async def _call(
        self,
        member: Member,
        path: str,
        most: int,
        headers: dict[str, str],
        body: Any = None,
        within_s: float = ANSWER_S,
    ) -> tuple[int, bytes]:
        """Return status and body, as it was sent; no server sends the picker elsewhere. Raises
        ``ValueError`` for one of more than ``most`` bytes."""
        assert self._session is not None
        method, taken = "GET" if body is None else "POST", bytearray()
        timeout = aiohttp.ClientTimeout(total=within_s, sock_connect=ANSWER_S)
        async with self._session.request(
            method,
            member.url + path,
            json=body,
            headers=headers,
            allow_redirects=False,
            timeout=timeout,
        ) as answer:
            async for part in answer.content.iter_any():
                taken += part
                if len(taken) > most:
                    raise ValueError(f"answers {path} with more than {most} bytes")
            return answer.status, bytes(taken)

    def abandon(self, prefill: Member, room: int) -> None:
        """Tell a prefill server that no decode server will ask for a request: Envoy, which mirrored
        it there, does not."""
        prefill.abandoned.append((self._clock() + ABANDONED_S, room))

    # ---- Who there is ----

    def usable(self, now_s: float) -> list[Member]:
        """Return those that requests can be sent to: no half while the other has nobody."""
        ready = [one for one in self.members.values() if one.is_ready(now_s)]
        roles = {one.role for one in ready}
        return [one for one in ready if one.role == ROLES[0] or roles.issuperset(ROLES[1:])]

    def _forgotten(self, found: dict[str, str]) -> dict[str, str]:
        """Return those that are named no more, neither here nor at another address, and serve, as
        may those that were not asked yet."""
        since_s, named = self._clock() - MAYBE_S, set(found.values())
        kept = (
            one
            for one in self.members.values()
            if one.problem == NOT_ASKED or (one.is_up and one.seen_s > since_s)
        )
        return {one.address: one.url for one in kept if one.url not in named}

    def _follow(self, found: Mapping[str, str], before: Mapping[str, str] | None = None) -> None:
        """``before``: the clusters in which an earlier picker had them."""
        for address in self.members.keys() - found.keys():
            member = self.members.pop(address)
            if member.polling is not None:
                member.polling.cancel()
            self._drop(member, list(member.replicas))
            logger.info("%s is gone", member.url)
        for address, url in found.items():
            if address not in self.members:
                member = self.members[address] = Member(url, address)
                member.cluster_before = before[address] if before else None
                member.polling = asyncio.create_task(self._poll(member))
            self.members[address].url = url
        self._write()

    def _drop(self, member: Member, ranks: list[int]) -> None:
        for rank in ranks:
            for work in member.replicas.pop(rank).following:
                work.cancel()

    def _write(self) -> None:
        """Tell Envoy. A server whose role is not known yet is not among them, unless an earlier
        picker had it. One that drains or died stays until the source drops it, as Envoy looks at
        its health by itself."""
        if self._directory is None:
            return
        for cluster in CLUSTERS:
            ours = (one.address for one in self.members.values() if one.cluster == cluster)
            write_members(self._directory, cluster, ours)

    # ---- What each costs ----

    async def _poll(self, member: Member) -> None:
        while True:
            cluster, was_up = member.cluster, member.is_up
            try:
                member.problem = await self._ask_costs(member)
                member.is_up = not member.problem
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                member.problem = f"does not answer ({type(error).__name__})"
                # One that is late has work: its answer counts for a while.
                member.is_up &= not isinstance(error, aiohttp.ClientConnectorError)
            except Exception as error:  # whatever is wrong with a server, it is asked again
                member.problem = str(error) or type(error).__name__
                member.is_up = False
            if not member.problem:
                member.seen_s = self._clock()
                if not was_up:
                    logger.info("%s serves", member.url)
                if cluster != member.cluster:
                    with contextlib.suppress(OSError):  # the next look at the source tries again
                        self._write()
            many = len(self.members) > MANY_SERVERS
            await asyncio.sleep(POLL_MANY_S if many else POLL_S)

    async def _ask_costs(self, member: Member) -> str:
        """Return what is wrong, nothing if the server serves."""
        headers, now = self._asks_with, self._clock()
        if rooms := [str(room) for until_s, room in member.abandoned if now < until_s]:
            headers = {**headers, ABANDONED: ",".join(rooms)}
        status, answer = await self._call(member, "/tier/costs", MAX_COSTS_BYTES, headers)
        if status == 200:
            costs = parse_server_costs(answer)
            member.is_draining, member.events = costs.draining, costs.events
            member.num_ranks = costs.num_ranks
            for one in costs.ranks:
                member.role, member.bootstrap_port = one.role, one.bootstrap_port
            self._report(member, {one.rank: one for one in costs.ranks})
            return ""
        if status in (401, 403):
            return "refuses the key; pass --server-key-file"
        path = "/tier/costs"
        if status == 404:  # no NVMe: no prices
            is_ours = b'"disaggregation_mode"' in answer  # which says it there, and may switch
            if is_ours or member.replicas or not member.is_up:
                if not is_ours:
                    path = "/server_info"
                    status, answer = await self._call(member, path, MAX_INFO_BYTES, {})
                    if status in (401, 403):
                        return "does not say without a key which part it has; have it tell costs"
                    if status >= 500:
                        return f"answers {status} to {path}"
                    answer = answer if status == 200 else b"{}"
                part = msgspec.json.decode(answer, type=_Untold)
                member.role = part.disaggregation_mode.replace("null", "aggregated")
                member.bootstrap_port = part.disaggregation_bootstrap_port
                self._report(member, {})  # what it told before its restart
                member.is_draining, member.events = part.draining, None
            path = "/ready"
            status, _ = await self._call(member, path, MAX_COSTS_BYTES, {})
        return "" if status == 200 else f"answers {status} to {path}"

    def _report(self, member: Member, records: dict[int, RankCosts]) -> None:
        gone = [
            rank
            for rank, one in member.replicas.items()
            if rank not in records or records[rank].boot != one.record.boot
        ]
        self._drop(member, gone)
        now = self._clock()
        for rank, record in records.items():
            replica = member.replicas.get(rank)
            if replica is None:
                replica = Replica(member.url, ServerState(record, now))
                work = asyncio.create_task(self._follow_events(replica, member.events))
                replica.following = work, self.stored.start(replica)
                member.replicas[rank] = replica
            else:
                replica.url = member.url
                replica.state.report(record, now)

    # ---- What each holds ----

    async def _follow_events(self, replica: Replica, source: EventSource | None) -> None:
        if source is None:
            logger.info("%s tells no events; its load decides", replica.url)
            return
        while True:
            try:
                await follow_events(self._context, source, replica)
            except Exception as error:  # as above
                logger.warning("events of %s cannot be followed: %r", replica.url, error)
                replica.pages.forget()
            await asyncio.sleep(EVENTS_AGAIN_S)

    def replicas(self) -> list[Replica]:
        """Return those of all servers."""
        return [one for member in self.members.values() for one in member.replicas.values()]

    def page_sizes(self) -> set[int]:
        """Return in how many tokens the servers' pages are named."""
        return {one.record.page_tokens for one in self.replicas()}

    def sources_of(self, replica: Replica) -> list[Replica]:
        """Return those from which this one can have pages: of the same namespace, and as keyed as
        it is; itself included."""
        record = replica.record
        if not record.namespace:
            return [replica]
        return [
            other
            for other in self.replicas()
            if other.record.namespace == record.namespace and other.record.keyed == record.keyed
        ]

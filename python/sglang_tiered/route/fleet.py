"""``Fleet``: the servers that there are, what each costs, and what each holds.

A source names them; each is then asked for its costs again and again, and its events are followed.
Everything here is learnt anew after a restart, and is of one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from sglang_tiered.errors import ConfigError
from sglang_tiered.policy.router_view import RouterView
from sglang_tiered.policy.server_costs import RankCosts, ServerCosts, parse_server_costs
from sglang_tiered.route.envoy import CLUSTERS, write_members
from sglang_tiered.route.events import follow, publisher_of
from sglang_tiered.route.pages import PageIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Fleet", "Member", "Source"]

LOOK_S, RESOLVE_S = 0.5, 5.0
POLL_S, MANY_SERVERS, POLL_MANY_S = 0.25, 50, 1.0
ANSWER_S = 1.0
FRESH_S = 2.5
"""A server that was silent for longer is not ready."""
EVENTS_AGAIN_S = 5.0

logger = logging.getLogger(__name__)


class Source:
    """Where servers come from: a file of URLs, or a name of the DNS. Raises ``ConfigError``."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._name = re.fullmatch(r"dns://([^/:\s]+):(\d{1,5})", text)
        if self._name is None and "://" in text:
            raise ConfigError(
                f"--servers {text} is neither a file nor dns://NAME:PORT; name one of them."
            )
        self._path = Path(text).expanduser()
        self._known: dict[str, str] = {}
        self.read()

    def read(self) -> list[str] | None:
        """Return the URLs in the file; None for a name, which ``resolved`` asks for."""
        if self._name is not None:
            return None
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--servers {self._text} cannot be read ({error}); name a file with one URL a line."
            ) from error
        # ``- `` is how YAML lists them.
        words = (line.partition("#")[0].strip().removeprefix("- ").strip("\"'") for line in lines)
        return [_checked(word.rstrip("/"), self._text) for word in words if word]

    async def resolved(self) -> dict[str, str]:
        """Return URLs by ``IP:PORT``. A name that cannot be resolved now keeps the address that it
        had, and is missing without one. Raises ``ConfigError``, and ``OSError`` for a name of
        ``dns://``."""
        loop = asyncio.get_running_loop()
        urls = self.read()
        if urls is None:
            assert self._name is not None
            name, port = self._name[1], int(self._name[2])
            entries = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            return {address: f"http://{address}" for address in map(_address, entries)}
        known, self._known = self._known, {}
        for url in urls:
            parts = urlsplit(url)
            try:
                entries = await loop.getaddrinfo(
                    parts.hostname, parts.port, type=socket.SOCK_STREAM
                )
                self._known[url] = _address(entries[0])
            except OSError as error:
                if url in known:
                    self._known[url] = known[url]
                logger.warning("%s cannot be resolved: %s", url, error.strerror)
        return {address: url for url, address in self._known.items()}


def _checked(url: str, source: str) -> str:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme == "http" and parts.hostname and parts.port and not parts.path
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigError(
            f"--servers {source} has {url!r}, which is no URL of a server; write http://HOST:PORT."
        )
    return url


def _address(entry: Sequence[Any]) -> str:
    host, port = str(entry[4][0]), entry[4][1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(eq=False, slots=True)
class Member:
    """One server. ``positions`` are those of its replicas in the ``RouterView``, by their numbers;
    none for a server without tiers, of which only the requests that it was sent are known."""

    url: str
    address: str
    positions: dict[int, int] = field(default_factory=dict)
    costs: ServerCosts | None = None
    is_up: bool = False
    seen_s: float = float("-inf")
    problem: str = "not asked yet"
    tokens_sent: int = 0
    """Of prompts without a first token yet."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    events: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    is_by_tenant: bool | None = None

    @property
    def ranks(self) -> dict[int, RankCosts]:
        """The records of its replicas."""
        return {} if self.costs is None else {one.rank: one for one in self.costs.ranks}

    @property
    def role(self) -> str:
        """Its role in a handoff, ``aggregated`` for one that does both."""
        return next((one.role for one in self.ranks.values()), "aggregated")

    @property
    def cluster(self) -> str:
        """Envoy's cluster for its role."""
        return "pool" if self.role == "aggregated" else self.role

    def is_ready(self, now_s: float) -> bool:
        """Whether it takes requests, as far as is known."""
        draining = self.costs is not None and self.costs.draining
        return self.is_up and not draining and now_s - self.seen_s < FRESH_S


class Fleet:
    """``run`` until cancelled, then ``close``. ``members`` is by ``IP:PORT``."""

    def __init__(
        self,
        source: Source,
        *,
        key: str | None = None,
        members_directory: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._directory, self._clock = source, members_directory, clock
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.members: dict[str, Member] = {}
        self.view, self.index = RouterView(), PageIndex()
        self._free: list[int] = []
        self._written: dict[str, list[str]] = {}
        self._version = 0
        self._session: aiohttp.ClientSession | None = None
        self._context = zmq.asyncio.Context()
        self.was_read = asyncio.Event()
        """Set when the source was read for the first time."""

    async def run(self) -> None:
        """Follow the source, and each server of it."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        self._write()
        last, due, told = None, self._clock(), ""
        while True:
            with contextlib.suppress(ConfigError):
                now_read = self._source.read()
                if now_read != last:
                    last, due = now_read, self._clock()
            if self._clock() >= due:
                due = self._clock() + RESOLVE_S
                try:
                    self._follow(await self._source.resolved())
                    problem = ""
                    self.was_read.set()
                except (ConfigError, OSError) as error:
                    problem = f"the servers stay as they are: {error}"
                if problem and problem != told:
                    logger.warning("%s", problem)
                told = problem
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """End everything that was started."""
        self._follow({})
        if self._session is not None:
            await self._session.close()
        self._context.destroy(linger=0)

    async def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Ask a ready server; None where none answers with 200."""
        now = self._clock()
        for member in self.members.values():
            if self._session is not None and member.is_ready(now):
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                    async with self._session.post(member.url + path, json=body) as answer:
                        return await answer.json() if answer.status == 200 else None
        return None

    # ---- Who there is ----

    def _follow(self, found: dict[str, str]) -> None:
        for address in self.members.keys() - found.keys():
            member = self.members.pop(address)
            for task in (*member.tasks, *member.events.values()):
                task.cancel()
            for position in member.positions.values():
                self.index.forget(position)
                self._free.append(position)
            logger.info("%s is gone", member.url)
        for address, url in found.items():
            if address not in self.members:
                member = self.members[address] = Member(url, address)
                member.tasks.append(asyncio.create_task(self._poll(member)))
        self._write()

    def _write(self) -> None:
        """Tell Envoy. A server whose role is not known yet is not among them; one that drains or
        died stays until the source drops it, as Envoy looks at its health by itself."""
        if self._directory is None:
            return
        known = [one for one in self.members.values() if one.seen_s > float("-inf")]
        for cluster in CLUSTERS:
            addresses = sorted(one.address for one in known if one.cluster == cluster)
            if self._written.get(cluster) != addresses:
                self._version += 1
                write_members(self._directory, cluster, addresses, self._version)
                self._written[cluster] = addresses

    # ---- What each costs ----

    async def _poll(self, member: Member) -> None:
        while True:
            was_up, role = member.seen_s > float("-inf"), member.role
            try:
                member.problem = await self._ask_costs(member)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                member.problem = f"does not answer ({type(error).__name__})"
            except ValueError as error:
                member.problem = str(error)
            member.is_up = not member.problem
            if member.is_up:
                member.seen_s = self._clock()
                if not was_up:
                    logger.info("%s serves", member.url)
                if not was_up or role != member.role:
                    self._write()
            many = len(self.members) > MANY_SERVERS
            await asyncio.sleep(POLL_MANY_S if many else POLL_S)

    async def _ask_costs(self, member: Member) -> str:
        """Return what is wrong, nothing if the server serves."""
        assert self._session is not None
        async with self._session.get(f"{member.url}/tier/costs") as answer:
            if answer.status == 200:
                self._report(member, parse_server_costs(await answer.read()))
                return ""
            if answer.status in (401, 403):
                return "refuses the key; pass --server-key-file"
            if answer.status != 404:
                return f"answers {answer.status} to /tier/costs"
        async with self._session.get(f"{member.url}/ready") as answer:  # no tiers: no prices
            return "" if answer.status == 200 else f"answers {answer.status} to /ready"

    def _report(self, member: Member, costs: ServerCosts) -> None:
        now, before = self._clock(), member.ranks
        member.costs = costs
        for record in costs.ranks:
            position = member.positions.get(record.rank)
            if position is None:
                position = member.positions[record.rank] = self._place(record, now)
            elif before[record.rank].boot != record.boot:
                self.index.forget(position)
                self.view.replace(position, record, now)
                if (task := member.events.pop(record.rank, None)) is not None:
                    task.cancel()
            else:
                self.view.report(position, record, now)
            if record.rank not in member.events:
                work = self._follow_events(member, record.rank, position)
                member.events[record.rank] = asyncio.create_task(work)

    def _place(self, record: RankCosts, now: float) -> int:
        if not self._free:
            return self.view.add(record, now)
        position = self._free.pop()
        self.view.replace(position, record, now)
        return position

    # ---- What each holds ----

    async def _follow_events(self, member: Member, rank: int, position: int) -> None:
        assert self._session is not None
        while True:
            try:
                async with self._session.get(f"{member.url}/server_info") as answer:
                    info = msgspec.json.decode(await answer.read())
                publisher = publisher_of(info, member.url, rank)
                if publisher is None:
                    logger.info("%s tells no events; its load alone decides", member.url)
                    return
                member.is_by_tenant = publisher.is_by_tenant
                await follow(self._context, publisher, self.index, position)
            except (aiohttp.ClientError, TimeoutError):
                pass
            except (
                msgspec.DecodeError,
                zmq.ZMQError,
                AttributeError,
                KeyError,
                ValueError,
            ) as error:
                logger.warning("events of %s cannot be followed: %r", member.url, error)
                self.index.forget(position)
            await asyncio.sleep(EVENTS_AGAIN_S)

    def sources_of(self, position: int, record: RankCosts) -> list[int]:
        """Return the positions from which this replica can have pages: of the same namespace, with
        an index, and as keyed as it is; itself included."""
        if not record.namespace:
            return [position]
        return [
            place
            for member in self.members.values()
            for rank, place in member.positions.items()
            if (other := member.ranks.get(rank)) is not None
            and other.namespace == record.namespace
            and other.keyed == record.keyed
        ]

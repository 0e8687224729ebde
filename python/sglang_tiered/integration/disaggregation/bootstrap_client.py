"""Looks prefill servers up at their bootstrap servers, off the scheduler's thread."""

from __future__ import annotations

import copy
import ipaddress
import json
import logging
import math
import socket
import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import requests
from sglang.srt.disaggregation.common.conn import CommonKVManager

from sglang_tiered.errors import TransferError
from sglang_tiered.transfer.addresses import is_own_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_tiered.transfer.decode.sessions import Address


logger = logging.getLogger(__name__)

LOOKUP_DEADLINE_S = 5.0
"""Bounds all questions of one lookup, and a request that waits for one."""

MAX_STEP_S = 1.0
"""So much of a step of the scheduler counts as waiting: lookups are begun between steps."""

MAX_LOOKUPS = 16
"""Lookups at a time; each takes a thread. Others wait to be asked for again, as a request does in
each step of the scheduler: clients name the servers."""

MAX_LOOKUPS_PER_MACHINE = 4
"""Lookups at one machine at a time, so that one that answers slowly does not hold up the others. A
machine may have several servers, some of which are silent."""

MAX_SERVERS = 1024
"""Servers that are remembered, and as many whose lookup failed: clients name them. Those used last
stay."""

MAX_ANSWER_BYTES = 1 << 20

LOOKUP_RETRY_S = 0.5
"""Pause between two questions to a bootstrap server that does not answer."""

MAX_WAITING = 4096
"""Callbacks that wait for one server's answer, beyond which more are dropped; also rooms whose
replica was asked for, over all servers, of which the oldest are dropped."""

ROOMS_RETRY_S = 0.05
"""Pause between two questions to one server for the replicas that serve rooms."""

REMEMBERED_S = 60.0
"""How long it is remembered which replica serves a room: no room number is used again sooner."""

NO_REPLICA = -1
"""Stands for a replica that cannot be found out: a rank that does not exist."""

MAX_RANKS = 4096
"""Ranks of one prefill server. Each that concerns this rank costs a question to its bootstrap
server."""

RankKey = tuple[int, int, int, int]  # dp, cp, tp, pp


class _RankRow(msgspec.Struct):
    """What a bootstrap server must say of a rank. Decode ignores the rest of its answer."""

    rank_ip: Annotated[str, msgspec.Meta(max_length=255, pattern=r"\A[0-9A-Za-z.:%_-]+\Z")]
    rank_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class BootstrapClient:
    """What decode knows of prefill servers. It asks on threads of its own: SGLang asks on the
    scheduler's, where a host that drops packets stops all decoding for seconds at a time."""

    def __init__(self, manager: CommonKVManager, check_is_allowed: Callable[[str], None]) -> None:
        """``check_is_allowed`` raises ``TransferError`` for a host that must not be asked."""
        self._manager = manager
        self._check_is_allowed = check_is_allowed
        self._lock = threading.Lock()
        self._ranks: OrderedDict[str, dict[RankKey, Address]] = (
            OrderedDict()
        )  # least recently used first
        self._failures: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._running: set[str] = set()
        self._asked: Counter[str] = Counter()  # machines, by their address
        self._waiting: dict[str, list[Callable[[list[Address]], None]]] = {}
        # For each (server, room): when its replica was first asked for, and the answer.
        self._replicas: OrderedDict[tuple[str, int], tuple[float, int | None]] = OrderedDict()
        self._rooms_asked_at: dict[str, float] = {}  # by server; infinite while one is asked
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, "kv-transfer-lookup")

    def close(self) -> None:
        """Ask no more. Threads that wait for an answer end with it."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ensure_known(self, server: str) -> bool:
        """Whether a server is known by now; starts a lookup of one that is not."""
        if self.mark_used(server):
            return True
        with self._lock:
            failed_at, _ = self._failures.get(server, (-LOOKUP_RETRY_S, ""))
            has_rested = time.monotonic() - failed_at >= LOOKUP_RETRY_S
            has_thread = len(self._running) < MAX_LOOKUPS
            if server not in self._running and has_rested and has_thread:
                self._running.add(server)
                self._threads.submit(self._look_up, server)
        return False

    def sort_waiting(self, waiting: dict[str, list[Any]]) -> tuple[dict[str, list[Any]], list[Any]]:
        """The requests whose server is known by now, by server, and those that wait on. A request
        fails that has waited for ``LOOKUP_DEADLINE_S``. SGLang calls this instead of its own
        ``_ensure_prefill_info``, which counts steps of the scheduler, however long they take."""
        known, remaining, now = {}, [], time.monotonic()
        for server, pending in waiting.items():
            if self.ensure_known(server):
                known[server] = pending
                continue
            for request in pending:
                receiver = request.kv_receiver
                if receiver is None:  # the request has ended
                    continue
                looked_at, receiver.looked_at = receiver.looked_at or now, now
                receiver.waited_s += min(now - looked_at, MAX_STEP_S)
                if receiver.waited_s < LOOKUP_DEADLINE_S:
                    remaining.append(request)
                else:
                    late = f"prefill bootstrap failed: the server at {server} has not answered yet"
                    reason = self.lookup_failure(server) or late
                    self._manager.room_failed(receiver.bootstrap_room, reason)
        return known, remaining

    def mark_used(self, server: str) -> bool:
        """Remember a server longer than those not used since. Returns whether it is known."""
        with self._lock:
            if server in self._ranks:
                self._ranks.move_to_end(server)
            return server in self._ranks

    def rank_address(self, server: str, key: RankKey) -> Address | None:
        """Where a rank of a known server listens."""
        with self._lock:
            return self._ranks.get(server, {}).get(key)

    def lookup_failure(self, server: str) -> str | None:
        """Why the last lookup failed, if the server is still unknown."""
        with self._lock:
            if server in self._ranks or server not in self._failures:
                return None
            return self._failures[server][1]

    def call_with_ranks(self, server: str, callback: Callable[[list[Address]], None]) -> None:
        """Call ``callback`` with the addresses of all ranks of ``server``: at once if they are
        known, else when a lookup finds them, on its thread. Never, if the lookup fails: no request
        can have reached such a server. Nor while ``MAX_LOOKUPS`` run: its timeout tells prefill."""
        self.ensure_known(server)
        with self._lock:
            ranks = self._ranks.get(server)
            if ranks is None and server in self._running:
                waiting = self._waiting.setdefault(server, [])
                if len(waiting) < MAX_WAITING:
                    waiting.append(callback)
        if ranks is not None:
            callback(list(ranks.values()))

    def replicas_of(self, server: str, rooms: list[int]) -> dict[str, int]:
        """The replica that serves each room whose replica is known by now; asks for the others.
        A room that has no answer after ``LOOKUP_DEADLINE_S`` gets ``NO_REPLICA``. SGLang calls this
        instead of its own ``query_prefill_dp_ranks``."""
        now, answers = time.monotonic(), {}
        with self._lock:
            while self._replicas:  # a number may be another request's by then
                asked_at, _ = next(iter(self._replicas.values()))
                if now - asked_at < REMEMBERED_S and len(self._replicas) < MAX_WAITING:
                    break
                self._replicas.popitem(last=False)
            for room in rooms:
                asked_at, rank = self._replicas.setdefault((server, room), (now, None))
                if rank is None and now - asked_at >= LOOKUP_DEADLINE_S:
                    rank = NO_REPLICA
                if rank is not None:
                    answers[str(room)] = rank
            unknown = [room for room in rooms if str(room) not in answers]
            rested = now - self._rooms_asked_at.get(server, -ROOMS_RETRY_S) >= ROOMS_RETRY_S
            if unknown and rested:
                self._rooms_asked_at[server] = math.inf
                self._threads.submit(self._ask_for_replicas, server, unknown)
        return answers

    def _ask_for_replicas(self, server: str, rooms: list[int]) -> None:
        url, until = f"http://{server}/query_dp_ranks", time.monotonic() + LOOKUP_DEADLINE_S
        found: dict[int, int] = {}
        try:
            host = server.rpartition(":")[0].strip("[]")
            with self._asking(host), requests.Session() as session:
                session.trust_env = False  # no proxy knows where instances are
                said = _answer(session, "POST", url, until, {"bootstrap_rooms": rooms})
            found = _replicas_in(said, rooms)
        except Exception as error:
            logger.debug(
                "%s does not say which replica serves a request (%s); asking again", server, error
            )
        with self._lock:
            self._rooms_asked_at[server] = time.monotonic()
            while len(self._rooms_asked_at) > MAX_SERVERS:
                self._rooms_asked_at.pop(next(iter(self._rooms_asked_at)))
            for room, rank in found.items():
                if (server, room) in self._replicas:
                    self._replicas[server, room] = self._replicas[server, room][0], rank

    def drop_servers_at(self, address: Address) -> list[str]:
        """Drop the servers that have a rank at ``address``, and return them."""
        with self._lock:
            servers = [s for s, ranks in self._ranks.items() if address in ranks.values()]
            for server in servers:
                del self._ranks[server]
                self._manager.prefill_info_table.pop(server, None)
        return servers

    def _look_up(self, server: str) -> None:
        # SGLang's lookup writes its result into the manager; this copy keeps it from the scheduler
        # until the ranks are known too.
        asked, ranks, reason = copy.copy(self._manager), {}, None
        asked.prefill_info_table = {}
        until = time.monotonic() + LOOKUP_DEADLINE_S
        try:
            host = server.rpartition(":")[0].strip("[]")
            self._check_is_allowed(host)
            with self._asking(host):
                # SGLang's own lookup: HTTP, with a timeout. Raises for servers that do not match.
                if CommonKVManager.try_ensure_parallel_info(asked, server):
                    ranks = _ranks_of(server, asked.prefill_info_table[server], until)
                else:
                    reason = f"prefill bootstrap failed: the server at {server} does not answer"
        except Exception as error:
            # AssertionError and RuntimeError from SGLang: a server that does not match this one.
            # A client names the server, so its answer may be anything.
            reason = f"prefill bootstrap failed: the server at {server} cannot be used: {error}"
        dropped: list[str] = []
        with self._lock:
            self._running.discard(server)
            self._failures.pop(server, None)
            if reason is None:
                self._ranks[server] = ranks
                # Last: SGLang starts requests on what it finds in this table.
                self._manager.prefill_info_table[server] = asked.prefill_info_table[server]
            else:
                self._failures[server] = time.monotonic(), reason
            while len(self._failures) > MAX_SERVERS:
                self._failures.popitem(last=False)
            while len(self._ranks) > MAX_SERVERS:
                dropped.append(self._ranks.popitem(last=False)[0])
                self._manager.prefill_info_table.pop(dropped[-1], None)
            waiting = self._waiting.pop(server, [])
        for other in dropped:
            drop_connections(self._manager, other)
        for callback in waiting if reason is None else ():
            callback(list(ranks.values()))

    @contextmanager
    def _asking(self, host: str) -> Iterator[None]:
        """Counts a question to a machine. Raises ``TransferError`` when too many are open there."""
        machine = _machine_of(host)
        with self._lock:
            if self._asked[machine] >= MAX_LOOKUPS_PER_MACHINE:
                raise TransferError("its machine has not answered other questions yet")
            self._asked[machine] += 1
        try:
            yield
        finally:
            with self._lock:
                self._asked -= Counter([machine])  # drops zero counts


def drop_connections(manager: CommonKVManager, bootstrap_address: str) -> None:
    """Drop the ranks of a prefill server from SGLang's cache of them. Any thread."""
    with manager.connection_lock:
        for key in [k for k in manager.connection_pool if k.startswith(bootstrap_address)]:
            del manager.connection_pool[key]


def check_num_ranks(info: Any) -> None:
    """Raises ``TransferError`` for a number of ranks that no server has: SGLang makes lists of
    them, and with no rank at all it fails on the scheduler's thread."""
    sizes = info.dp_size, info.attn_cp_size, info.attn_tp_size, info.pp_size
    if min(sizes) < 1 or math.prod(sizes) > MAX_RANKS:
        raise TransferError(f"it says that it has no ranks, or more than {MAX_RANKS}")


def _ranks_of(server: str, info: Any, until: float) -> dict[RankKey, Address]:
    """The addresses of all ranks that concern this one, asked one by one. Raises ``TransferError``
    for a rank that the server does not know or describes wrongly, and for a late answer."""
    ranks: dict[RankKey, Address] = {}
    with requests.Session() as session:
        session.trust_env = False
        for dp in range(info.dp_size):
            for cp in info.target_cp_ranks:
                for tp in info.target_tp_ranks:
                    for pp in info.target_pp_ranks:
                        url = (
                            f"http://{server}/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}"
                            f"&target_tp_rank={tp}&target_pp_rank={pp}"
                        )
                        row = _answer(session, "GET", url, until)
                        ranks[dp, cp, tp, pp] = _address_in(row, f"rank dp{dp} tp{tp} pp{pp}")
    return ranks


def _answer(
    session: requests.Session, method: str, url: str, until: float, json_body: Any = None
) -> Any:
    """The JSON that a bootstrap server answers. Raises ``TransferError`` or
    ``requests.RequestException`` for an answer that is missing, too long or too late."""
    late = TransferError(f"it did not answer within {LOOKUP_DEADLINE_S:.0f} s")
    left = until - time.monotonic()
    if left <= 0:
        raise late
    body = bytearray()
    try:
        with session.request(
            method, url, json=json_body, timeout=left, stream=True, allow_redirects=False
        ) as response:
            if response.status_code != requests.codes.ok:
                raise TransferError(f"it answers {response.status_code}")
            for piece in response.iter_content(256):
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise TransferError("its answer has no end")
                if time.monotonic() > until:
                    raise late
    except requests.RequestException:
        if time.monotonic() < until:
            raise
        raise late from None
    return json.loads(body)


def _replicas_in(said: Any, rooms: list[int]) -> dict[int, int]:
    """The replica of each room in an answer. SGLang converts them to numbers on the scheduler's
    thread, and an error there would end it, so anything else becomes ``NO_REPLICA``."""
    if not isinstance(said, dict):
        return dict.fromkeys(rooms, NO_REPLICA)
    found = {room: said[str(room)] for room in rooms if str(room) in said}
    return {room: rank if isinstance(rank, int) else NO_REPLICA for room, rank in found.items()}


def _machine_of(host: str) -> str:
    """One name for all addresses by which this machine reaches itself."""
    address = addresses_of(host)[0]
    return "here" if is_own_address(address) else address


def _address_in(row: Any, rank: str) -> Address:
    """The address in a bootstrap server's row. Raises ``TransferError`` for any other row."""
    try:
        parsed = msgspec.convert(row, _RankRow)
    except msgspec.ValidationError as error:
        raise TransferError(f"its {rank} is at no address ({error})") from None
    return parsed.rank_ip, parsed.rank_port


def address_of(host: str) -> str:
    """``--host`` as an address: ZeroMQ binds no names."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return addresses_of(host)[0]
    return host


def addresses_of(host: str) -> list[str]:
    """The addresses of a host name or an address. Raises ``OSError`` for an unknown name."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def shown_server(host: str, own_address: str, port: int) -> str:
    """Where a server of ``--host`` answers, for who reads it on another machine."""
    host = own_address if ipaddress.ip_address(address_of(host)).is_unspecified else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

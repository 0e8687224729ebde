"""Looks prefill servers up at their bootstrap servers, off the scheduler's thread."""

from __future__ import annotations

import copy
import ipaddress
import itertools
import json
import logging
import math
import socket
import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import requests
from sglang.srt.disaggregation.common.conn import CommonKVManager

from sglang_tiered.errors import TransferError
from sglang_tiered.transfer.addresses import is_own_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_tiered.transfer.addresses import Address


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
"""Callbacks that wait for lookups, beyond which more are dropped; also rooms whose replica was
asked for, over all servers, of which the oldest are dropped."""

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
        # Least recently used first.
        self._ranks: OrderedDict[str, dict[RankKey, Address]] = OrderedDict()
        self._failures: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._running: dict[str, Future[list[Address]]] = {}  # lookups
        self._num_waiting = 0  # callbacks, for those
        self._asked: Counter[str] = Counter()  # machines, by their address
        # For each (server, room): when its replica was first asked for, and the answer.
        self._replicas: OrderedDict[tuple[str, int], tuple[float, int | None]] = OrderedDict()
        self._rooms_asked_at: dict[str, float] = {}  # by server; infinite while one is asked
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, "kv-transfer-lookup")

    def close(self) -> None:
        """Ask no more. Threads that wait for an answer end with it."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ensure_known(self, server: str) -> bool:
        """Whether a server is known by now, which is remembered longer than those not asked for
        since. Starts a lookup of one that is not."""
        with self._lock:
            if server in self._ranks:
                self._ranks.move_to_end(server)
                return True
            failed_at, _ = self._failures.get(server, (-LOOKUP_RETRY_S, ""))
            has_rested = time.monotonic() - failed_at >= LOOKUP_RETRY_S
            has_thread = len(self._running) < MAX_LOOKUPS
            if server not in self._running and has_rested and has_thread:
                self._running[server] = self._threads.submit(self._look_up, server)
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
        known, else when a lookup ends, on its thread. There are none if it fails: no request can
        have reached such a server. Never while ``MAX_LOOKUPS`` run or ``MAX_WAITING`` wait: its
        timeout tells prefill."""
        self.ensure_known(server)
        with self._lock:
            ranks, lookup = self._ranks.get(server), self._running.get(server)
            if ranks is not None or self._num_waiting >= MAX_WAITING:
                lookup = None
            self._num_waiting += lookup is not None

        def tell(found: Future[list[Address]]) -> None:
            with self._lock:
                self._num_waiting -= 1
            if not found.cancelled():
                callback(found.result())

        if ranks is not None:
            callback(list(ranks.values()))
        elif lookup is not None:
            lookup.add_done_callback(tell)

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
            with self._asking(server) as session:
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

    def _look_up(self, server: str) -> list[Address]:
        # SGLang's lookup writes its result into the manager; this copy keeps it from the scheduler
        # until the ranks are known too.
        asked, ranks, reason = copy.copy(self._manager), {}, None
        asked.prefill_info_table = {}
        until = time.monotonic() + LOOKUP_DEADLINE_S
        try:
            self._check_is_allowed(_host_of(server))
            with self._asking(server) as session:
                # SGLang's own lookup: HTTP, with a timeout. Raises for servers that do not match.
                if CommonKVManager.try_ensure_parallel_info(asked, server):
                    ranks = _ranks_of(session, server, asked.prefill_info_table[server], until)
                else:
                    reason = f"prefill bootstrap failed: the server at {server} does not answer"
        except Exception as error:
            # AssertionError and RuntimeError from SGLang: a server that does not match this one.
            # A client names the server, so its answer may be anything.
            reason = f"prefill bootstrap failed: the server at {server} cannot be used: {error}"
        dropped: list[str] = []
        with self._lock:
            del self._running[server]
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
        for other in dropped:
            drop_connections(self._manager, other)
        return list(ranks.values())

    @contextmanager
    def _asking(self, server: str) -> Iterator[requests.Session]:
        """A session for a question to a server. Raises ``TransferError`` when too many are open at
        its machine."""
        machine = _machine_of(_host_of(server))
        with self._lock:
            if self._asked[machine] >= MAX_LOOKUPS_PER_MACHINE:
                raise TransferError("its machine has not answered other questions yet")
            self._asked[machine] += 1
        try:
            with requests.Session() as session:
                session.trust_env = False  # no proxy knows where instances are
                yield session
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


def _ranks_of(
    session: requests.Session, server: str, info: Any, until: float
) -> dict[RankKey, Address]:
    """The addresses of all ranks that concern this one, asked one by one. Raises ``TransferError``
    for a rank that the server does not know or describes wrongly, and for a late answer."""
    ranks: dict[RankKey, Address] = {}
    targets = info.target_cp_ranks, info.target_tp_ranks, info.target_pp_ranks
    for dp, cp, tp, pp in itertools.product(range(info.dp_size), *targets):
        url = (
            f"http://{server}/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}"
            f"&target_tp_rank={tp}&target_pp_rank={pp}"
        )
        try:
            row = msgspec.convert(_answer(session, "GET", url, until), _RankRow)
        except msgspec.ValidationError as error:
            at = f"rank dp{dp} tp{tp} pp{pp}"
            raise TransferError(f"its {at} is at no address ({error})") from None
        ranks[dp, cp, tp, pp] = row.rank_ip, row.rank_port
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


def _host_of(server: str) -> str:
    return server.rpartition(":")[0].strip("[]")


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

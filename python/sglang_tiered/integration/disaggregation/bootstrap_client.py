"""Who the prefill servers are: asked of their bootstrap servers, off the scheduler's thread."""

from __future__ import annotations

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

    from sglang_tiered.transfer.decode.session import Address

__all__ = [
    "LOOKUP_DEADLINE_S",
    "PrefillLookups",
    "RankKey",
    "address_of",
    "addresses_of",
    "forget_ranks",
    "is_loopback",
    "is_wildcard",
]

logger = logging.getLogger(__name__)

LOOKUP_DEADLINE_S = 5.0
"""For all questions of a lookup, and for a request that waits for one."""

MAX_LOOKUPS = 16
"""At a time; each is a thread."""

MAX_LOOKUPS_PER_MACHINE = 4
"""Of these, so that one that answers slowly does not hold up the others. A machine may have several
servers, some of which are silent."""

MAX_SERVERS = 1024
"""That are remembered, and as many that failed: clients name them. Those used last stay."""

MAX_ANSWER_BYTES = 1 << 20

LOOKUP_RETRY_S = 0.5
"""Pause between two questions to a bootstrap server that does not answer."""

MAX_WAITING = 4096
"""Calls that wait for one server's answer; those beyond are dropped. And rooms whose replica was
asked for, in all and about; the oldest are forgotten."""

ROOMS_RETRY_S = 0.05
"""Pause between two questions to one server for the replicas that serve rooms."""

REMEMBERED_S = 60.0
"""Which replica serves a room; its number is not to be used again within that time."""

NO_REPLICA = -1
"""Of a room whose replica is not to be known: a rank that does not exist."""

MAX_RANKS = 4096
"""Of one prefill server; each that concerns this rank is a question to its bootstrap server."""

RankKey = tuple[int, int, int, int]  # dp, cp, tp, pp


class _Row(msgspec.Struct):
    """What a bootstrap server must say of a rank. It says more, which decode does not need."""

    rank_ip: Annotated[str, msgspec.Meta(max_length=255, pattern=r"\A[0-9A-Za-z.:%_-]+\Z")]
    rank_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class PrefillLookups:
    """What decode knows of prefill servers, asked for on a thread of its own: SGLang asks on the
    scheduler's, where a host that drops packets stops all decoding for seconds at a time."""

    def __init__(self, manager: CommonKVManager, check_is_allowed: Callable[[str], None]) -> None:
        """``check_is_allowed`` raises ``TransferError`` for a host that is not to be asked."""
        self._manager = manager
        self._check_is_allowed = check_is_allowed
        self._lock = threading.Lock()
        self._ranks: OrderedDict[str, dict[RankKey, Address]] = OrderedDict()  # used last: last
        self._failures: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._running: set[str] = set()
        self._asked: Counter[str] = Counter()  # machines, by their address
        self._waiting: dict[str, list[Callable[[list[Address]], None]]] = {}
        # Of each (server, room): when it was first asked for, and the answer.
        self._replicas: OrderedDict[tuple[str, int], tuple[float, int | None]] = OrderedDict()
        self._rooms_asked_at: dict[str, float] = {}  # of servers; for ever while one is asked
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, "kv-transfer-lookup")

    def is_known(self, server: str) -> bool:
        if self.use(server):
            return True
        with self._lock:
            failed_at, _ = self._failures.get(server, (-LOOKUP_RETRY_S, ""))
            if server not in self._running and time.monotonic() - failed_at >= LOOKUP_RETRY_S:
                self._running.add(server)
                self._threads.submit(self._look_up, server)
        return False

    def use(self, server: str) -> bool:
        """A request is served by this server: remember it longer than others. Whether it is
        known."""
        with self._lock:
            if server in self._ranks:
                self._ranks.move_to_end(server)
            return server in self._ranks

    def rank_of(self, server: str, key: RankKey) -> Address | None:
        with self._lock:
            return self._ranks.get(server, {}).get(key)

    def why_unknown(self, server: str) -> str | None:
        """The reason of the last failed lookup, if the server is still unknown."""
        with self._lock:
            if server in self._ranks or server not in self._failures:
                return None
            return self._failures[server][1]

    def tell_ranks(self, server: str, tell: Callable[[list[Address]], None]) -> None:
        """Call ``tell`` with the addresses of all ranks of ``server``: at once where they are
        known, or when a lookup finds them, on its thread. Where one fails, never: such a server
        has no request of ours that it could be told of."""
        self.is_known(server)  # asks where nobody is asking
        with self._lock:
            ranks = self._ranks.get(server)
            if ranks is None and server in self._running:
                waiting = self._waiting.setdefault(server, [])
                if len(waiting) < MAX_WAITING:
                    waiting.append(tell)
        if ranks is not None:
            tell(list(ranks.values()))

    def replicas_of(self, server: str, rooms: list[int]) -> dict[str, int]:
        """Which replica of a server serves each room, of those that are known by now. Others are
        asked for, and after a while there is none for them: ``NO_REPLICA``."""
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
                said = _answer(session, "POST", url, until, {"bootstrap_rooms": rooms})
            found = _replicas_in(said, rooms)
        except Exception as error:
            logger.debug("%s does not say which replica serves a request: %s", server, error)
        with self._lock:
            self._rooms_asked_at[server] = time.monotonic()
            while len(self._rooms_asked_at) > MAX_SERVERS:
                self._rooms_asked_at.pop(next(iter(self._rooms_asked_at)))
            for room, rank in found.items():
                if (server, room) in self._replicas:
                    self._replicas[server, room] = self._replicas[server, room][0], rank

    def forget(self, address: Address) -> list[str]:
        """Forget the servers that have a rank at ``address``. Returns them."""
        with self._lock:
            servers = [s for s, ranks in self._ranks.items() if address in ranks.values()]
            for server in servers:
                del self._ranks[server]
                self._manager.prefill_info_table.pop(server, None)
        return servers

    def _look_up(self, server: str) -> None:
        asked, ranks, reason = _Asking(self._manager), {}, None
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
            # The rest is for who runs it to mend: a client named it, so it may say anything.
            reason = f"prefill bootstrap failed: the server at {server} cannot be used: {error}"
        forgotten: list[str] = []
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
                forgotten.append(self._ranks.popitem(last=False)[0])
                self._manager.prefill_info_table.pop(forgotten[-1], None)
            waiting = self._waiting.pop(server, [])
        for other in forgotten:
            forget_ranks(self._manager, other)
        for tell in waiting if reason is None else ():
            tell(list(ranks.values()))

    @contextmanager
    def _asking(self, host: str) -> Iterator[None]:
        """Raises ``TransferError`` while a machine holds up as many questions as it may."""
        machine = _machine_of(host)
        with self._lock:
            if self._asked[machine] >= MAX_LOOKUPS_PER_MACHINE:
                raise TransferError("its machine has not answered other questions yet")
            self._asked[machine] += 1
        try:
            yield
        finally:
            with self._lock:
                self._asked -= Counter([machine])  # keeps none of zero


def forget_ranks(manager: CommonKVManager, bootstrap_address: str) -> None:
    """Where SGLang keeps the ranks of a prefill server. Any thread."""
    with manager.connection_lock:
        for key in [k for k in manager.connection_pool if k.startswith(bootstrap_address)]:
            del manager.connection_pool[key]


class _Asking:
    """The manager, but for the table in which a lookup puts what it finds."""

    def __init__(self, manager: CommonKVManager) -> None:
        self._manager = manager
        self.prefill_info_table: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def _resolve_rank_mapping(self, info: Any) -> None:
        """SGLang's, for a number of ranks that a server can have: it makes lists of them, and
        with none it fails on the scheduler's thread."""
        sizes = info.dp_size, info.attn_cp_size, info.attn_tp_size, info.pp_size
        if min(sizes) < 1 or math.prod(sizes) > MAX_RANKS:
            raise TransferError(f"it says that it has no ranks, or more than {MAX_RANKS}")
        self._manager._resolve_rank_mapping(info)  # noqa: SLF001


def _ranks_of(server: str, info: Any, until: float) -> dict[RankKey, Address]:
    """The only place where what a bootstrap server says of its ranks is read. Raises
    ``TransferError`` for a rank that it does not know or that is none, and for one that is not
    said in time."""
    ranks: dict[RankKey, Address] = {}
    with requests.Session() as session:
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
    """What a bootstrap server says. Raises ``TransferError`` or ``requests.RequestException``
    where that is nothing, too much or too late."""
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
    """SGLang makes numbers of them on the scheduler's thread, and ends on what is none."""
    if not isinstance(said, dict):
        return dict.fromkeys(rooms, NO_REPLICA)
    found = {room: said[str(room)] for room in rooms if str(room) in said}
    return {room: rank if isinstance(rank, int) else NO_REPLICA for room, rank in found.items()}


def _machine_of(host: str) -> str:
    """One name for all addresses by which this machine reaches itself."""
    address = addresses_of(host)[0]
    return "here" if is_own_address(address) else address


def _address_in(row: Any, rank: str) -> Address:
    try:
        parsed = msgspec.convert(row, _Row)
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
    """The addresses of a name, or of an address itself. Raises ``OSError`` for an unknown one."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    return ipaddress.ip_address(host).is_loopback


def is_wildcard(host: str) -> bool:
    """Whether an address stands for all of this machine's."""
    return ipaddress.ip_address(host).is_unspecified

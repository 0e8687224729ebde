"""Who the prefill servers are: asked of their bootstrap servers, off the scheduler's thread."""

from __future__ import annotations

import concurrent.futures
import ipaddress
import math
import socket
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver

from sglang_tiered.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.integration.kv_transfer import ZmqKVManager
    from sglang_tiered.transfer.prefill_link import Address

__all__ = [
    "PrefillLookups",
    "RankKey",
    "address_of",
    "addresses_of",
    "is_loopback",
    "is_wildcard",
]

LOOKUP_RETRY_S = 0.5
"""Pause between two questions to a bootstrap server that does not answer."""

MAX_WAITING = 4096
"""Calls that wait for one server's answer; those beyond are dropped."""

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

    def __init__(self, manager: ZmqKVManager) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._ranks: dict[str, dict[RankKey, Address]] = {}
        self._failures: dict[str, tuple[float, str]] = {}
        self._running: dict[str, concurrent.futures.Future[None]] = {}
        self._waiting: dict[str, list[Callable[[list[Address]], None]]] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(4, "kv-transfer-lookup")

    def is_known(self, server: str) -> bool:
        with self._lock:
            if server in self._ranks:
                return True
            running = self._running.get(server)
            failed_at, _ = self._failures.get(server, (0.0, ""))
            if running is None and time.monotonic() - failed_at >= LOOKUP_RETRY_S:
                self._running[server] = self._threads.submit(self._look_up, server)
        return False

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

    def forget(self, address: Address) -> list[str]:
        """Forget the servers that have a rank at ``address``. Returns them."""
        with self._lock:
            servers = [s for s, ranks in self._ranks.items() if address in ranks.values()]
            for server in servers:
                del self._ranks[server]
        return servers

    def _look_up(self, server: str) -> None:
        asked, ranks, reason = _Asking(self._manager), {}, None
        try:
            self._manager.check_is_allowed(server.rpartition(":")[0].strip("[]"))
            # SGLang's own lookup: HTTP, with a timeout. Raises for servers that do not match.
            if CommonKVManager.try_ensure_parallel_info(asked, server):
                ranks = self._ranks_of(server, asked.prefill_info_table[server])
            else:
                reason = f"prefill bootstrap failed: the server at {server} does not answer"
        except Exception as error:
            # AssertionError and RuntimeError from SGLang: a server that does not match this one.
            # The rest is for who runs it to mend: a client named it, so it may say anything.
            reason = f"prefill bootstrap failed: the server at {server} cannot be used: {error}"
        with self._lock:
            self._running.pop(server, None)
            if reason is None:
                self._ranks[server] = ranks
                self._failures.pop(server, None)
                # Last: SGLang starts requests on what it finds in this table.
                self._manager.prefill_info_table[server] = asked.prefill_info_table[server]
            else:
                self._failures[server] = time.monotonic(), reason
            waiting = self._waiting.pop(server, [])
        for tell in waiting if reason is None else ():
            tell(list(ranks.values()))

    def _ranks_of(self, server: str, info: Any) -> dict[RankKey, Address]:
        """The only place where what a bootstrap server says of its ranks is read. Raises
        ``TransferError`` for a rank that it does not know or that is none."""
        asking = CommonKVReceiver.__new__(CommonKVReceiver)
        asking.bootstrap_addr = server
        ranks: dict[RankKey, Address] = {}
        for dp in range(info.dp_size):
            for cp in info.target_cp_ranks:
                for tp in info.target_tp_ranks:
                    for pp in info.target_pp_ranks:
                        row = CommonKVReceiver._get_bootstrap_info_from_server(  # noqa: SLF001
                            asking, dp, cp, tp, pp
                        )
                        rank = f"rank dp{dp} tp{tp} pp{pp}"
                        if row is None:
                            raise TransferError(f"it does not know its {rank}")
                        ranks[dp, cp, tp, pp] = _address_in(row, rank)
        return ranks


class _Asking:
    """The manager, but for the table in which a lookup puts what it finds."""

    def __init__(self, manager: ZmqKVManager) -> None:
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

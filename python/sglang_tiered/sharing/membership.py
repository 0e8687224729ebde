"""``Membership``: servers name themselves in a Redis, and find the others there. Nothing else of
theirs is in it. The text of an error from Redis is never shown, since it may repeat arguments, also
of ``AUTH``.

    sgt2:{<namespace hex>}:servers       set of ids, perhaps with dead ones
    sgt2:{<namespace hex>}:server:<id>   the record of one, which expires unless it is renewed
    sgt2:routed                          set of names of records that routers read
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import redis
from redis import exceptions

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.errors import TransferError
from sglang_tiered.sharing.pages.link import check_address
from sglang_tiered.sharing.settings import (
    IndexUrl,
    Role,
    Serving,
    is_serving,
    parse_index_url,
    resolve,
)
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.wire.sockets import endpoint_of

if TYPE_CHECKING:
    from collections.abc import Callable


logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")

VERSION = 2
PREFIX = f"sgt{VERSION}"
ROUTED = f"{PREFIX}:routed"
MAX_RECORD_BYTES = 1024
MAX_SERVERS = 1024

_KINDS: dict[type[Exception], str] = {
    exceptions.NoPermissionError: "the user may not run a command or touch a key that is needed",
    exceptions.OutOfMemoryError: "it is out of memory (maxmemory)",
    exceptions.ReadOnlyError: "it is a read-only replica",
    exceptions.MovedError: "it is a cluster of several shards, which cannot hold an index",
    exceptions.BusyLoadingError: "it is still loading its data",
    exceptions.AuthenticationError: "user or password is wrong, or lacking",
    exceptions.TimeoutError: "it did not answer in time",
    exceptions.InvalidResponse: "the server there does not speak Redis' protocol",
    exceptions.ResponseError: "it refused a command",
}


class ServerRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a server says of itself: where its pages are asked for, and for routers its requests."""

    version: int
    address: str  # tcp://IP:port
    url: str = ""  # empty until it is known
    role: int = 0
    rank: int = 0
    bootstrap_port: int = 0

    @property
    def serving(self) -> Serving | None:
        """Where the server answers requests, or None if it does not say so, or nothing usable."""
        if self.role not in set(Role):
            return None
        serving = Serving(self.url, Role(self.role), self.rank, self.bootstrap_port)
        return serving if is_serving(serving) else None


def read_record(data: Any) -> ServerRecord | None:
    """A record, or None for anything else, which whoever may write to that Redis can have there."""
    if not isinstance(data, bytes) or len(data) > MAX_RECORD_BYTES:
        return None
    record = unseal(data, ServerRecord)
    if record is None or record.version != VERSION:
        return None
    try:
        check_address(record.address)
    except TransferError:
        return None
    return record


def _client(url: IndexUrl, timeout_s: float) -> Any:
    times = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    options = {**url.options, **times, "retry": None, "protocol": 2}
    pool = redis.ConnectionPool(connection_class=url.kind, max_connections=1, **options)
    return redis.Redis(connection_pool=pool)


def _told(url: IndexUrl, ask: Callable[[], _Found]) -> _Found:
    """Ask, and tell of an error in words of our own: one clause that may be shown, as that of the
    ``TransferError`` which it raises."""
    try:
        return ask()
    except (exceptions.RedisError, OSError, ValueError) as error:
        clause = next((c for kind, c in _KINDS.items() if isinstance(error, kind)), None)
    raise TransferError(f"{url.shown}: {clause or 'no connection'}")


def read_servings(text: str, timeout_s: float) -> list[Serving]:
    """Return where servers of every namespace in the Redis at a URL answer requests, of at most
    1,024 records there. Writes nothing, and blocks. Raises ``TransferError``."""
    url = parse_index_url(text)

    def ask() -> list[Serving]:
        with _client(url, timeout_s) as client:
            pipe = client.pipeline(transaction=False)
            for name in client.srandmember(ROUTED, MAX_SERVERS):
                pipe.getrange(name, 0, MAX_RECORD_BYTES)
            found = pipe.execute(raise_on_error=False)  # what is no string is no record
            records = filter(None, map(read_record, found))
            return [one for record in records if (one := record.serving) is not None]

    return _told(url, ask)


class Membership:
    """``namespace`` and ``server`` are asked for at every exchange, which blocks; call ``exchange``
    on one thread. ``port`` is that of this server's pages, and ``host`` what it listens on: where
    that stands for every address, others are told the one on the route to the Redis."""

    def __init__(
        self,
        url: IndexUrl,
        *,
        namespace: Callable[[], bytes],
        server: str,
        host: str,
        port: int,
        timeout_s: float = 3.0,
        expiry_s: float,
    ) -> None:
        self._url = url
        self._namespace = namespace
        self._server = server
        self._host = host
        self._port = port
        self._expiry_ms = int(expiry_s * 1000)
        self._lock = threading.Lock()
        self._serving: Callable[[str], Serving] | None = None
        self._log = OnceLog(logger)
        self._name = ""  # of the record of this server
        self._redis = _client(self._url, timeout_s)

    def __repr__(self) -> str:
        return f"Membership({self._url.shown})"

    def serve(self, serving: Callable[[str], Serving]) -> None:
        """Say where this server answers requests from the next exchange on: what ``serving``
        returns for the address at which others find this one's pages."""
        with self._lock:
            self._serving = serving

    def exchange(self) -> list[str]:
        """Name this server, and return the addresses of all. Raises ``TransferError``."""
        return _told(self._url, self._exchange)

    def _exchange(self) -> list[str]:
        prefix = f"{PREFIX}:{{{self._namespace().hex()}}}"
        record = self._record(self._address())
        name = f"{prefix}:server:{self._server}"
        pipe = self._redis.pipeline(transaction=False)
        if self._name not in ("", name):
            pipe.delete(self._name)
        pipe.set(name, seal(record), px=self._expiry_ms)
        pipe.sadd(f"{prefix}:servers", self._server)
        pipe.pexpire(f"{prefix}:servers", 10 * self._expiry_ms)
        if record.url:
            pipe.sadd(ROUTED, name)
            pipe.pexpire(ROUTED, 10 * self._expiry_ms)
        pipe.srandmember(f"{prefix}:servers", MAX_SERVERS)
        pipe.srandmember(ROUTED)
        *_, ids, routed = pipe.execute()
        self._name = name
        servers = [each.decode("ascii", "replace")[:64] for each in ids]
        pipe = self._redis.pipeline(transaction=False)
        for each in servers:
            pipe.getrange(f"{prefix}:server:{each}", 0, MAX_RECORD_BYTES)
        values = pipe.execute()
        if gone := [each for each, value in zip(ids, values, strict=True) if not value]:
            self._redis.srem(f"{prefix}:servers", *gone)
        # Of whatever namespace, which nobody else may have: each server looks at one at a time. Of
        # a name beyond the prefix nothing is asked: an ACL refuses that, which ends the exchange.
        if routed is not None:
            is_record = routed.startswith(f"{PREFIX}:".encode())
            if not is_record or not self._redis.exists(routed):
                self._redis.srem(ROUTED, routed)
        return [record.address for record in map(read_record, values) if record is not None]

    def _record(self, address: str) -> ServerRecord:
        with self._lock:
            make = self._serving
        serving = None if make is None else make(address)
        if serving is None or is_serving(serving):
            return ServerRecord(VERSION, address, *(serving or ()))
        self._log.report("serving", "routers do not find this server: %r is no URL", serving.url)
        return ServerRecord(VERSION, address)

    def _address(self) -> str:
        """The address at which others find this server. Raises ``OSError``."""
        host = resolve(self._host)[0]
        if host in ("0.0.0.0", "::"):
            host = self._host_on_route()
        return endpoint_of(host, self._port)

    def _host_on_route(self) -> str:
        """This machine's address on the route to the Redis, without sending anything."""
        index = self._url.options
        if "host" not in index:  # a Unix socket
            return "127.0.0.1"
        found = socket.getaddrinfo(index["host"], index["port"], type=socket.SOCK_DGRAM)
        family, *_, target = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])

    def close(self) -> None:
        """Leave, if Redis answers at once."""
        with contextlib.suppress(exceptions.RedisError, OSError):
            if self._name:
                self._redis.delete(self._name)
        with contextlib.suppress(Exception):
            self._redis.close()

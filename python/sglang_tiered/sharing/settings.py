"""Where servers are: as a user writes it, as ZeroMQ takes it, and as routers are told through a
Redis (``membership``). Then that Redis, and the settings of both ends of a connection. Times in
seconds, sizes in bytes."""

from __future__ import annotations

import enum
import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection


MiB = 1 << 20

_TARGET = re.compile(r"(?:dns://)?(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")


_SERVING = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


class Target(NamedTuple):
    """A name or address of servers, and the port of their first rank."""

    host: str
    port: int


def parse_targets(text: str) -> tuple[Target, ...]:
    """Read ``HOST:PORT,...`` or ``dns://name:port``. Raises ``ConfigError``, one sentence."""
    targets = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        match = _TARGET.fullmatch(part)
        if match is None or not 0 < int(match[3]) < 1 << 16:
            raise ConfigError(
                f"--tier-peers {part!r} is no address; write HOST:PORT, several separated by "
                "commas, or dns://NAME:PORT for all addresses of a name."
            )
        targets.append(Target(match[1] or match[2], int(match[3])))
    if not targets:
        raise ConfigError("--tier-peers names no server; write HOST:PORT,... or drop it.")
    return tuple(dict.fromkeys(targets))


def resolve(host: str) -> list[str]:
    """All IP addresses of a host. Raises ``OSError``; may take long."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = (str(address[0]).partition("%")[0] for *_, address in found)
    return [str(ipaddress.ip_address(each)) for each in dict.fromkeys(addresses)]


class Role(enum.IntEnum):
    """What a server does of a request."""

    AGGREGATED = 0  # all of it
    PREFILL = 1
    DECODE = 2


class Serving(NamedTuple):
    """Where a server answers requests."""

    url: str  # http://host:port or https://host:port
    role: Role
    rank: int  # the data-parallel replica that the pages are of
    bootstrap_port: int = 0  # where decode finds a prefill server; 0 for other roles


def is_serving(serving: Serving) -> bool:
    """Whether others would accept it."""
    match = _SERVING.fullmatch(serving.url)
    return (
        match is not None
        and len(serving.url) <= 255
        and 0 < int(match[2]) < 1 << 16
        and 0 <= serving.rank < 1 << 32
        and 0 <= serving.bootstrap_port < 1 << 16
    )


_TLS = "(?:ssl_(?:ca_certs|certfile|keyfile|cert_reqs|check_hostname)=[^&#]*&?)*"
_HOST = r"(?:[^/?#]*@)?(?:\[[0-9A-Fa-f:.]+\]|[^:@/?#\[\]]+)(?::0*[1-9]\d{0,4})?(?:/\d*)?"
_INDEX = re.compile(
    rf"redis://{_HOST}|rediss://{_HOST}(?:\?{_TLS})?|unix://(?:[^/?#]*@)?/[^?#]+(?:\?db=\d+)?"
)
"""Nothing else: redis-py passes over what it does not understand."""


class IndexUrl(NamedTuple):
    """Where the index is. ``options`` are for the constructor of ``kind``, user and password among
    them; ``shown`` has neither."""

    shown: str
    kind: type[Connection | SSLConnection | UnixDomainSocketConnection]
    options: dict[str, Any]

    def __repr__(self) -> str:
        return f"IndexUrl({self.shown})"


def parse_index_url(text: str) -> IndexUrl:
    """``redis://[[user]:password@]host[:port][/db]``, ``rediss://`` for TLS, or
    ``unix://[[user]:password@]/path[?db=0]``. Raises ``ConfigError``, one sentence that repeats
    nothing of the text, as any of it might be a password."""
    # Imported late: without a Redis its client, an extra, is not needed.
    from redis import RedisError
    from redis.connection import Connection, parse_url

    usable = _INDEX.fullmatch(text) is not None
    try:
        options = parse_url(text) if usable else {}  # type: ignore[no-untyped-call]
        kind = options.pop("connection_class", Connection)
        kind(**options)  # connects to nothing, and refuses values that it does not know
    except (ValueError, TypeError, RedisError):
        usable = False
    if not usable:  # raised here, where no error is at hand whose text would be shown with it
        raise ConfigError(
            "the URL of the Redis (--tier-index, --servers of a front) cannot be used; write redis://"
            "[[user]:password@]host[:port][/db], the same with rediss:// for TLS (it takes "
            "?ssl_ca_certs=, ssl_certfile=, ssl_keyfile=, ssl_cert_reqs=, ssl_check_hostname=), or "
            "unix://[[user]:password@]/path[?db=0], and %23 for a # of the password."
        )
    scheme = text.partition("://")[0]
    if scheme == "unix":
        return IndexUrl(f"unix://{options['path']}", kind, options)
    options = {"port": 6379, "db": 0, **options}
    host = f"[{options['host']}]" if ":" in options["host"] else options["host"]
    return IndexUrl(f"{scheme}://{host}:{options['port']}/{options['db']}", kind, options)


@dataclass(frozen=True, slots=True)
class PageSettings:
    """For the client: it has ``connect_timeout_s`` to reach a holder, and drops one that owes
    answers after ``answer_timeout_s`` of silence (a connection that ends shows at once). At most
    ``window_bytes`` are under way, half of that from one holder, in ``max_requests`` of about
    ``request_bytes`` each (or of one page). Unused connections are closed after ``idle_s``; there
    are at most ``max_links``.

    For the server: at most ``max_serving_bytes`` are being read or sent, half of that for one
    client. ``max_queued_bytes`` wait besides, a quarter of that for one client, and requests beyond
    are answered with "busy". A client that does not read its answers is disconnected after
    ``stuck_timeout_s``. ``max_reads`` requests are read at a time, and one while the reader has
    work of its own.
    """

    is_local: bool = False  # over a Unix socket, of this machine and user
    connect_timeout_s: float = 2.0
    answer_timeout_s: float = 5.0
    idle_s: float = 60.0
    max_links: int = 64
    window_bytes: int = 64 * MiB
    request_bytes: int = 4 * MiB
    max_requests: int = 8
    max_serving_bytes: int = 64 * MiB
    max_queued_bytes: int = 256 * MiB
    max_reads: int = 4
    stuck_timeout_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """``peers``: names or addresses of servers, each with the port of its first rank; a server may
    be among its own. ``ports``: those of the ranks to follow, counted from there. ``index``: a
    Redis in which servers name themselves."""

    peers: Sequence[Target] = ()
    ports: tuple[int, ...] = (0,)
    index: IndexUrl | None = None

    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    """Where other servers may ask for pages. 0: any free one."""

    keys_directory: str | None = None
    """With keys everything between servers is encrypted, and only admitted ones are served."""

    max_pages: int = 4_000_000
    """Bounds the mirrored pages of other servers."""

    max_peers: int = 256
    """Bounds the mirrored servers."""

    publish_s: float = 0.5
    """How often this server looks what it has to tell."""

    look_s: float = 3.0
    """How often names are resolved again, and servers in the Redis looked for."""

    expiry_s: float = 10.0
    """A server that says nothing for longer counts as gone."""

    @property
    def shown_peers(self) -> str:
        """Where other servers are looked for, as logs may show it."""
        shown = [f"{host}:{port}" for host, port in self.peers]
        return ", ".join(shown + ([self.index.shown] if self.index is not None else []))

"""The settings that a server needs to share pages with others, and those of both ends of a
connection. Times in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.sharing.addresses import IndexUrl, Target


MiB = 1 << 20


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

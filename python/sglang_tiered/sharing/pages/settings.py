"""Timeouts and bounds of both ends. Times in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PageSettings"]

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

"""How both ends behave: timeouts and bounds, in one place. Times in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PageSettings"]

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class PageSettings:
    """Of who asks: ``connect_timeout_s`` to reach a holder, ``answer_timeout_s`` of silence after
    which one that owes answers is given up (one that ends is noticed at once). ``window_bytes``
    are asked for and not here, at most, a quarter of that at one holder, in ``max_requests`` of
    about ``request_bytes`` each (or of one page). Connections that nothing needs are closed after
    ``idle_s``; there are ``max_links`` at most.

    Of who serves: ``max_serving_bytes`` are being read or on their way out, at most, half of that
    for one client; ``max_queued_bytes`` wait besides, a quarter of that for one client, and what
    is asked for beyond is answered with "busy". One that does not take what it asked for is hung
    up on after ``stuck_timeout_s``. ``max_reads`` requests are read at a time, and one while the
    reader has work of its own.
    """

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

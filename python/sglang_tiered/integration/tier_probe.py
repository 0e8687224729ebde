"""How a tier is measured by reads that no request waits for, and which of them are learnt from.

A disk that is limited (a cloud volume, a throttled container) lets a little pass at full speed
after a rest. So a quick single page proves nothing, and believing it cost the next request up to
its own prefill in waiting for a load; one that is slow by itself does, and spares the larger reads.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "MAX_FAR_PROBE_BYTES",
    "MAX_FAR_PROBE_S",
    "MAX_PROBE_BYTES",
    "MAX_PROBE_PAGES",
    "read_in_steps",
]

MAX_PROBE_PAGES, MAX_PROBE_BYTES = 16, 16 << 20
MAX_FAR_PROBE_BYTES, MAX_FAR_PROBE_S = 4 << 20, 10.0
MAX_PROBE_READS, MAX_PROBE_S = 4, 0.25


def read_in_steps(
    read: Callable[[int, float], None],
    num_pages: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Call ``read(pages, taught_after_s)`` for one page, then for all, more than once while that
    is quick. What takes less than its ``taught_after_s`` is not to be learnt from."""
    begun = clock()
    read(1, MAX_PROBE_S)
    for _ in range(MAX_PROBE_READS):
        if clock() - begun > MAX_PROBE_S:
            return
        read(num_pages, 0.0)

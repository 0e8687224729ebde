"""``UpperScan``: walks what the upper tier holds, oldest first, and queues it for demotion.

After a start, since what earlier processes stored was perhaps never copied, and whenever the queue
was too full to take what was stored.
"""

from __future__ import annotations

from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_tiered.storage.layered.demotion_queue import DemotionQueue
    from sglang_tiered.storage.layered.tiers import LowerTier
    from sglang_tiered.storage.region.view import RegionView, StoredPage

__all__ = ["UpperScan"]

STEP_PAGES = 1024
CHAIN_PAGES = 64
"""Pages of one tenant that follow each other in the log are taken for a chain, cut at this."""


class UpperScan:
    """Used on one thread."""

    def __init__(self, view: RegionView, lower: LowerTier, queue: DemotionQueue) -> None:
        self._view = view
        self._lower = lower
        self._queue = queue
        self._sequence = -1
        self._pages: deque[StoredPage] = deque()
        self.is_due = True

    def step(self) -> bool:
        """Queue some more pages that the lower tier lacks; false when the walk is over."""
        if not self._pages:
            region = self._view.pages_behind(self._sequence)
            if region is None:
                self.is_due, self._sequence = False, -1
                return False
            self._sequence = region[0]
            self._pages.extend(region[1])
        num_pages = min(STEP_PAGES, len(self._pages), self._queue.num_free)
        pages = [self._pages.popleft() for _ in range(num_pages)]
        held = self._lower.contains([page.key for page in pages])
        lacking = [page for page, is_held in zip(pages, held, strict=True) if not is_held]
        for (tenant, used), group in groupby(lacking, lambda page: (page.tenant, page.is_used)):
            keys = [page.key for page in group]
            for start in range(0, len(keys), CHAIN_PAGES):
                self._queue.add(keys[start : start + CHAIN_PAGES], tenant, returned=used)
        return num_pages > 0 or not self._pages

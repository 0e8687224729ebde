"""``Promoter``: pages that a load found in a far tier are stored in the upper one as well."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Reason, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.base import Job, Page, TierEngine
    from sglang_tiered.storage.layered.tiers import Tier

__all__ = ["Promoter"]


class Promoter:
    """Copies while the load's buffers are still the engine's, then stores the copy in the
    background. Whatever does not fit is dropped: the page stays where it was found.

    ``gate`` is held while a store is submitted, and by whoever purges, so that a store lands before
    a purge or not at all; ``may_store`` is asked first, and must not block.
    """

    def __init__(
        self, upper: TierEngine, gate: threading.Lock, max_bytes: int, may_store: Callable[[], bool]
    ) -> None:
        self._upper = upper
        self._gate = gate
        self._max_bytes = max_bytes
        self._may_store = may_store
        self._lock = threading.Lock()
        self._num_bytes = 0
        self.num_promoted: Counter[Tier] = Counter()
        self.num_dropped: Counter[Tier] = Counter()

    def promote(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Page],
        tenant: bytes,
        tier: Tier,
        is_current: Callable[[], bool],
    ) -> None:
        """Copy pages of a tier and store them, unless ``is_current`` says that a purge came
        between."""
        num_bytes = sum(segment.nbytes for page in pages for segment in page)
        with self._lock:
            fits = self._num_bytes + num_bytes <= self._max_bytes
            if fits:
                self._num_bytes += num_bytes
        if not fits or not self._may_store():
            self._settle(tier, num_bytes if fits else 0, 0, len(keys))
            return
        copies = tuple((memoryview(bytearray().join(page)),) for page in pages)
        run = Run(tuple(keys), copies, tenant)
        with self._gate:
            job = self._upper.submit_store(run) if is_current() else None
        if job is None:
            self._settle(tier, num_bytes, 0, len(keys))
        else:
            job.call_at_end(partial(self._stored, tier))

    def _stored(self, tier: Tier, job: Job) -> None:
        num_stored = job.reasons.count(Reason.OK)
        num_held = job.reasons.count(Reason.DUPLICATE)
        dropped = job.run.num_pages - num_stored - num_held
        self._settle(tier, job.run.num_bytes, num_stored, dropped)

    def _settle(self, tier: Tier, num_bytes: int, num_promoted: int, num_dropped: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes
            self.num_promoted[tier] += num_promoted
            self.num_dropped[tier] += num_dropped

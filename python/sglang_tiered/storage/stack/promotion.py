"""``Promoter``: pages that a load found in a remote tier are stored in NVMe as well."""

from __future__ import annotations

import logging
import threading
from bisect import bisect
from collections import Counter
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from sglang_tiered.codecs.encoded import copied
from sglang_tiered.storage.base import Reason, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.base import Job, Page, Tier, TierEngine

__all__ = ["Promoter"]

logger = logging.getLogger(__name__)


class Promoter:
    """Copies while the load's buffers are still the engine's, then stores the copy in the
    background. The leading pages that fit are kept; the others stay where they were found. ``gate``
    is held while a store is submitted, and during an erasure, so that a store lands before it or
    not at all. ``may_store`` is asked first, and must not block."""

    def __init__(
        self, nvme: TierEngine, gate: threading.Lock, max_bytes: int, may_store: Callable[[], bool]
    ) -> None:
        self._nvme = nvme
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
        """Copy pages of a tier and store them, unless ``is_current`` says that an erasure
        came between."""
        ends = [0, *accumulate(sum(segment.nbytes for segment in page) for page in pages)]
        with self._lock:
            num_kept = bisect(ends, self._max_bytes - self._num_bytes) - 1
            self._num_bytes += ends[num_kept]
            self.num_dropped[tier] += len(keys) - num_kept
        if not num_kept:
            return
        if not self._may_store():
            self._settle(tier, ends[num_kept], 0, num_kept)
            return
        job = None
        try:
            copies = tuple((copied(page).data,) for page in pages[:num_kept])
            run = Run(tuple(keys[:num_kept]), copies, tenant)
            with self._gate:
                job = self._nvme.submit_store(run) if is_current() else None
        except Exception:
            logger.exception("internal error while keeping pages of a load on NVMe; they are not")
        if job is None:
            self._settle(tier, ends[num_kept], 0, num_kept)
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

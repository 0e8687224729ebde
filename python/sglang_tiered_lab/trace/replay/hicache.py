"""``hicache``: SGLang 0.5.23's hierarchical cache with its ``file`` backend, under the same caps.

Every new host page is written, each to a file of its own; files go least recently used first
(upstream does that where a size bound is set). A prefix of 256 tokens or more that the files hold
is fetched whatever that costs, unless fetches take more than half of the host tier: then it is
dropped. A request waits for its fetch until the ``timeout`` policy's deadline, 1 s and 0.25 s per
1,024 tokens after the scheduler first came to it, and goes on with what has arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered.storage.region.format import padded
from sglang_tiered_lab.trace.replay.lru import LruTier
from sglang_tiered_lab.trace.replay.radix import RadixStack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered_lab.trace.replay.radix import Store
    from sglang_tiered_lab.trace.replay.server import Job
    from sglang_tiered_lab.trace.replay.sizes import TierSizes
    from sglang_tiered_lab.trace.replay.timing import Hardware
    from sglang_tiered_lab.trace.replay.totals import Totals


FETCH_THRESHOLD_TOKENS = 256
LOADING_SHARE = 0.5
TIMEOUT_S, TIMEOUT_TOKEN_S = 1.0, 0.25 / 1024


class HiCacheStack(RadixStack):
    def __init__(
        self, sizes: TierSizes, hardware: Hardware, totals: Totals, *, unit_tokens: int
    ) -> None:
        super().__init__(sizes, hardware, totals, unit_tokens=unit_tokens)
        self._files = LruTier(sizes.nvme_tokens)
        self._below = self._files.units
        self._max_loading_tokens = int(sizes.host_tokens * LOADING_SHARE)

    def _num_held(self, units: Sequence[int], start: int) -> int:
        files = self._files.units
        stop = start
        while stop < len(units) and units[stop] in files:
            stop += 1
        return stop - start

    def _plan(self, job: Job, start: int, num_held: int, now_s: float) -> None:
        stop = start + num_held
        num_tokens = self._tokens_between(job, start, stop)
        has_room = self._loading_tokens + num_tokens <= self._max_loading_tokens
        if num_tokens < FETCH_THRESHOLD_TOKENS or not has_room:
            self._totals.loads_declined += 1
        else:
            self._load(job, start, stop, now_s)

    def poll(self, job: Job, now_s: float) -> None:
        num_tokens = self._tokens_between(job, job.load_start, job.load_stop)
        job.ready_s = min(job.ready_s, now_s + TIMEOUT_S + TIMEOUT_TOKEN_S * num_tokens)

    def _note_loaded(self, units: Sequence[int], num_bytes: int, seconds: float) -> None:
        files = self._files.units
        for unit in units:
            if unit in files:
                files.move_to_end(unit)

    def _admitted(self, store: Store, now_s: float) -> int:
        return len(store.units)

    def _write(self, units: Sequence[int], lengths: Sequence[int]) -> None:
        files = self._files.units
        new = [(u, n) for u, n in zip(units, lengths, strict=True) if u not in files]
        self._files.touch(units, lengths)
        self._files.trim()
        sizes = [tokens * self._bytes_per_token for _, tokens in new]
        self._totals.nvme_bytes_stored += sum(sizes)
        self._totals.nvme_bytes_written += sum(map(padded, sizes))

    def check_integrity(self) -> None:
        super().check_integrity()
        self._files.check_integrity()

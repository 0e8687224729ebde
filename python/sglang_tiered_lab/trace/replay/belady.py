"""``belady`` and ``infinite``: bounds for any policy, at a capacity and without a limit.

Belady's MIN keeps what is wanted soonest. Among prefixes it has a short form. A request for
a unit asks for all before it, so the next use of a unit is never earlier than that of its
predecessors, and if of equal next uses the deepest goes first, what is kept of a later request's
prompt is always its beginning. A number of tokens per later request is therefore the whole state:
no unit is ever named. Single tokens are kept and evicted, and nothing has to be kept at all, so no
policy that moves whole pages serves more tokens of the same requests in the same order from the
same capacity (interval scheduling: Faigle and Nawijn, 1995, doi 10.1016/0166-218X(95)00112-5).

The bound counts the tiers' capacities together, since a page may lie in any one of them, and the
part of its hits that the capacity of the device alone, or of device and host, would serve is
counted there.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from sglang_tiered_lab.trace.replay.disk import Disk
from sglang_tiered_lab.trace.replay.server import Match

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang_tiered_lab.trace.replay.server import Job
    from sglang_tiered_lab.trace.replay.sizes import TierSizes
    from sglang_tiered_lab.trace.replay.timing import Hardware
    from sglang_tiered_lab.trace.replay.totals import Totals


class RunCursor:
    """Holds the next uses of the requests, in their order, for all servers of a replay."""

    def __init__(self, runs: Iterator[list[tuple[int, int]]]) -> None:
        self._runs = runs
        self._request = -1

    def advance(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the next request's number and runs."""
        self._request += 1
        return self._request, next(self._runs)


class MinCache:
    """Counts kept tokens by the request that uses them next."""

    def __init__(self, capacity_tokens: float) -> None:
        self.capacity_tokens = capacity_tokens
        self._kept: dict[int, int] = {}
        self._latest: list[int] = []  # heap of negated requests; each as often as it was entered
        self.tokens = 0

    def access(self, request: int, runs: list[tuple[int, int]]) -> int:
        """Return the leading tokens that are held; then keep the request's own as far as that
        pays."""
        kept = self._kept
        hit = kept.pop(request, 0)
        self.tokens -= hit
        for later, tokens in runs:
            if later not in kept:
                kept[later] = 0
                heapq.heappush(self._latest, -later)
            kept[later] += tokens
            self.tokens += tokens
        while self.tokens > self.capacity_tokens:
            later = -self._latest[0]
            gone = min(kept.get(later, 0), self.tokens - int(self.capacity_tokens))
            self.tokens -= gone
            if later in kept:
                kept[later] -= gone
            if not kept.get(later):
                kept.pop(later, None)
                heapq.heappop(self._latest)
        if len(self._latest) > 64 + 4 * len(kept):
            self._latest = [-later for later in kept]
            heapq.heapify(self._latest)
        return hit

    def check_integrity(self) -> None:
        assert sum(self._kept.values()) == self.tokens
        assert self.tokens <= self.capacity_tokens
        assert {-later for later in self._latest} >= self._kept.keys()


class BeladyStack:
    """Models the caches of one server. Requests are taken in the order of their arrival."""

    num_put_off = 0

    def __init__(
        self,
        sizes: TierSizes,
        hardware: Hardware,
        totals: Totals,
        *,
        unit_tokens: int,
        cursor: RunCursor,
        is_infinite: bool = False,
    ) -> None:
        capacities: tuple[float, ...] = (
            sizes.device_tokens,
            sizes.device_tokens + sizes.host_tokens,
            sizes.device_tokens + sizes.host_tokens + sizes.nvme_tokens,
        )
        if is_infinite:
            capacities = (math.inf,)
        self._caches = [MinCache(capacity) for capacity in capacities]
        self._cursor = cursor
        self._disk = Disk(hardware)
        self._totals = totals
        self._unit_tokens = unit_tokens
        self._bytes_per_token = hardware.kv_bytes_per_token
        self._matches: dict[Job, Match] = {}

    def arrive(self, job: Job, now_s: float) -> None:
        request, runs = self._cursor.advance()
        hits = [cache.access(request, runs) for cache in self._caches]
        # A unit kept in part counts as kept: the bound errs upwards.
        bounds = [-(-hit // self._unit_tokens) for hit in hits]
        bounds += [bounds[-1]] * (3 - len(bounds))
        device, host, all_tiers = bounds
        host, all_tiers = max(host, device), max(all_tiers, host, device)
        self._matches[job] = Match(device, host - device, all_tiers - host)
        if all_tiers > host:
            num_bytes = (hits[2] - hits[1]) * self._bytes_per_token
            job.load_begin_s, job.ready_s = self._disk.load(now_s, num_bytes)
            self._totals.loads_begun += 1
            self._totals.nvme_bytes_loaded += num_bytes

    def poll(self, job: Job, now_s: float) -> None:
        return

    def begin(self, job: Job, now_s: float) -> Match:
        return self._matches.pop(job)

    def finish(self, job: Job, now_s: float) -> None:
        return

    def retry(self, jobs: Sequence[Job], now_s: float) -> None:
        raise AssertionError("nothing is put off")

    def close(self) -> None:
        return

    def check_integrity(self) -> None:
        for cache in self._caches:
            cache.check_integrity()
        assert not self._matches

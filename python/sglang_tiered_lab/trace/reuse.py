"""How often, how soon and within what cache the blocks of a trace come back.

**Hit.** A request hits the leading blocks that are cached when it arrives; the first block that is
not ends the hit, whatever lies behind it. Then all its blocks are touched, in order, and the cache
gives up what was touched longest ago until its capacity holds again. One cache for all requests,
whole blocks, a last block filled in part counted as one.

**One pass for all capacities** (Mattson et al., 1970): LRU holds a block if and only if fewer
different blocks than its capacity were touched since, the block's *reuse distance*, taken here at
the moment the request arrives. So the capacity that makes block i of a request a hit is the largest
reuse distance of blocks 0 to i, plus one, and the curve is the distribution of that number. The
distances are counted with a wavelet matrix (Claude, Navarro and Ordonez, 2015) in O(n log n), a few
numpy operations on n accesses for each bit of n.
"""

from __future__ import annotations

import array
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sglang_tiered_lab.trace.request import TraceRequest


Ints: TypeAlias = npt.NDArray[np.int64]

NEVER = np.iinfo(np.int64).max
"""The distance of a block that was not there before, and the capacity that would make it a hit."""


class PrefixKeys:
    """A number for every different prefix, from 0 in order of appearance: exact, one dict entry a
    block. Needed where ids name contents, and harmless where they name prefixes already."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, object], int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def of(self, blocks: Iterable[object]) -> list[int]:
        """The keys of the prefixes that end with each block."""
        keys, parent = self._keys, -1
        found = []
        for block in blocks:
            parent = keys.setdefault((parent, block), len(keys))
            found.append(parent)
        return found


class Reuse:
    """The accesses of a trace, flat, and what follows from them.

    All arrays are per access # [accesses] in order, except ``starts`` # [requests + 1] and
    ``arrivals`` # [requests].
    """

    def __init__(self, keys: Ints, starts: Ints, tokens: Ints, arrivals: npt.NDArray[np.float64]):
        self.keys = keys  # the prefix each block ends
        self.starts = starts  # request r has the accesses starts[r] to starts[r + 1]
        self.tokens = tokens  # of each block: block_tokens, less in a last one
        self.arrivals = arrivals  # seconds, nan where unknown
        lengths = np.diff(starts)
        self.request = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
        self.previous = _previous(keys)  # access of the same key before, or -1
        self.distance = reuse_distances(self.previous, starts[:-1][self.request])
        self.capacity = _leading(self.distance, self.request)  # least blocks that make it a hit
        self._sorted = np.sort(self.capacity[self.capacity != NEVER])

    @property
    def num_accesses(self) -> int:
        return len(self.keys)

    @property
    def num_unique(self) -> int:
        return int(np.count_nonzero(self.previous < 0))

    def hit_rate(self, num_blocks: int | None = None) -> float:
        """Share of blocks that an LRU cache of that capacity hits; ``None`` is without bound."""
        if not self.num_accesses:
            return 0.0
        hits = len(self._sorted)
        if num_blocks is not None:
            hits = int(np.searchsorted(self._sorted, num_blocks, side="right"))
        return hits / self.num_accesses

    def token_hit_rate(self, num_blocks: int | None = None) -> float:
        """The same, each block weighted by its tokens."""
        hit = self.capacity <= (NEVER - 1 if num_blocks is None else num_blocks)
        total = int(self.tokens.sum())
        return int(self.tokens[hit].sum()) / total if total else 0.0

    def request_hits(self) -> Ints:
        """Blocks each request hits in a cache without bound. # [requests]"""
        hits = np.bincount(self.request[self.capacity != NEVER], minlength=len(self.starts) - 1)
        return hits.astype(np.int64)

    def gaps_s(self) -> npt.NDArray[np.float64]:
        """Seconds since each reused block was touched last. # [reuses]"""
        again = np.flatnonzero(self.previous >= 0)
        now = self.arrivals[self.request[again]]
        before = self.arrivals[self.request[self.previous[again]]]
        return now - before

    def counts(self) -> Ints:
        """How often each different block is touched, most often first. # [unique blocks]"""
        counts = np.bincount(self.keys, minlength=0).astype(np.int64)
        return np.sort(counts[counts > 0])[::-1]


def measure(requests: Sequence[TraceRequest]) -> Reuse:
    """The reuse of requests in the order given, which should be that of arrival."""
    prefixes = PrefixKeys()
    keys, tokens = array.array("q"), array.array("q")
    starts = array.array("q", [0])
    arrivals = array.array("d")
    for request in requests:
        keys.extend(prefixes.of(request.block_ids))
        num_blocks = len(request.block_ids)
        if num_blocks:
            size = request.block_tokens
            tokens.extend([size] * (num_blocks - 1))
            tokens.append(request.input_length - size * (num_blocks - 1))
        starts.append(len(keys))
        arrivals.append(float("nan") if request.arrival_s is None else request.arrival_s)
    return Reuse(
        np.array(keys, dtype=np.int64),
        np.array(starts, dtype=np.int64),
        np.array(tokens, dtype=np.int64),
        np.array(arrivals, dtype=np.float64),
    )


def _previous(keys: Ints) -> Ints:
    order = np.argsort(keys, kind="stable")
    previous = np.full(len(keys), -1, dtype=np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def reuse_distances(previous: Ints, start: Ints) -> Ints:
    """Different blocks touched after ``previous`` and before ``start``, per access; ``NEVER`` where
    ``previous`` is -1. # [accesses]

    That is the number of accesses k before ``start`` whose own previous one lies at or before
    ``previous``, less the ``previous + 1`` accesses up to there, of which all do.
    """
    distances = np.full(len(previous), NEVER, dtype=np.int64)
    again = np.flatnonzero(previous >= 0)
    least = previous[again] + 1
    distances[again] = _count_below(previous + 1, start[again], least + 1) - least
    return distances


def _count_below(values: Ints, ends: Ints, bounds: Ints) -> Ints:
    """How many of ``values[:end]`` are below ``bound``, for every pair. # [pairs]

    Values are stably sorted by one bit after the other, from the highest, and the ranges of all
    pairs follow them: the zeros of a bit are counted where the bound has a one.
    """
    num_bits = int(max(values.max(initial=0), bounds.max(initial=0))).bit_length()
    low, high = np.zeros_like(ends), ends.copy()
    counts = np.zeros_like(ends)
    for bit in range(num_bits - 1, -1, -1):
        ones = (values >> bit) & 1
        zeros_before = np.concatenate(([0], np.cumsum(1 - ones)))
        low_zeros, high_zeros = zeros_before[low], zeros_before[high]
        is_one = ((bounds >> bit) & 1).astype(bool)
        counts += np.where(is_one, high_zeros - low_zeros, 0)
        num_zeros = zeros_before[-1]
        low = np.where(is_one, num_zeros + low - low_zeros, low_zeros)
        high = np.where(is_one, num_zeros + high - high_zeros, high_zeros)
        values = np.concatenate((values[ones == 0], values[ones == 1]))
    return counts


def _leading(distance: Ints, request: Ints) -> Ints:
    """The largest distance from the start of the request, plus one. # [accesses]"""
    if not len(distance):
        return distance
    never = int(len(distance)) + 1
    needed = np.where(distance == NEVER, never, distance + 1)
    # Each request is lifted above all before it, so that one running maximum serves them all.
    lift = request * (never + 1)
    needed = np.maximum.accumulate(needed + lift) - lift
    return np.where(needed == never, NEVER, needed)

"""What it costs to compute a prefix, and what it costs to load it: the basis of each decision.

Prefill of ``n`` tokens behind ``c`` others takes a fixed time, one per token (the matrix products)
and one per pair of a new token and a token it attends to: ``n * (c + n / 2)``. A load takes a fixed
time and one per byte. Both are learnt from the running server, so that a busy disk, a faster GPU
or another model needs no tuning; ``OnlineCost`` tells how. Fetching wherever it is cheaper than
prefill follows Jin et al., "Compute Or Load KV Cache? Why Not Both?" (Cake, ICML 2025,
arXiv 2410.03065); what this runtime cannot do of it, meeting in the middle, is told in the README
of this package.

A prefix may lie in several tiers (this server's disk, other servers', an object store), each with
a cost of its own. Tiers go by their number, nearest first. They are read at the same time, so a
load takes as long as its slowest part.

Pure: seconds, tokens and bytes in, decisions out. Not thread-safe unless said.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.policy.online_estimate import OnlineCost

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CostModel",
    "LoadDecision",
    "LoadPlan",
    "PrefillCost",
    "TYPICAL_TRANSFER_BYTES",
    "TransferCost",
    "farthest_first",
]

PRIOR_PREFILL = (2e-3, 5e-5, 2e-9)
"""Seconds per batch, per token, per pair, before any batch was seen: 20,000 tokens per second."""

TYPICAL_PREFILL_TOKENS = 2048

MIN_OBSERVED_TOKENS = 64
"""Smaller batches (warm-up, the last tokens of a hit) speak of the fixed part alone, and would move
all prices with it."""

PRIOR_TRANSFER = (1e-3, 1e-9)
"""Seconds per load and per byte, before any: 1 GB/s."""

PRIOR_PEERS = (5e-3, 1e-9)
"""The same for other servers: 5 ms, and 1 GB/s."""

PRIOR_OBJECT = (5e-2, 5e-9)
"""The same for an object store: 50 ms, and 200 MB/s."""

PRIORS = (PRIOR_TRANSFER, PRIOR_PEERS, PRIOR_OBJECT)
"""By tier, nearest first."""

TYPICAL_TRANSFER_BYTES = 16 << 20

PREFILL_LEVEL_HALF_LIFE, TRANSFER_LEVEL_HALF_LIFE, PRICE_HALF_LIFE = 8, 1, 48
"""In observations. A processor's speed is a constant seen through noise; a disk's changes."""

NUM_CUTS = 16
"""Lengths between nothing and everything that a plan compares."""

MAX_SPANS = 8
"""Changes of tier that a plan looks at besides; a prefix rarely has more than one."""

MIN_GAIN = 0.02
"""A load must save this share of the prefill it replaces, or it is not worth its reads."""


class PrefillCost:
    """Seconds of prefill, learnt from batches."""

    def __init__(self, prior: Sequence[float] = PRIOR_PREFILL) -> None:
        n = TYPICAL_PREFILL_TOKENS
        self._cost = OnlineCost(
            prior,
            (1.0, n, n * n / 2),
            level_half_life=PREFILL_LEVEL_HALF_LIFE,
            price_half_life=PRICE_HALF_LIFE,
        )

    @property
    def prices(self) -> tuple[float, ...]:
        """Seconds per batch, per new token, per pair of tokens."""
        return self._cost.prices

    @property
    def num_observed(self) -> int:
        return self._cost.num_observed

    def observe(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """A batch of ``(new tokens, tokens before them)`` per request took so long."""
        num_tokens = sum(new for new, _ in spans)
        if num_tokens < MIN_OBSERVED_TOKENS:
            return
        num_pairs = sum(_pairs(new, before) for new, before in spans)
        self._cost.observe((1.0, num_tokens, num_pairs), seconds)

    def seconds(self, new: int, before: int) -> float:
        """Of ``new`` tokens behind ``before`` others, the batch's fixed time left out: a request
        prefills at least its last token, so no load saves that."""
        _, per_token, per_pair = self._cost.prices
        return per_token * new + per_pair * _pairs(new, before)

    @property
    def tokens_per_s(self) -> float | None:
        """Of a cold prompt of typical length; ``None`` while all seems to be fixed cost, as one
        short and late batch makes it look."""
        seconds = self.seconds(TYPICAL_PREFILL_TOKENS, 0)
        return TYPICAL_PREFILL_TOKENS / seconds if seconds > 0 else None


class TransferCost:
    """Seconds of loads from one tier, learnt from finished ones."""

    def __init__(self, prior: Sequence[float] = PRIOR_TRANSFER) -> None:
        self._cost = OnlineCost(
            prior,
            (1.0, TYPICAL_TRANSFER_BYTES),
            level_half_life=TRANSFER_LEVEL_HALF_LIFE,
            price_half_life=PRICE_HALF_LIFE,
        )

    @property
    def prices(self) -> tuple[float, ...]:
        """Seconds per load, per byte."""
        return self._cost.prices

    @property
    def num_observed(self) -> int:
        return self._cost.num_observed

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A load of so many bytes took so long, from its turn to its end."""
        self._cost.observe((1.0, num_bytes), seconds)

    def seconds(self, num_bytes: int, num_loads: int = 1) -> float:
        return self._cost.predict((num_loads, num_bytes))

    @property
    def bytes_per_s(self) -> float | None:
        """Of a load of typical size; ``None`` while loads seem to take no time."""
        seconds = self.seconds(TYPICAL_TRANSFER_BYTES)
        return TYPICAL_TRANSFER_BYTES / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How much of a prefix to load: ``parts`` are tokens by tier, nearest first. ``load_s`` is
    until it has arrived, its queue included; ``saved_s`` the prefill it replaces."""

    parts: tuple[int, ...]
    load_s: float
    saved_s: float

    @property
    def num_tokens(self) -> int:
        return sum(self.parts)

    @property
    def num_far(self) -> int:
        """Tokens that do not come from the nearest tier."""
        return sum(self.parts[1:])


class CostModel:
    """Compares computing with loading, for the tiers of one scheduler. ``transfers`` are the costs
    of loads by tier, nearest first; those left out start from ``PRIORS``."""

    def __init__(
        self,
        *,
        page_tokens: int,
        bytes_per_token: int,
        prefill: PrefillCost | None = None,
        transfers: Sequence[TransferCost] = (),
    ) -> None:
        if page_tokens <= 0 or bytes_per_token <= 0:
            raise ValueError(
                f"a page of {page_tokens} tokens of {bytes_per_token} bytes holds nothing"
            )
        self._page_tokens = page_tokens
        self._bytes_per_token = bytes_per_token
        self.prefill = PrefillCost() if prefill is None else prefill
        self.transfers = (*transfers, *map(TransferCost, PRIORS[len(transfers) :]))

    @property
    def transfer(self) -> TransferCost:
        """Of the nearest tier."""
        return self.transfers[0]

    def load_seconds(self, parts: Sequence[int], ahead: Sequence[int] = ()) -> float:
        """Until so many tokens of each tier have arrived, behind the tokens of other loads. Loads
        follow each other; the parts of one run side by side."""
        own_s = max(self._part_seconds(parts), default=self.transfer.seconds(0))
        return own_s + sum(self._part_seconds(ahead))

    def _part_seconds(self, parts: Sequence[int]) -> list[float]:
        costs = zip(self.transfers, parts, strict=False)
        return [cost.seconds(n * self._bytes_per_token) for cost, n in costs if n > 0]

    def plan(
        self,
        *,
        num_held: int,
        num_new: int,
        num_before: int,
        ahead: Sequence[int] = (),
        queue_wait_s: float = 0.0,
        spans: Sequence[tuple[int, int]] = (),
        ends: Sequence[int] | None = None,
    ) -> LoadPlan:
        """The length to load of a prefix that the tiers hold ``num_held`` tokens of.

        ``num_new`` tokens, the held ones first among them, follow ``num_before`` that need no
        prefill. ``spans`` are pairs of a tier and how many of the held tokens it holds, in order;
        without them the nearest holds all. ``ends`` are the lengths that can be used, shortest
        first, of models whose states lie at some places only. ``ahead`` are the tokens of other
        loads, by tier. Whatever arrives while the request has to wait anyway (``queue_wait_s``)
        costs nothing. Of lengths that are about as good the longest is taken: it leaves more of the
        processor to others. Whole pages; 0 means compute everything.
        """
        num_held = min(num_held, num_new) // self._page_tokens * self._page_tokens
        if num_held <= 0:
            return LoadPlan((), 0.0, 0.0)
        everything = self.prefill.seconds(num_new, num_before)
        best, best_s = LoadPlan((), 0.0, 0.0), everything
        for num_tokens in self._cuts(num_held, spans, ends):
            parts = self._parts(num_tokens, spans)
            load_s = self.load_seconds(parts, ahead)
            rest_s = self.prefill.seconds(num_new - num_tokens, num_before + num_tokens)
            saved_s = everything - rest_s
            total_s = max(0.0, load_s - queue_wait_s) + rest_s + MIN_GAIN * saved_s
            if total_s <= best_s:
                best, best_s = LoadPlan(parts, load_s, saved_s), total_s
        return best

    def should_wait(self, *, num_saved: int, num_before: int, left_s: float) -> bool:
        """Whether a request that could start now waits on for a load, expected in ``left_s``, that
        saves it the prefill of ``num_saved`` tokens behind ``num_before`` others."""
        return left_s < self.prefill.seconds(num_saved, num_before)

    def _cuts(
        self, num_held: int, spans: Sequence[tuple[int, int]], ends: Sequence[int] | None
    ) -> list[int]:
        """Lengths to compare: even parts, and where the tier changes; of a load that may end at
        some places only, the last such place in each."""
        num_pages = num_held // self._page_tokens
        cuts = min(NUM_CUTS, num_pages)
        lengths = {num_pages * cut // cuts * self._page_tokens for cut in range(1, cuts + 1)}
        end = 0
        for _, num_tokens in spans[:MAX_SPANS]:
            end += num_tokens
            lengths.add(min(end, num_held) // self._page_tokens * self._page_tokens)
        if ends is not None:
            places = [bisect_right(ends, length) for length in lengths]
            lengths = {ends[place - 1] for place in places if place}
        return sorted(lengths - {0})

    def _parts(self, num_tokens: int, spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """How many of the first tokens lie in which tier."""
        parts = [0] * len(self.transfers)
        for tier, length in spans:
            taken = min(length, num_tokens)
            parts[tier] += taken
            num_tokens -= taken
            if num_tokens <= 0:
                break
        parts[0] += num_tokens
        return tuple(parts)


def farthest_first(num_tokens: int, parts: Sequence[int]) -> tuple[int, ...]:
    """``num_tokens`` of loads that come to ``parts`` by tier, when it is not known which: the far
    ones, as they arrive last. What is beyond all of them is the nearest tier's."""
    taken = [0] * max(1, len(parts))
    for tier in range(len(parts) - 1, 0, -1):
        taken[tier] = min(num_tokens, parts[tier])
        num_tokens -= taken[tier]
    taken[0] = num_tokens
    return tuple(taken)


def _pairs(new: int, before: int) -> float:
    """Pairs of a new token and one it attends to."""
    return new * (before + new / 2)


class LoadDecision(enum.Enum):
    """What became of a prompt's tokens that neither device nor host held, as the request came."""

    ABSENT = "absent"  # the tier does not hold them
    LOAD = "load"
    DECLINED = "declined"  # computing them was expected to be cheaper
    GAVE_UP = "gave_up"  # begun, but waiting on would have cost more than computing

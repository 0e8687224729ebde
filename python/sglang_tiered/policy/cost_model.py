"""The cost of computing a prefix against the cost of loading it: the basis of each decision.

Prefill of ``n`` tokens behind ``c`` others takes a fixed time, one per token (the matrix products)
and one per pair. A pair is a new token and one it attends to: ``n * (c + n / 2)``. A load takes a
fixed time and one per byte. ``OnlineCost`` estimates both in the running server, so that a busy
disk, a faster GPU or another model needs no tuning. Fetching wherever it is cheaper than prefill
follows Jin et al., "Compute Or Load KV Cache? Why Not Both?" (Cake, ICML 2025, arXiv 2410.03065);
where the two meet in the middle is in ``both_ends``.

A prefix may lie in several tiers (this server's disk, other servers', an object store), each with
a cost of its own. Tiers are numbered, nearest first. They are read at the same time, so a load
takes as long as its slowest part.

Pure: seconds, tokens and bytes in, decisions out. Not thread-safe.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


PRIOR_PREFILL = (2e-3, 5e-5, 2e-9)
"""Seconds per batch, per token, per pair, before any batch was seen: 20,000 tokens per second."""

PRIOR_COPY_S = 2.5e-11
"""Seconds that a batch waits for a byte that is copied to the device, before any was seen: 40 GB/s.
Copies that computing hides cost nothing, and that is learnt."""

TYPICAL_PREFILL_TOKENS = 2048
TYPICAL_TOKEN_BYTES = 1 << 17

MIN_OBSERVED_TOKENS = 64
"""Smaller batches (warm-up, the last tokens of a hit) measure the fixed part alone, and would move
all prices with it."""

PRIOR_TRANSFER = (1e-3, 1e-9)
"""Seconds per load and per byte, before any load was seen: 1 GB/s."""

PRIOR_PEERS = (5e-3, 1e-9)
"""The same for other servers: 5 ms and 1 GB/s."""

PRIOR_OBJECT = (5e-2, 5e-9)
"""The same for an object store: 50 ms and 200 MB/s."""

PRIORS = (PRIOR_TRANSFER, PRIOR_PEERS, PRIOR_OBJECT)
"""The priors by tier, nearest first."""

TYPICAL_TRANSFER_BYTES = 16 << 20

PREFILL_LEVEL_HALF_LIFE, TRANSFER_LEVEL_HALF_LIFE, PRICE_HALF_LIFE = 8, 1, 48
"""Half lives in observations. A processor's speed is constant beneath noise; a disk's changes."""

NUM_CUTS = 16
"""Lengths between nothing and everything that a plan compares."""

MAX_SPANS = 8
"""Changes of tier that a plan compares too; a prefix rarely has more than one."""

MIN_GAIN = 0.02
"""The share of the replaced prefill that a load must save to be worth its reads."""

PRIOR_WEIGHT = 0.05
"""The weight of each prior price, in observations of that price alone."""

MAX_OWN_LOSS = 0.25
"""What a choice that is better for others may add to a request's own time, as a share of it."""

MAX_SURPRISE = 2.0
"""The largest quotient of observed and expected seconds that moves the prices; the rest of it
counts as a change of level."""

MAX_LEVEL_STEP = math.log(1000)
"""The largest change of the log level by one observation: a clock that jumped must not decide
alone."""

SWEEPS = 12
"""Sweeps of coordinate descent an observation, from the last solution on."""

TINY_S = 1e-9


class OnlineCost:
    """Predicts seconds from features and learns from what they took, as a sum of priced parts:
    ``level * (price_1 * feature_1 + price_2 * feature_2 + ...)``.

    The level follows the last few observations, in logarithms: a disk that becomes a hundred times
    slower is believed after two or three, and a recovery as soon. The prices say how the parts
    compare (the fixed part with the part per byte) and move slowly. They follow least squares with
    exponential forgetting (Haykin, Adaptive Filter Theory) on relative errors, with no price below
    zero. Both start from a prior, which keeps deciding about parts that no observation contains. An
    observation takes about 50 microseconds.

    ``prior`` holds a price per feature, ``typical`` the size of each feature in an ordinary case:
    together they give the share of each price. An observation counts half for the level after
    ``level_half_life`` others, and for the prices after ``PRICE_HALF_LIFE``.
    """

    def __init__(
        self,
        prior: Sequence[float],
        typical: Sequence[float],
        *,
        level_half_life: float,
    ) -> None:
        self._level_gain = 1 - 0.5 ** (1 / level_half_life)
        self._kept = 0.5 ** (1 / PRICE_HALF_LIFE)
        self._prior = tuple(prior)
        total = sum(p * t for p, t in zip(prior, typical, strict=True))
        # A prior price counts as an observation of its own part, relative to the typical cost.
        self._ridge = tuple(PRIOR_WEIGHT * (t / total) ** 2 for t in typical)
        self._squares = [[0.0] * len(prior) for _ in prior]
        self._targets = [0.0] * len(prior)
        self._prices = self._prior
        self._log_level = 0.0
        # Plans read them far more often than observations change them.
        self.prices: tuple[float, ...] = self._prior
        """Current estimates, in seconds per unit of each feature."""
        self.num_observed = 0

    def predict(self, features: Sequence[float]) -> float:
        """Return the expected seconds."""
        return sum(price * size for price, size in zip(self.prices, features, strict=True))

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """Learn that these features took ``seconds``. No time or no work is ignored."""
        if not 0 < seconds < math.inf or not any(features):
            return
        expected = max(TINY_S, sum(p * f for p, f in zip(self._prices, features, strict=True)))
        surprise = math.log(seconds / expected) - self._log_level
        gain = max(self._level_gain, 1 / (1 + self.num_observed))
        self._log_level += gain * max(-MAX_LEVEL_STEP, min(MAX_LEVEL_STEP, surprise))
        self.num_observed += 1
        ratio = seconds / expected / math.exp(self._log_level)
        self._learn_prices(features, expected, min(MAX_SURPRISE, max(1 / MAX_SURPRISE, ratio)))
        level = math.exp(self._log_level)
        self.prices = tuple(level * price for price in self._prices)

    def _learn_prices(self, features: Sequence[float], expected: float, ratio: float) -> None:
        weight = 1 / (expected * expected)
        for i, row in enumerate(self._squares):
            for j in range(len(row)):
                row[j] = self._kept * row[j] + weight * features[i] * features[j]
            self._targets[i] *= self._kept
            self._targets[i] += weight * features[i] * expected * ratio
        values = list(self._prices)
        for _ in range(SWEEPS):
            for i, row in enumerate(self._squares):
                others = sum(row[j] * value for j, value in enumerate(values) if j != i)
                top = self._targets[i] + self._ridge[i] * self._prior[i] - others
                values[i] = max(0.0, top / (row[i] + self._ridge[i]))
        if any(values):
            self._prices = tuple(values)


class PrefillCost(OnlineCost):
    """Seconds of prefill, and of the copies to the device that it waits for, estimated from
    batches. Those with copies teach too: after a restart every request may return. Prices are
    seconds per batch, per new token, per pair of tokens, and per token copied to the device.
    ``prior``: the first three or all of them."""

    def __init__(
        self, prior: Sequence[float] = PRIOR_PREFILL, *, token_bytes: int = TYPICAL_TOKEN_BYTES
    ) -> None:
        n = TYPICAL_PREFILL_TOKENS
        super().__init__(
            (*prior, PRIOR_COPY_S * token_bytes)[:4],
            (1.0, n, n * n / 2, n),
            level_half_life=PREFILL_LEVEL_HALF_LIFE,
        )

    def observe(
        self, spans: Sequence[tuple[int, int]], seconds: float, num_copied: int = 0
    ) -> None:
        """Learn that a batch of ``(new tokens, tokens before them)`` per request, of which
        ``num_copied`` were copied to the device meanwhile, took ``seconds``."""
        num_tokens = sum(new for new, _ in spans)
        if num_tokens + num_copied < MIN_OBSERVED_TOKENS:
            return
        num_pairs = sum(_pairs(new, before) for new, before in spans)
        self.learn((1.0, num_tokens, num_pairs, num_copied), seconds)

    def seconds(self, new: int, before: int) -> float:
        """Return the prefill time of ``new`` tokens behind ``before`` others, without the batch's
        fixed time: a request prefills at least its last token, so no load saves that."""
        _, per_token, per_pair, _ = self.prices
        return per_token * new + per_pair * _pairs(new, before)

    def saved_seconds(self, num_saved: int, new: int, before: int) -> float:
        """Return how much sooner ``new`` tokens behind ``before`` others are done, if the first
        ``num_saved`` of them need not be computed but copied to the device."""
        rest_s = self.seconds(new - num_saved, before + num_saved)
        return self.seconds(new, before) - rest_s - self.prices[3] * num_saved

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of a cold prompt of typical length; ``None`` while all cost appears fixed, as after
        one short and late batch."""
        seconds = self.seconds(TYPICAL_PREFILL_TOKENS, 0)
        return TYPICAL_PREFILL_TOKENS / seconds if seconds > 0 else None


class TransferCost(OnlineCost):
    """Seconds of loads from one tier, estimated from finished ones. Prices are seconds per load and
    per byte."""

    def __init__(self, prior: Sequence[float] = PRIOR_TRANSFER) -> None:
        super().__init__(
            prior, (1.0, TYPICAL_TRANSFER_BYTES), level_half_life=TRANSFER_LEVEL_HALF_LIFE
        )

    def observe(self, num_bytes: int, seconds: float, num_loads: int = 1) -> None:
        """Learn that loads took ``seconds`` in all, from their turn to their end."""
        self.learn((num_loads, num_bytes), seconds)

    def seconds(self, num_bytes: int, num_loads: int = 1) -> float:
        return self.predict((num_loads, num_bytes))

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of a load of typical size; ``None`` while loads appear to take no time."""
        seconds = self.seconds(TYPICAL_TRANSFER_BYTES)
        return TYPICAL_TRANSFER_BYTES / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How much of a prefix to load: ``parts`` are tokens by tier, nearest first. ``load_s`` is the
    time until all has arrived, queue included; ``saved_s`` the prefill that it replaces.
    ``least_s`` is this request's time from its turn on by the plan that is best for it alone.
    ``total_s`` is that time by this plan, with what it holds up others."""

    parts: tuple[int, ...]
    load_s: float
    saved_s: float
    least_s: float = 0.0
    total_s: float = 0.0

    @property
    def useful_s(self) -> float:
        """How long a request that could start may wait for it, for its own sake or others'."""
        return max(self.load_s, self.saved_s * (1 + MAX_OWN_LOSS))

    @property
    def num_tokens(self) -> int:
        return sum(self.parts)

    @property
    def num_remote(self) -> int:
        """Tokens that come from another tier than the nearest."""
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
        self.page_tokens = page_tokens
        self.bytes_per_token = bytes_per_token
        self.prefill = PrefillCost() if prefill is None else prefill
        self.transfers = (*transfers, *map(TransferCost, PRIORS[len(transfers) :]))

    def load_seconds(self, parts: Sequence[int], ahead: Sequence[int] = ()) -> float:
        """Return the time until ``parts`` (tokens by tier) have arrived, behind the tokens of other
        loads. Loads follow each other; the parts of one load run side by side."""
        own_s = max(self._part_seconds(parts), default=self.transfers[0].seconds(0))
        return own_s + sum(self._part_seconds(ahead))

    def _part_seconds(self, parts: Sequence[int]) -> list[float]:
        costs = zip(self.transfers, parts, strict=False)
        return [cost.seconds(n * self.bytes_per_token) for cost, n in costs if n > 0]

    def plan(
        self,
        *,
        num_held: int,
        num_new: int,
        num_before: int,
        ahead: Sequence[int] = (),
        queue_wait_s: float = 0.0,
        num_others: int = 0,
        spans: Sequence[tuple[int, int]] = (),
        ends: Sequence[int] | None = None,
    ) -> LoadPlan:
        """Choose how much to load of a prefix of which the tiers hold ``num_held`` tokens.

        ``num_new`` tokens, the held ones first among them, follow ``num_before`` that need no
        prefill. ``spans`` are pairs of a tier and how many of the held tokens it holds, in order;
        without them the nearest holds all. ``ends`` are the usable lengths, shortest first, of
        models whose states lie at some places only. ``ahead`` are the tokens of other loads, by
        tier. Tokens that arrive while the request waits anyway (``queue_wait_s``) cost nothing.

        A prefill holds up ``num_others`` requests, whose decodes run or who wait for their turn,
        and a load none of them. So lengths count that cost this request at most ``MAX_OWN_LOSS``
        more than the best one. Of those the one is chosen with which all of them together wait the
        least, and of equal ones the longest. Lengths are whole pages; 0 means that everything is
        computed.
        """
        num_held = min(num_held, num_new) // self.page_tokens * self.page_tokens
        everything = self.prefill.seconds(num_new, num_before)
        if num_held <= 0:
            return LoadPlan((), 0.0, 0.0, everything, everything * (1 + num_others))
        # Of each plan: this request's time, how much of it holds up the others, and what it is.
        found: list[tuple[float, float, tuple[int, ...], float, float]]
        found = [(everything, everything, (), 0.0, 0.0)]
        for num_tokens in self._cuts(num_held, spans, ends):
            parts = self._parts(num_tokens, spans)
            load_s = self.load_seconds(parts, ahead)
            saved_s = self.prefill.saved_seconds(num_tokens, num_new, num_before)
            computed_s = everything - (1 - MIN_GAIN) * saved_s
            waits_s = max(0.0, load_s - queue_wait_s)
            # What would be given up at once is not begun.
            if self.gains(waits_s, saved_s, num_others):
                found.append((waits_s + computed_s, computed_s, parts, load_s, saved_s))
        least_s = min(found)[0]
        bound_s = least_s * (1 + MAX_OWN_LOSS * (num_others > 0))
        best, best_s = found[0], math.inf
        for one in found:
            total_s = one[0] + num_others * one[1]
            if one[0] <= bound_s and total_s <= best_s:
                best, best_s = one, total_s
        return LoadPlan(*best[2:], least_s, best[0] + num_others * best[1])

    def plan_of(
        self,
        num_tokens: int,
        *,
        num_new: int,
        num_before: int,
        ahead: Sequence[int] = (),
        spans: Sequence[tuple[int, int]] = (),
    ) -> LoadPlan:
        """Return the plan to load so many tokens, whether or not that pays. See ``plan``."""
        parts = self._parts(num_tokens, spans)
        saved_s = self.prefill.saved_seconds(num_tokens, num_new, num_before)
        return LoadPlan(parts, self.load_seconds(parts, ahead), saved_s)

    def should_wait(
        self, *, num_saved: int, num_before: int, left_s: float, num_others: int = 0
    ) -> bool:
        """Return whether a request that could start now should wait ``left_s`` for a load. The load
        saves the prefill of ``num_saved`` tokens behind ``num_before`` others, and ``num_others``
        requests the time of it."""
        saved_s = self.prefill.saved_seconds(num_saved, num_saved, num_before)
        return self.gains(left_s, saved_s, num_others)

    def gains(self, load_s: float, saved_s: float, num_others: int) -> bool:
        """Return whether it is worth to wait so long for a load that saves so much prefill, which
        would hold up ``num_others`` requests."""
        return load_s < saved_s * (1 + MAX_OWN_LOSS * (num_others > 0))

    def _cuts(
        self, num_held: int, spans: Sequence[tuple[int, int]], ends: Sequence[int] | None
    ) -> list[int]:
        """Return the lengths to compare: even parts, and the places where the tier changes. Of a
        load that may end at some places only, the last such place in each."""
        num_pages = num_held // self.page_tokens
        cuts = min(NUM_CUTS, num_pages)
        lengths = {num_pages * cut // cuts * self.page_tokens for cut in range(1, cuts + 1)}
        end = 0
        for _, num_tokens in spans[:MAX_SPANS]:
            end += num_tokens
            lengths.add(min(end, num_held) // self.page_tokens * self.page_tokens)
        if ends is not None:
            places = [bisect_right(ends, length) for length in lengths]
            lengths = {ends[place - 1] for place in places if place}
        return sorted(lengths - {0})

    def _parts(self, num_tokens: int, spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Return how many of the first tokens lie in each tier."""
        parts = [0] * len(self.transfers)
        for tier, length in spans:
            taken = min(length, num_tokens)
            parts[tier] += taken
            num_tokens -= taken
            if num_tokens <= 0:
                break
        parts[0] += num_tokens
        return tuple(parts)


def remote_first(num_tokens: int, parts: Sequence[int]) -> tuple[int, ...]:
    """Attribute ``num_tokens`` of loads of ``parts`` (tokens by tier) to tiers, when it is not
    known which are missing: the remote ones first, since they arrive last, then the nearest."""
    taken = [0] * max(1, len(parts))
    for tier in range(len(parts) - 1, 0, -1):
        taken[tier] = min(num_tokens, parts[tier])
        num_tokens -= taken[tier]
    taken[0] = num_tokens
    return tuple(taken)


def _pairs(new: int, before: int) -> float:
    """Return the number of pairs of a new token and one that it attends to."""
    return new * (before + new / 2)


class LoadDecision(enum.Enum):
    """The outcome of a prompt's tokens that neither device nor host held on arrival."""

    ABSENT = "absent"  # the tier does not hold them
    LOAD = "load"
    DECLINED = "declined"  # computing them was expected to be cheaper
    GAVE_UP = "gave_up"  # begun, but waiting longer would have cost more than computing

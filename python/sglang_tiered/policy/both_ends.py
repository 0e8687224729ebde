"""Where a prefill that begins at the front of a prefix meets a load that begins at its back.

Cake (Jin et al., ICML 2025, arXiv 2410.03065): of ``P`` seconds of prefill and ``L`` of loading the
two need ``P * L / (P + L)``. The back is cut into segments, which are read from the last to the
first. The front is computed in chunks, each up to where the two are expected to meet. Whatever the
prices were, they move towards each other, so a wrong one costs a segment that is both read and
computed, or the wait for one.

Pure: tokens and seconds in, decisions out. Positions are tokens of the prompt.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.policy.cost_model import MAX_OWN_LOSS, LoadPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.policy.cost_model import CostModel


MIN_SEGMENTS = 3
"""With fewer there is nothing to meet in."""

MAX_SEGMENTS = 16

MIN_SEGMENT_TOKENS = 128
"""A segment is a load of its own, with the work of the scheduler that a load is."""

MIN_GAIN = 0.02
MIN_GAIN_S = 0.005
"""A request is computed from both ends only if that beats the better of today's two ways by so much
of its time, and by so many seconds: a chunk boundary has costs that no price knows."""

Span = tuple[int, int]
"""A tier and a number of tokens in it."""


def segment_bounds(num_before: int, num_held: int, page_tokens: int) -> list[int]:
    """Return where the segments begin that can be loaded from the back of ``num_held`` tokens
    behind ``num_before``, and where the last one ends; nothing if they are too few. The first
    tokens are computed in any case, and belong to none."""
    least = max(MIN_SEGMENT_TOKENS, -(-num_held // MAX_SEGMENTS))
    size = -(-least // page_tokens) * page_tokens
    bounds = [*range(num_before, num_before + num_held, size), num_before + num_held]
    return bounds[1:] if len(bounds) > MIN_SEGMENTS else []


def spans_between(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """Return the part of ``spans`` that holds the tokens ``[start, end)`` of theirs."""
    found = []
    for tier, num_tokens in spans:
        taken = min(end, num_tokens) - max(0, start)
        if taken > 0:
            found.append((tier, taken))
        start -= num_tokens
        end -= num_tokens
    return found


def parts_of(spans: Sequence[Span], num_tiers: int) -> list[int]:
    parts = [0] * num_tiers
    for tier, num_tokens in spans:
        parts[tier] += num_tokens
    return parts


def plan_segments(
    costs: CostModel,
    *,
    num_held: int,
    num_new: int,
    num_before: int,
    spans: Sequence[Span],
    least: LoadPlan,
    ahead: Sequence[int] = (),
    queue_wait_s: float = 0.0,
    num_others: int = 0,
) -> tuple[list[int], LoadPlan] | None:
    """Return the bounds of the segments to load from the back, and all of it as a load; None where
    that does not pay.

    The tiers hold the first ``num_held`` of ``num_new`` tokens behind ``num_before`` cached ones,
    in ``spans``; ``least`` is the better of loading and computing. What is computed holds up
    ``num_others`` requests, as ``CostModel.plan`` has it."""
    bounds = segment_bounds(num_before, num_held, costs.page_tokens)
    if not bounds:
        return None
    spans = list(spans) or [(0, num_held)]
    rest_s = costs.prefill.seconds(num_new - num_held, num_before + num_held)
    bound_s = least.least_s * (1 + MAX_OWN_LOSS * (num_others > 0))
    best_s = least.total_s
    for start in bounds[:-1]:
        front_s = _front_s(costs, num_before, start)
        back = spans_between(spans, start - num_before, num_held)
        back_s = costs.load_seconds(parts_of(back, len(costs.transfers)), ahead)
        copied_s = costs.prefill.prices[3] * (num_held + num_before - start)
        own_s = max(front_s, back_s - queue_wait_s) + copied_s + rest_s
        if own_s <= bound_s:
            best_s = min(best_s, own_s + num_others * (front_s + rest_s))
    if best_s > least.total_s * (1 - MIN_GAIN) - MIN_GAIN_S:
        return None
    parts = parts_of(spans_between(spans, bounds[0] - num_before, num_held), len(costs.transfers))
    num_tokens = sum(parts)
    saved_s = costs.prefill.saved_seconds(num_tokens, num_tokens, bounds[0])
    return bounds, LoadPlan(tuple(parts), costs.load_seconds(parts, ahead), saved_s)


def _front_s(costs: CostModel, start: int, end: int) -> float:
    """Return what a chunk of these tokens takes, its batch included."""
    return costs.prefill.prices[0] + costs.prefill.seconds(end - start, start)


class BackLeft(NamedTuple):
    """What is still to come of the back. ``starts`` of its segments ascend; each ends where the
    next begins, the last at ``end``. ``left`` are the tokens by tier of each."""

    starts: Sequence[int]
    end: int
    left: Sequence[Sequence[int]]

    def seconds(self, costs: CostModel, start: int) -> float:
        """Return the time until every segment that begins at ``start`` or later has arrived."""
        parts = self.left[bisect_left(self.starts, start) :]
        totals = [sum(tokens) for tokens in zip(*parts, strict=True)]
        return costs.load_seconds(totals) if any(totals) else 0.0


def end_of_chunk(costs: CostModel, back: BackLeft, start: int) -> int | None:
    """Return where a chunk that begins at ``start`` ends: so that the later of it and of what lies
    behind is there soonest. None where nothing lies behind."""
    best, best_s = None, math.inf
    for bound in back.starts[bisect_right(back.starts, start) :]:
        front_s, back_s = _front_s(costs, start, bound), back.seconds(costs, bound)
        if max(front_s, back_s) < best_s:
            best, best_s = bound, max(front_s, back_s)
        if front_s >= back_s:
            break
    return best


def computes_next(
    costs: CostModel, back: BackLeft, start: int, *, num_others: int, late_s: float = 0.0
) -> bool:
    """Whether to compute the segment that begins at ``start``, which has not arrived, rather than
    wait for it. A back that is ``late_s`` late is expected to take as long again. Computing holds
    up ``num_others`` requests, and loading none; but for the sake of others nobody waits much
    longer than computing all the rest takes."""
    place = bisect_right(back.starts, start)
    end = back.starts[place] if place < len(back.starts) else back.end
    compute_s = _front_s(costs, start, end)
    left_s = max(back.seconds(costs, start), late_s)
    if compute_s > left_s:
        return False
    if left_s > (1 + MAX_OWN_LOSS) * _front_s(costs, start, back.end):
        return True
    own_s = back.seconds(costs, start) - back.seconds(costs, end)
    return max(own_s, late_s) >= num_others * compute_s

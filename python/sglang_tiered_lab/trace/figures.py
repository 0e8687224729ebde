"""The figures of a trace, by name, as ``stat --json`` writes them; its ``--help`` defines each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered_lab.trace.reuse import NEVER, measure
from sglang_tiered_lab.trace.sessions import with_sessions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from sglang_tiered_lab.trace.request import TraceRequest
    from sglang_tiered_lab.trace.reuse import Reuse


CURVE_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Capacities of the hit-rate curve, as shares of the different blocks of the trace."""

_TOP_SHARES = (0.01, 0.05, 0.1, 0.2)
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_NUM_TURNS = 5
_NUM_CURVE = 200


def describe(requests: Sequence[TraceRequest], capacities: Iterable[int] = ()) -> dict[str, Any]:
    """All figures of requests in order of arrival. ``capacities`` are further points of the curve,
    in tokens."""
    reuse = measure(requests)
    size = requests[0].block_tokens
    inputs = np.array([request.input_length for request in requests])
    outputs = np.array([request.output_length for request in requests])
    times = reuse.arrivals
    timed = bool(len(times)) and not np.isnan(times).any()
    duration_s = float(times[-1] - times[0]) if timed else None
    counts = reuse.counts()
    distances = reuse.distance[reuse.distance != NEVER]
    hits = reuse.request_hits()
    return {
        "num_requests": len(requests),
        "duration_s": duration_s,
        "rate_per_s": len(requests) / duration_s if duration_s else None,
        "block_tokens": size,
        "input_tokens": _summary(inputs),
        "output_tokens": _summary(outputs),
        "num_blocks": reuse.num_accesses,
        "num_unique_blocks": reuse.num_unique,
        "working_set_tokens": int(reuse.tokens[reuse.previous < 0].sum()),
        "seen_once_share": float(np.mean(counts == 1)) if len(counts) else None,
        "top_reuse_share": _top_shares(counts),
        "ideal_hit_rate": reuse.hit_rate(),
        "ideal_token_hit_rate": reuse.token_hit_rate(),
        "mean_request_hit_rate": _mean_request(requests, hits),
        "at_most_one_hit_share": float(np.mean(hits <= 1)),
        "reuse_distance_blocks": _summary(distances),
        "reuse_gap_s": _summary(reuse.gaps_s()) if timed else None,
        "turns": _turns(requests),
        "lru": [_lru_row(reuse, blocks, size) for blocks in _points(reuse, size, capacities)],
        "lru_curve": _curve(reuse, size),
    }


def _lru_row(reuse: Reuse, num_blocks: int, block_tokens: int) -> dict[str, Any]:
    return {
        "blocks": num_blocks,
        "tokens": num_blocks * block_tokens,
        "share": num_blocks / reuse.num_unique if reuse.num_unique else None,
        "hit_rate": reuse.hit_rate(num_blocks),
        "token_hit_rate": reuse.token_hit_rate(num_blocks),
    }


def _curve(reuse: Reuse, block_tokens: int) -> list[list[float]]:
    """Pairs of tokens and hit rate, evenly spaced on a logarithmic axis."""
    if not reuse.num_unique:
        return []
    capacities = np.unique(np.geomspace(1, reuse.num_unique, _NUM_CURVE).round().astype(int))
    return [[int(blocks) * block_tokens, reuse.hit_rate(int(blocks))] for blocks in capacities]


def _points(reuse: Reuse, block_tokens: int, capacities: Iterable[int]) -> list[int]:
    """Shares of the working set, 1 and 3 times the powers of ten below it, and what was asked."""
    unique = reuse.num_unique
    points = {round(share * unique) for share in CURVE_SHARES}
    points |= {factor * 10**power for power in range(2, 12) for factor in (1, 3)}
    points = {point for point in points if 1 <= point <= unique}
    return sorted(points | {capacity // block_tokens for capacity in capacities})


def _summary(values: npt.NDArray[Any]) -> dict[str, float] | None:
    if not len(values):
        return None
    quantiles = np.quantile(values, _QUANTILES)
    named = {f"p{round(100 * q)}": float(v) for q, v in zip(_QUANTILES, quantiles, strict=True)}
    return {**named, "max": float(values.max()), "mean": float(values.mean())}


def _top_shares(counts: npt.NDArray[np.int64]) -> dict[str, float] | None:
    """Of all reuses, those of the blocks that are reused most."""
    again = counts - 1
    total = int(again.sum())
    if not total:
        return None
    return {
        f"{share:.0%}": float(again[: int(share * len(again))].sum() / total)
        for share in _TOP_SHARES
    }


def _mean_request(requests: Sequence[TraceRequest], hits: npt.NDArray[np.int64]) -> float:
    """Mean over requests of the share of its tokens that it hits without bound."""
    shares = [
        min(int(hit) * request.block_tokens, request.input_length) / request.input_length
        for request, hit in zip(requests, hits, strict=True)
        if request.input_length
    ]
    return float(np.mean(shares)) if shares else 0.0


def _turns(requests: Sequence[TraceRequest]) -> dict[str, Any]:
    inferred = any(request.conversation is None for request in requests)
    sessions = with_sessions(requests)
    turns = np.array([request.turn or 1 for request in sessions])
    return {
        "inferred": inferred,
        "share": {str(turn): float(np.mean(turns == turn)) for turn in range(1, _NUM_TURNS + 1)},
        "max": int(turns.max()),
        "num_conversations": len({request.conversation for request in sessions}),
    }

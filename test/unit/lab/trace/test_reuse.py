"""Reuse by distances is what a cache would have done, and what was published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sglang_tiered_lab.trace.reader import read_trace
from sglang_tiered_lab.trace.reuse import measure
from sglang_tiered_lab.trace.sessions import with_sessions

# Blocks of 512 tokens: 0.5, 1.5, 5, 15, 26 and 51 million tokens.
CAPACITIES = (1000, 3000, 10_000, 30_000, 50_000, 100_000)


@pytest.mark.parametrize(
    ("name", "num_requests", "ideal", "by_tokens", "curve", "once"),
    [
        ("conversation", 12_031, 36.6, 37.4, (4.4, 6.5, 21.1, 32.6, 35.5, 36.4), 75.8),
        ("synthetic", 3_993, 64.0, 65.1, (8.2, 18.8, 42.3, 62.4, 64.0, 64.0), 58.4),
    ],
)
def test_the_published_traces_give_the_published_figures(
    published: Callable[[str], Path],
    name: str,
    num_requests: int,
    ideal: float,
    by_tokens: float,
    curve: tuple[float, ...],
    once: float,
) -> None:
    trace = list(read_trace(published(name)))
    reuse = measure(trace)
    assert len(trace) == num_requests
    assert round(100 * reuse.hit_rate(), 1) == ideal
    assert round(100 * reuse.token_hit_rate(), 1) == by_tokens
    for capacity, percent in zip(CAPACITIES, curve, strict=True):
        assert abs(100 * reuse.hit_rate(capacity) - percent) < 0.06, capacity
    assert round(100 * float(np.mean(reuse.counts() == 1)), 1) == once


@pytest.mark.parametrize(
    ("name", "shares", "deepest"),
    [
        ("conversation", (65.9, 16.8, 6.9, 3.4, 2.0), 43),
        ("synthetic", (56.3, 10.0, 8.5, 6.9, 5.4), 18),
    ],
)
def test_inferred_turns_are_those_published(
    published: Callable[[str], Path], name: str, shares: tuple[float, ...], deepest: int
) -> None:
    turns = [request.turn for request in with_sessions(list(read_trace(published(name))))]
    assert max(turn or 0 for turn in turns) == deepest
    for turn, percent in enumerate(shares, start=1):
        assert round(100 * turns.count(turn) / len(turns), 1) == percent

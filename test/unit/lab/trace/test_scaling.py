"""A scaled trace fits, and hits as the trace it came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kit.talks import make_request
from sglang_tiered_lab.trace.reader import read_trace
from sglang_tiered_lab.trace.request import TraceRequest
from sglang_tiered_lab.trace.reuse import measure
from sglang_tiered_lab.trace.scaling import Scaling, scale


@pytest.fixture
def trace() -> list[TraceRequest]:
    """Two conversations of two turns that share a system prompt of two blocks."""
    chains = [(0, 1, 2, 3), (0, 1, 9, 8), (0, 1, 2, 3, 4, 5, 6), (0, 1, 9, 8, 7)]
    return [
        make_request(ids, block_tokens=512, missing=100 * turn, arrival_s=10.0 + turn)
        for turn, ids in enumerate(chains)
    ]


def test_sessions_are_inferred_and_drawn_whole(trace: list[TraceRequest]) -> None:
    scaled = scale(trace, Scaling())
    assert [request.turn for request in scaled] == [1, 1, 2, 2]
    names = [request.conversation for request in scaled]
    assert names[0] == names[2] != names[1] == names[3]
    for seed in range(8):
        drawn = scale(trace, Scaling(num_sessions=1, seed=seed))
        assert len({request.conversation for request in drawn}) == 1
        assert [request.turn for request in drawn] == [1, 2]
        assert drawn == scale(trace, Scaling(num_sessions=1, seed=seed))


def test_the_conversation_trace_keeps_its_curve(published: Callable[[str], Path]) -> None:
    trace = list(read_trace(published("conversation")))
    before = measure(trace)
    whole = measure(scale(trace, Scaling(tokens_max=4096)))
    assert (whole.capacity == before.capacity).all()
    sample = measure(scale(trace, Scaling(tokens_max=4096, block_tokens=64, num_sessions=800)))
    for share in (0.05, 0.2, 1.0):
        rates = [reuse.hit_rate(int(share * reuse.num_unique)) for reuse in (before, sample)]
        assert abs(rates[0] - rates[1]) < 0.04, (share, rates)

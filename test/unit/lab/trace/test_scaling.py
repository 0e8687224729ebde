"""A scaled trace fits, and hits as the trace it came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kit.talks import make_request
from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace.reader import read_trace
from sglang_tiered_lab.trace.request import TraceRequest, num_blocks_for
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


def test_every_request_fits_and_keeps_its_blocks(trace: list[TraceRequest]) -> None:
    scaled = scale(trace, Scaling(tokens_max=256))
    assert {request.block_tokens for request in scaled} == {38}  # 512 * 256 // (7 * 512 - 200 + 5)
    for request, before in zip(scaled, trace, strict=True):
        assert request.context_length <= 256
        assert len(request.block_ids) == len(before.block_ids)
        assert num_blocks_for(request.input_length, 38) == len(request.block_ids)
        assert request.output_length >= 1
    before, after = measure(trace), measure(scaled)
    assert (before.capacity == after.capacity).all()


def test_ids_are_renumbered_from_zero(trace: list[TraceRequest]) -> None:
    ids = [block for request in scale(trace, Scaling()) for block in request.block_ids]
    assert list(dict.fromkeys(ids)) == list(range(len(set(ids)))) == list(range(10))


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


def test_time_begins_at_zero_and_is_stretched(trace: list[TraceRequest]) -> None:
    scaled = scale(trace, Scaling(time_factor=0.5))
    assert [request.arrival_s for request in scaled] == [0.0, 0.5, 1.0, 1.5]
    untimed = scale([make_request((1,), arrival_s=None)] * 2, Scaling(time_factor=2))
    assert [request.arrival_s for request in untimed] == [None, None]
    assert scale([], Scaling(tokens_max=100)) == []


def test_a_given_block_size_leaves_the_longest_out(trace: list[TraceRequest]) -> None:
    scaled = scale(trace, Scaling(tokens_max=100, block_tokens=20))
    assert [len(request.block_ids) for request in scaled] == [4, 4, 5]
    assert max(request.context_length for request in scaled) <= 100


@pytest.mark.parametrize(
    ("scaling", "what"),
    [
        (Scaling(tokens_max=3), "its blocks of 512 would vanish"),
        (Scaling(tokens_max=10, block_tokens=64), "no request fits 10 tokens"),
        (Scaling(tokens_max=4, block_tokens=1), "no request fits|cannot all differ"),
    ],
)
def test_what_cannot_be_scaled_is_one_sentence(
    trace: list[TraceRequest], scaling: Scaling, what: str
) -> None:
    with pytest.raises(TraceError, match=what) as caught:
        scale(trace, scaling)
    assert str(caught.value).endswith(".")


def test_blocks_that_cannot_differ_are_refused() -> None:
    trace = [make_request((number,)) for number in range(96)]
    with pytest.raises(TraceError, match="96 blocks cannot all differ with 1 tokens"):
        scale(trace, Scaling(block_tokens=1))
    with pytest.raises(TraceError, match="mixes block sizes"):
        scale([make_request((1,)), make_request((1,), block_tokens=32)], Scaling())


def test_the_conversation_trace_keeps_its_curve(published: Callable[[str], Path]) -> None:
    trace = list(read_trace(published("conversation")))
    before = measure(trace)
    whole = measure(scale(trace, Scaling(tokens_max=4096)))
    assert (whole.capacity == before.capacity).all()
    sample = measure(scale(trace, Scaling(tokens_max=4096, block_tokens=64, num_sessions=800)))
    for share in (0.05, 0.2, 1.0):
        rates = [reuse.hit_rate(int(share * reuse.num_unique)) for reuse in (before, sample)]
        assert abs(rates[0] - rates[1]) < 0.04, (share, rates)


def test_answers_shrink_by_the_same_factor(trace: list[TraceRequest]) -> None:
    trace = [msgspec.structs.replace(request, output_length=512) for request in trace]
    scaled = scale(trace, Scaling(block_tokens=32))
    assert {request.output_length for request in scaled} == {32}

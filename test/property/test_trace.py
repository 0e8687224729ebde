"""Traces of any shape: LRU by distances, conversion, prompts, and readers fed anything."""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kit.talks import make_request
from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace import mooncake
from sglang_tiered_lab.trace.blocks import with_block_tokens
from sglang_tiered_lab.trace.forms import Format
from sglang_tiered_lab.trace.prompts import prompt_tokens
from sglang_tiered_lab.trace.reader import read_trace
from sglang_tiered_lab.trace.request import MAX_BLOCK_ID, TraceRequest
from sglang_tiered_lab.trace.reuse import measure
from sglang_tiered_lab.trace.rows import Row
from sglang_tiered_lab.trace.tally import Tally

BLOCK_TOKENS = 16

chains = st.lists(st.integers(0, 3), max_size=8).map(tuple)
wide_chains = st.lists(st.integers(0, MAX_BLOCK_ID), max_size=4).map(tuple)


def requests_of(chain: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[TraceRequest]:
    def make(ids: tuple[int, ...], missing: int, output: int, arrival_ms: int) -> TraceRequest:
        return TraceRequest(
            arrival_s=arrival_ms / 1000,
            input_length=max(0, len(ids) * BLOCK_TOKENS - missing),
            output_length=output,
            block_ids=ids,
            block_tokens=BLOCK_TOKENS,
        )

    return st.builds(
        make, chain, st.integers(0, BLOCK_TOKENS - 1), st.integers(0, 99), st.integers(0, 10**7)
    )


traces = st.lists(requests_of(chains), max_size=30)


def decoded(request: TraceRequest) -> TraceRequest:
    return mooncake.BlockReader().decode(Row(1, 1, mooncake.encode(request)))


def shared(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def lru_hits(trace: list[TraceRequest], capacity: int) -> int:
    """The cache as the definition has it, one block at a time. A block is its whole prefix."""
    cache: collections.OrderedDict[tuple[int, ...], None] = collections.OrderedDict()
    hits = 0
    for request in trace:
        prefixes = list(itertools.accumulate((block,) for block in request.block_ids))
        hits += sum(1 for _ in itertools.takewhile(cache.__contains__, prefixes))
        for prefix in prefixes:
            cache[prefix] = None
            cache.move_to_end(prefix)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@given(traces, st.integers(0, 40))
def test_the_curve_is_what_a_simulated_lru_hits(trace: list[TraceRequest], capacity: int) -> None:
    reuse = measure(trace)
    blocks = max(1, reuse.num_accesses)
    assert round(reuse.hit_rate(capacity) * blocks) == lru_hits(trace, capacity)
    assert round(reuse.hit_rate() * blocks) == lru_hits(trace, 1 << 30)
    assert sum(reuse.request_hits()) == lru_hits(trace, 1 << 30)


@given(traces)
def test_a_trace_reads_back_as_written(trace: list[TraceRequest]) -> None:
    assert [decoded(request) for request in trace] == trace
    once = list(with_block_tokens(trace))
    assert list(with_block_tokens(once)) == once
    assert (measure(once).capacity == measure(trace).capacity).all()


@given(st.lists(requests_of(st.one_of(chains, wide_chains)), max_size=6), st.integers(0, 1 << 70))
def test_prompts_share_exactly_the_blocks_that_ids_share(
    trace: list[TraceRequest], seed: int
) -> None:
    prompts = [prompt_tokens(request, seed=seed).tolist() for request in trace]
    for (one, tokens), (other, others) in itertools.combinations(
        zip(trace, prompts, strict=True), 2
    ):
        blocks = shared(one.block_ids, other.block_ids)
        common = shared(tuple(tokens), tuple(others))
        # The block after the last shared one differs within its first ten tokens, if it has them.
        assert common >= min(blocks * BLOCK_TOKENS, one.input_length, other.input_length)
        if min(len(tokens), len(others)) >= blocks * BLOCK_TOKENS + 10:
            assert common < blocks * BLOCK_TOKENS + 10


def test_every_process_makes_the_same_tokens() -> None:
    tokens = prompt_tokens(make_request((7, 8)), seed=5)
    assert hashlib.sha256(bytes(tokens.tolist())).hexdigest().startswith("c1e3124d3933a7ee")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["id", "conversations", "from", "value", "hash_ids", "timestamp", "chat_id"]
            )
            | st.text(max_size=5),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
messages = st.fixed_dictionaries(
    {},
    optional={
        "from": st.sampled_from(["human", "gpt", "system", "x", None]),
        "value": st.text(max_size=9) | st.none(),
    },
)
conversations = st.fixed_dictionaries(
    {"conversations": st.lists(messages, max_size=5) | json_values}
)
contents = st.one_of(
    st.binary(max_size=400),
    st.lists(conversations | json_values, max_size=5).map(lambda rows: json.dumps(rows).encode()),
    st.lists(conversations | json_values, max_size=5).map(
        lambda rows: "\n".join(map(json.dumps, rows)).encode()
    ),
    st.tuples(st.lists(conversations, max_size=4), st.integers(0, 300), st.binary(max_size=3)).map(
        lambda parts: _damaged(json.dumps(parts[0]).encode(), parts[1], parts[2])
    ),
)


def _damaged(text: bytes, place: int, damage: bytes) -> bytes:
    return text[:place] + damage + text[place + 1 :]


@settings(max_examples=300)
@given(contents, st.sampled_from([None, *Format]))
def test_any_input_is_read_or_one_sentence(content: bytes, known: Format | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(content)
        tally = Tally()
        try:
            found = list(read_trace(path, format=known, tally=tally))
        except TraceError as error:
            assert "\n" not in str(error)
            assert str(error).endswith(".")
            return
    assert len(found) == tally.num_requests
    assert tally.num_skipped + tally.num_repaired <= tally.num_rows
    for request in found:
        assert len(request.block_ids) == -(-request.input_length // request.block_tokens)

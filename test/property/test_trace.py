"""Traces of any shape: LRU by distances, conversion, prompts, and readers fed anything."""

from __future__ import annotations

import collections
import gzip
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(deadline=None)
@given(traces, st.integers(0, 40))
def test_the_curve_is_what_a_simulated_lru_hits(trace: list[TraceRequest], capacity: int) -> None:
    reuse = measure(trace)
    blocks = max(1, reuse.num_accesses)
    assert round(reuse.hit_rate(capacity) * blocks) == lru_hits(trace, capacity)
    assert round(reuse.hit_rate() * blocks) == lru_hits(trace, 1 << 30)
    assert sum(reuse.request_hits()) == lru_hits(trace, 1 << 30)


@settings(deadline=None)
@given(traces, st.sampled_from([1, 2, 4, 16, 32, 64]))
def test_other_block_sizes_share_what_was_shared(trace: list[TraceRequest], size: int) -> None:
    """Exactly, in whole blocks of the larger size."""
    for (one, new_one), (other, new_other) in itertools.combinations(
        zip(trace, with_block_tokens(trace, size), strict=True), 2
    ):
        assert -(-one.input_length // size) == len(new_one.block_ids)
        before = shared(one.block_ids, other.block_ids)
        after = shared(new_one.block_ids, new_other.block_ids)
        if size >= BLOCK_TOKENS:
            joined = size // BLOCK_TOKENS
            whole = before // joined
            ends = before == len(one.block_ids) == len(other.block_ids)
            assert after == (-(-before // joined) if ends else whole)
        else:
            fewest = min(len(new_one.block_ids), len(new_other.block_ids))
            assert after == min(before * (BLOCK_TOKENS // size), fewest)


@settings(deadline=None)
@given(traces)
def test_a_trace_reads_back_as_written(trace: list[TraceRequest]) -> None:
    assert [decoded(request) for request in trace] == trace
    once = list(with_block_tokens(trace))
    assert list(with_block_tokens(once)) == once
    assert (measure(once).capacity == measure(trace).capacity).all()


@settings(deadline=None)
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


# ---- One conversation in any of the forms ----

SPEAKERS = {
    "user": ["human", "user", "Human", "USER "],
    "assistant": ["gpt", "chatgpt", "assistant", "bing", "Assistant"],
    "system": ["system", "developer"],
    "tool": ["tool", "observation", "function"],
}
texts = st.text(max_size=30)
turns = st.lists(st.tuples(texts, texts, st.booleans()), min_size=1, max_size=4)
names = st.text('abcXYZ-_ .é"\\[{', min_size=1, max_size=8)


@st.composite
def conversation(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Turns that are all used: a question, perhaps a tool's word, and an answer each."""
    said = [("system", draw(texts))] if draw(st.booleans()) else []
    for question, answer, has_tool in draw(turns):
        said.append(("user", question))
        said += [("assistant", "{}"), ("tool", question)] if has_tool else []
        said.append(("assistant", answer))
    return said


@st.composite
def written(draw: st.DrawFn, talks: dict[str, list[tuple[str, str]]]) -> bytes:
    """A file of the conversations, in one of the forms people have."""
    key = draw(st.sampled_from(["conversations", "conversation", "messages", "items"]))
    speaker, text = draw(st.sampled_from([("from", "value"), ("role", "content")]))
    in_parts = draw(st.booleans())

    def message(role: str, said: str) -> dict[str, Any]:
        cut = draw(st.integers(0, len(said))) if in_parts else 0
        parts = [{"type": "text", "text": said[:cut]}, {"type": "text", "text": said[cut:]}]
        return {speaker: draw(st.sampled_from(SPEAKERS[role])), text: parts if in_parts else said}

    rows = {name: {key: [message(*turn) for turn in talk]} for name, talk in talks.items()}
    named = [{"id": name, **row} for name, row in rows.items()]
    indent = draw(st.sampled_from([None, 1]))
    kind = draw(st.sampled_from(["array", "lines", "object", "wrapped", "bare"]))
    if kind == "lines":
        content = "\n".join(json.dumps(row, indent=indent) for row in named)
    else:
        whole: Any = {
            "array": named,
            "object": rows,
            "wrapped": {"data": named},
            "bare": {name: row[key] for name, row in rows.items()},
        }[kind]
        content = json.dumps(whole, indent=indent, ensure_ascii=draw(st.booleans()))
    mark = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    data = mark + content.encode("utf-8", "surrogatepass")
    return gzip.compress(data) if draw(st.booleans()) else data


def read_bytes(content: bytes) -> list[TraceRequest]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(content)
        return list(read_trace(path))


@settings(deadline=None)
@given(st.data(), st.dictionaries(names, conversation(), min_size=1, max_size=4))
def test_any_form_of_a_conversation_is_read_alike(
    data: st.DataObject, talks: dict[str, list[tuple[str, str]]]
) -> None:
    plain = [
        {
            "id": name,
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": text}
                for role, text in talk
            ],
        }
        for name, talk in talks.items()
    ]
    assert read_bytes(data.draw(written(talks))) == read_bytes(json.dumps(plain).encode())


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


@settings(max_examples=300, deadline=None)
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

"""The warm list stays bounded, prefers what was used last, and believes only what it wrote."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_tiered.checksummed import seal
from sglang_tiered.policy.warm_list import VERSION, WarmChain, WarmList, _WarmFile, decode, encode


def chain(length: int, first: int = 0, tenant: bytes = b"t", keys: bytes = b"k") -> WarmChain:
    return WarmChain(array("q", range(first, first + length)).tobytes(), tenant, keys)


@pytest.mark.parametrize(
    ("notes", "kept"),
    [
        pytest.param(
            [("turn 1", chain(100)), ("turn 2", chain(200), ["turn 1"])],
            [chain(200)],
            id="a longer turn replaces the earlier ones",
        ),
        pytest.param(
            [(name, chain(100, ord(name))) for name in "abac"],
            [chain(100, ord("c")), chain(100, ord("a"))],
            id="the least recently used is forgotten first",
        ),
        pytest.param(
            [("a", chain(100)), ("b", chain(251))],
            [chain(100)],
            id="a chain larger than the list evicts nothing",
        ),
        pytest.param(
            [("a", chain(10, tenant=b"purged")), ("b", chain(10, tenant=b"y"))],
            [chain(10, tenant=b"y")],
            id="a purged tenant is not written again",
        ),
    ],
)
def test_the_list_keeps_what_may_return(
    notes: list[tuple[Any, ...]], kept: list[WarmChain]
) -> None:
    warm = WarmList(250)
    for name, noted, *prefixes in notes:
        warm.note_chain(name, noted, prefixes=prefixes[0] if prefixes else [])
    warm.drop_chains(lambda one: one.tenant == b"purged")
    assert warm.snapshot() == kept
    assert warm.num_tokens == sum(one.num_tokens for one in kept)


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 120), st.sampled_from("abcdef")))
)
def test_the_bound_holds_whatever_is_used(events: list[tuple[str, int, str]]) -> None:
    warm = WarmList(200)
    for name, length, prefix in events:
        warm.note_chain(name, chain(length), prefixes=[prefix])
        kept = warm.snapshot()
        assert sum(one.num_tokens for one in kept) == warm.num_tokens <= 200
        assert len(kept) == len(warm)


def test_written_list_is_read_back() -> None:
    chains = [chain(100, tenant=b"tenant"), chain(3, keys=b"keys"), chain(0)]
    assert decode(encode(chains)) == chains
    assert list(chains[0].token_ids()) == list(range(100))


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(position: int, bit: int) -> None:
    data = bytearray(encode([chain(50, tenant=b"tenant")]))
    data[position % len(data)] ^= 1 << bit
    assert decode(bytes(data)) == []


@example(encode([chain(50)])[:-1])
@given(st.binary(max_size=200))
def test_anything_else_is_an_empty_list(data: bytes) -> None:
    assert decode(data) == []


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_list_of_another_version_is_ignored(version: int) -> None:
    """It verifies and has the same fields, which may mean something else."""
    chains = [chain(50)]
    assert decode(seal(_WarmFile(VERSION, chains))) == chains
    assert decode(seal(_WarmFile(version, chains))) == []

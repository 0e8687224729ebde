"""The warm list stays bounded, prefers what was used last, and believes only what it wrote."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.checksummed import seal
from sglang_tiered.policy.warm_list import VERSION, WarmChain, WarmList, _WarmFile, decode, encode


def chain(length: int, first: int = 0, tenant: bytes = b"t", keys: bytes = b"k") -> WarmChain:
    return WarmChain(array("q", range(first, first + length)).tobytes(), tenant, keys)


def test_longer_turn_replaces_the_conversations_earlier_ones() -> None:
    warm = WarmList(1000)
    warm.note_chain("turn 1", chain(100))
    warm.note_chain("turn 2", chain(200), prefixes=["turn 1"])
    assert warm.snapshot() == [chain(200)]
    assert warm.num_tokens == 200


def test_the_least_recently_used_is_forgotten_first() -> None:
    warm = WarmList(250)
    warm.note_chain("a", chain(100, 1))
    warm.note_chain("b", chain(100, 2))
    warm.note_chain("a", chain(100, 1))
    warm.note_chain("c", chain(100, 3))
    assert warm.snapshot() == [chain(100, 3), chain(100, 1)]


def test_chain_larger_than_the_list_evicts_nothing() -> None:
    warm = WarmList(250)
    warm.note_chain("a", chain(100))
    warm.note_chain("b", chain(251))
    assert warm.snapshot() == [chain(100)]


def test_a_purged_tenant_is_not_written_again() -> None:
    warm = WarmList(1000)
    warm.note_chain("a", chain(10, tenant=b"x"))
    warm.note_chain("b", chain(10, tenant=b"y"))
    warm.drop_chains(lambda one: one.tenant == b"x")
    assert warm.snapshot() == [chain(10, tenant=b"y")]
    assert warm.num_tokens == 10


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


@given(st.binary(max_size=200))
def test_anything_else_is_an_empty_list(data: bytes) -> None:
    assert decode(data) == []


def test_a_file_cut_short_is_an_empty_list() -> None:
    data = encode([chain(50)])
    assert decode(data[:-1]) == []
    assert decode(b"") == []


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_list_of_another_version_is_ignored(version: int) -> None:
    """It verifies and has the same fields, which may mean something else."""
    chains = [chain(50)]
    assert decode(seal(_WarmFile(VERSION, chains))) == chains
    assert decode(seal(_WarmFile(version, chains))) == []


def test_a_list_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        WarmList(0)

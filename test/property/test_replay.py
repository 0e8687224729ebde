"""Replays of random traces: no policy beats the bound, more room never hurts it, books balance."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tiered_lab.trace.replay.belady import MinCache
from sglang_tiered_lab.trace.replay.next_use import NextUse


@st.composite
def traces(draw: st.DrawFn) -> list[list[int]]:
    """Chains of blocks that share beginnings: each goes on from a leading part of an earlier one,
    full but for the last block of some."""
    chains: list[list[int]] = [[]]
    unit = itertools.count()
    for _ in range(draw(st.integers(1, 40))):
        above = chains[draw(st.integers(0, len(chains) - 1))]
        kept = draw(st.integers(0, len(above)))
        new = draw(st.integers(0, 6))
        chains.append([*above[:kept], *itertools.islice(unit, new)])
    return [chain for chain in chains[1:] if chain] or [[0]]


@settings(max_examples=60)
@given(chains=traces(), capacity=st.integers(0, 30))
def test_the_bound_is_optimal_and_grows_with_capacity(
    chains: list[list[int]], capacity: int
) -> None:
    hits = []
    for size in (capacity, capacity + 1, capacity + 7):
        with NextUse() as future:
            for chain in chains:
                future.add(chain, [1] * len(chain), 0)
            future.finish()
            cache = MinCache(size)
            hits.append(sum(cache.access(i, runs) for i, runs in enumerate(future.runs())))
            cache.check_integrity()
    assert hits == sorted(hits)
    assert hits[0] == furthest_in_future(chains, capacity)


def furthest_in_future(chains: list[list[int]], capacity: int) -> int:
    """Belady's MIN as it is written down, unit by unit: of what was asked for, keep what is
    wanted soonest, the beginning of a prompt before its end."""
    kept: set[int] = set()
    hits = 0
    for now, chain in enumerate(chains):
        hits += sum(unit in kept for unit in chain)
        kept.update(chain)
        wanted = {}
        for unit in kept:
            later = next((i for i in range(now + 1, len(chains)) if unit in chains[i]), None)
            if later is not None:
                wanted[unit] = (later, chains[later].index(unit))
        kept = set(sorted(wanted, key=wanted.__getitem__)[:capacity])
    return hits

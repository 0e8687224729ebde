"""Replays of random traces: no policy beats the bound, more room never hurts it, books balance."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_tiered_lab.trace.inputs import Input
from sglang_tiered_lab.trace.replay.belady import MinCache
from sglang_tiered_lab.trace.replay.next_use import NextUse
from sglang_tiered_lab.trace.replay.runner import Replay, replay
from sglang_tiered_lab.trace.replay.sizes import TierSizes
from sglang_tiered_lab.trace.replay.stream import TraceStream
from sglang_tiered_lab.trace.replay.timing import Hardware
from sglang_tiered_lab.trace.replay.totals import Totals

UNIT = 64
ONLINE = ("lru", "hicache", "tiered")
# So fast that every request is done before the next: all policies then see one order.
INSTANT = Hardware(
    kv_bytes_per_token=64,
    prefill_fixed_s=1e-9,
    prefill_token_s=0.0,
    prefill_pair_s=0.0,
    host_bytes_per_s=1e30,
    host_fixed_s=0.0,
    nvme_read_bytes_per_s=1e30,
    nvme_write_bytes_per_s=1e30,
    nvme_fixed_s=0.0,
)


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


def run(
    chains: list[list[int]], policies: Sequence[str], device: int, host: int, nvme: int, **how: int
) -> dict[str, Totals]:
    """Capacities in units."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        lines = (
            {
                "timestamp": 1000 * number,
                "input_length": UNIT * len(chain),
                "output_length": 1,
                "hash_ids": chain,
                "block_size": UNIT,
            }
            for number, chain in enumerate(chains)
        )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        servers = how.get("num_servers", 1)
        stream = TraceStream(Input(path), num_servers=servers, replicate=how.get("replicate", 1))
        nvme_bytes = nvme * UNIT * INSTANT.kv_bytes_per_token
        sizes = TierSizes(
            device_tokens=device * UNIT,
            host_tokens=host * UNIT,
            nvme_tokens=nvme * UNIT,
            nvme_bytes=nvme_bytes,
            region_bytes=nvme_bytes // 4 // 4096 * 4096,
        )
        runs = replay(Replay(stream, INSTANT, policies, [sizes], servers))
        return {run.policy: run.totals for run in runs}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    chains=traces(), device=st.integers(1, 12), more=st.integers(2, 12), nvme=st.integers(44, 80)
)
def test_no_policy_serves_more_than_the_bound(
    chains: list[list[int]], device: int, more: int, nvme: int
) -> None:
    totals = run(chains, (*ONLINE, "belady", "infinite"), device, device + more, nvme)
    for name in ONLINE:
        assert totals[name].num_tokens_hit <= totals["belady"].num_tokens_hit, name
    assert totals["belady"].num_tokens_hit <= totals["infinite"].num_tokens_hit
    seen: set[int] = set()
    ideal = 0
    for chain in chains:
        ideal += next((i for i, unit in enumerate(chain) if unit not in seen), len(chain))
        seen.update(chain)
    assert totals["infinite"].num_units_hit == ideal
    for found in totals.values():
        found.check_integrity()
        assert found.num_units == sum(map(len, chains))


@settings(max_examples=60, deadline=None)
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

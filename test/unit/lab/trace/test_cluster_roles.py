"""Servers that change their roles while the load turns: at too much of it more requests in time
than any fixed split serves, nobody lost, and what NVMe holds kept."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sglang_tiered_lab.trace.cluster.outcome import Outcome
from sglang_tiered_lab.trace.cluster.plan import Member, Plan
from sglang_tiered_lab.trace.cluster.profiles import load_profiles
from sglang_tiered_lab.trace.cluster.simulation import Simulation, run_cluster
from sglang_tiered_lab.trace.replay.server import Request

KIND = load_profiles().kind("h100", "llama-3.1-8b")
BLOCK, BLOCKS_A_UNIT = 512, 4
UNIT = BLOCK * BLOCKS_A_UNIT
NUM_SERVERS, NUM_REQUESTS, SPEED, COOLDOWN_S = 6, 1200, 2.0, 20.0


def plan(num_prefill: int, **more: object) -> Plan:
    roles = ["prefill"] * num_prefill + ["decode"] * (NUM_SERVERS - num_prefill)
    members = [Member(kind=KIND, role=role) for role in roles]
    more = {"speed": SPEED, **more}
    return Plan(members=members, policy="cost", unit_tokens=UNIT, **more)  # type: ignore[arg-type]


def turning(path: Path) -> list[Request]:
    """Answers are half as long at first, then twice as long to half of the prompt: prefill has
    twice as much to do as decode, then decode as prefill."""
    made = []
    with path.open() as file:
        for number, line in enumerate(itertools.islice(file, NUM_REQUESTS)):
            row = json.loads(line)
            tokens, answer = row["input_length"], max(1, row["output_length"] // 2)
            if number >= NUM_REQUESTS // 2:
                tokens, answer = max(1, tokens // 2), 2 * row["output_length"]
            blocks = row["hash_ids"][: -(-tokens // BLOCK)]
            units = blocks[BLOCKS_A_UNIT - 1 :: BLOCKS_A_UNIT]
            if len(blocks) % BLOCKS_A_UNIT:
                units.append(blocks[-1])
            made.append(Request(row["timestamp"] / 1000, tokens, answer, units, False))
    return made


def gaps(outcome: Outcome) -> list[float]:
    """Between roles that were taken, and before the first."""
    times = [0.0, *(at_s for at_s, _, _ in outcome.switches)]
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize(
    ("speed", "cooldown_s", "fixed", "moved"),
    [(2.0, COOLDOWN_S, 0.48, 0.74), (2.0, 60.0, 0.48, 0.63), (1.5, COOLDOWN_S, 0.89, 0.885)],
)
def test_roles_follow_a_trace_that_turns(
    published: Callable[[str], Path], speed: float, cooldown_s: float, fixed: float, moved: float
) -> None:
    requests = turning(published("conversation"))
    splits = range(1, NUM_SERVERS)
    runs = {number: run_cluster(plan(number, speed=speed), requests) for number in splits}
    best = max(runs, key=lambda number: runs[number].goodput)
    assert runs[best].goodput == pytest.approx(fixed, abs=0.02)
    run = run_cluster(plan(best, speed=speed, cooldown_s=cooldown_s), requests)
    assert run.goodput == pytest.approx(moved, abs=0.02)
    assert run.num_shed == 0 and not np.isnan(run.done_s).any()
    assert [role for _, _, role in run.switches] == ["decode"]
    assert all(gap >= cooldown_s for gap in gaps(run))


# ---- What a switch does ----


FIRSTS = [1000 * (number % 100) for number in range(300)]
PROMPTS = [
    Request(0.4 * number, 8 * UNIT, 8, range(first, first + 8), number >= 100)
    for number, first in enumerate(FIRSTS)
]
"""Nearly twice what one server prefills in time, each with an equal one long after it."""


@pytest.mark.parametrize("policy", ["cost", "cache-aware", "in-turn"])
def test_a_switch_loses_nobody(policy: str) -> None:
    made = dataclasses.replace(plan(1, cooldown_s=10.0, speed=1.0), policy=policy)
    run = Simulation(made, PROMPTS)
    outcome = run.run()
    assert outcome.switches and {role for _, _, role in outcome.switches} == {"prefill"}
    assert all(gap >= 10.0 for gap in gaps(outcome))
    assert not np.isnan(outcome.done_s).any()
    assert not any(run.books.num_requests)
    switched = outcome.switches[0][1]
    assert run.servers[switched].computed_tokens > 0, "it prefills now"

"""What routers of a modelled cluster may know, and what the published ones do with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sglang_tiered_lab.trace.cluster.plan import Member, Plan
from sglang_tiered_lab.trace.cluster.profiles import load_profiles
from sglang_tiered_lab.trace.cluster.server import Job
from sglang_tiered_lab.trace.cluster.simulation import Simulation
from sglang_tiered_lab.trace.replay.server import Request

KIND = load_profiles().kind("h100", "llama-3.1-8b")
UNIT = 512
BOTH = [Member(kind=KIND)]


def plan(policy: str, count: int, **more: Any) -> Plan:
    return Plan(members=BOTH * count, policy=policy, unit_tokens=UNIT, **more)


def prompt(at_s: float, units: Sequence[int], answer: int = 2) -> Request:
    return Request(at_s, UNIT * len(units), answer, units, False)


def chosen(run: Simulation, request: Request, now_s: float) -> int:
    job = Job(99, request, 0, now_s)
    return run.router.choose(job, now_s)


def begun(policy: str, count: int, requests: list[Request]) -> Simulation:
    """A cluster to which these requests were sent, and nothing has happened since."""
    run = Simulation(plan(policy, count), requests)
    for number, request in enumerate(requests):
        run._send(Job(number, request, 0, 0.0), 0.0)
    return run


@pytest.mark.parametrize("policy", ["cost", "oracle", "dynamo", "llm-d"])
def test_no_router_hears_how_long_answers_will_be(policy: str) -> None:
    """Requests that wait behind a full device and differ in their answers alone are one."""
    picks = []
    for answer in (2, 30_000):
        crowd = [prompt(0.0, range(1000 * n, 1000 * n + 300), answer) for n in range(12)]
        run = begun(policy, 3, crowd)
        run._poll(0.2)
        run.books.report(0.2)
        states = [(state.free_s, state.record.busy, state.num_others) for state in run.books.states]
        news = [prompt(0.0, range(50_000 + 100 * n, 50_040 + 100 * n)) for n in range(6)]
        picks.append((states, [chosen(run, one, 0.2) for one in news]))
    assert picks[0] == picks[1]

"""The modelled cluster: nobody is lost, times add up, and what is told late is known late."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sglang_tiered_lab.trace.cluster import POLICIES
from sglang_tiered_lab.trace.cluster.outcome import Outcome
from sglang_tiered_lab.trace.cluster.plan import Change, Member, Plan
from sglang_tiered_lab.trace.cluster.profiles import load_profiles
from sglang_tiered_lab.trace.cluster.server import Job
from sglang_tiered_lab.trace.cluster.simulation import Simulation, run_cluster
from sglang_tiered_lab.trace.replay.server import Request

KIND = load_profiles().kind("h100", "llama-3.1-8b")
UNIT = 512
BOTH = [Member(kind=KIND)]
SPLIT = [Member(kind=KIND, role="prefill")] * 3 + [Member(kind=KIND, role="decode")] * 2


def talks(count: int, turns: int = 3, gap_s: float = 5.0) -> list[Request]:
    """Conversations that begin one after the other and grow by two blocks a turn."""
    made = []
    for talk in range(count):
        for turn in range(turns):
            units = [0, *(1000 * (talk + 1) + position for position in range(3 + 2 * turn))]
            arrival_s = 0.3 * talk + gap_s * turn
            made.append(Request(arrival_s, UNIT * len(units) - 7, 20, units, turn > 0))
    return sorted(made, key=lambda request: request.arrival_s)


def plan(policy: str, members: Sequence[Member], **more: object) -> Plan:
    return Plan(members=members, policy=policy, unit_tokens=UNIT, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("members", [BOTH * 4, SPLIT], ids=["both", "split"])
def test_every_request_is_answered_once(policy: str, members: list[Member]) -> None:
    requests = talks(40)
    outcome = run_cluster(plan(policy, members), requests)
    assert not np.isnan(outcome.ttft_s).any()
    assert not np.isnan(outcome.done_s).any()
    assert (outcome.done_s > outcome.ttft_s).all()
    assert outcome.prompt_tokens == sum(request.input_tokens for request in requests)
    assert 0 < sum(outcome.hit_tokens.values()) < outcome.prompt_tokens
    assert outcome.goodput > 0.9


def test_one_request_takes_its_modelled_time() -> None:
    hardware = KIND.hardware
    outcome = run_cluster(plan("in-turn", BOTH), [Request(0.0, 4096, 11, range(8), False)])
    assert outcome.ttft_s[0] == pytest.approx(hardware.prefill_s(4096, 0))
    fixed, per_request, per_token = KIND.step_s
    step_s = fixed + per_request + per_token * (4096 + 11 / 2)
    assert outcome.tpot_s[0] == pytest.approx(step_s)
    assert outcome.done_s[0] == pytest.approx(outcome.ttft_s[0] + 10 * step_s)


def test_prompts_that_wait_are_prefilled_together() -> None:
    fixed_s = KIND.hardware.prefill_fixed_s
    prompts = [Request(1e-4 * (n > 0), 512, 1, [n], False) for n in range(4)]
    found = run_cluster(plan("in-turn", BOTH), prompts)
    first_s = KIND.hardware.prefill_s(512, 0)
    assert found.ttft_s[0] == pytest.approx(first_s)
    # Beside the first one's decode, which has ended by then.
    together_s = fixed_s + 3 * (first_s - fixed_s)
    assert found.ttft_s[1:] == pytest.approx([first_s + together_s - 1e-4] * 3, rel=1e-3)
    small = dataclasses.replace(KIND, chunk_tokens=1024)
    found = run_cluster(plan("in-turn", [Member(kind=small)]), prompts)
    assert found.ttft_s[1] == found.ttft_s[2] < found.ttft_s[3], "no more than a chunk"


def test_a_handoff_adds_its_transfer() -> None:
    members = [Member(kind=KIND, role="prefill"), Member(kind=KIND, role="decode")]
    outcome = run_cluster(plan("cost", members), [Request(0.0, 4096, 11, range(8), False)])
    num_bytes = 4096 * KIND.hardware.kv_bytes_per_token
    expected = KIND.hardware.prefill_s(4096, 0) + num_bytes / KIND.network_bytes_per_s
    assert outcome.ttft_s[0] == pytest.approx(expected)
    assert outcome.handoff_bytes == num_bytes


def test_each_tier_serves_when_nearer_ones_cannot() -> None:
    """The second of two equal prompts goes to the other server, in turn."""
    twice = [Request(10.0 * n, 24 * UNIT, 2, list(range(24)), n > 0) for n in range(2)]
    same = run_cluster(plan("in-turn", BOTH), twice)
    assert same.hit_tokens["device"] == 24 * UNIT - KIND.page_tokens
    fast = dataclasses.replace(KIND, peer=(1e-3, 1e-11), bucket=(1e-3, 1e-11))
    slow = dataclasses.replace(KIND, peer=(1.0, 1e-7))
    for kind, tiers, hit in (
        (fast, {"nvme", "peer"}, {"peer"}),
        (fast, {"bucket"}, {"bucket"}),
        (fast, {"host"}, set()),
        (slow, {"nvme", "peer"}, set()),
    ):
        found = run_cluster(plan("in-turn", [Member(kind=kind)] * 2, tiers=frozenset(tiers)), twice)
        assert {name for name, tokens in found.hit_tokens.items() if tokens} == hit


@pytest.mark.parametrize("members", [BOTH * 5, SPLIT], ids=["both", "split"])
@pytest.mark.parametrize("server", [0, 4])
def test_deaths_lose_nobody(members: list[Member], server: int) -> None:
    changes = [Change(at_s=0.5, what="die", server=server)]
    run = Simulation(plan("in-turn", members, changes=changes, speed=30), talks(60))
    outcome = run.run()
    assert outcome.num_restarted > 0
    assert not np.isnan(outcome.done_s).any()
    assert not any(run.books.num_requests)
    assert not any(run.books.truth.holders(unit) >> server & 1 for unit in run.books.truth.blocks)


def test_predicted_admission_sheds_the_last_class_only() -> None:
    requests = talks(120, turns=1)
    busy = plan("cost", BOTH * 2, speed=40, ttft_s=0.5)
    free = run_cluster(busy, requests)

    def admitted(how: str, **more: Any) -> Outcome:
        return run_cluster(dataclasses.replace(busy, admission=how, **more), requests)

    shed = admitted("predicted", classes=(0.3, 0.7))
    assert free.goodput < shed.goodput
    assert shed.num_shed > 0
    assert (np.isnan(shed.ttft_s) <= (shed.priority == 1)).all()
    assert admitted("soft").num_shed > 0


@pytest.mark.parametrize("policy", ["cost", "oracle", "dynamo", "llm-d"])
def test_no_router_hears_how_long_answers_will_be(policy: str) -> None:
    """Requests that wait behind a full device and differ in their answers alone are one."""

    def job(number: int, now_s: float, first: int, count: int, answer: int = 2) -> Job:
        units = range(first, first + count)
        return Job(number, Request(0.0, UNIT * count, answer, units, False), 0, now_s)

    picks = []
    for answer in (2, 30_000):
        crowd = [job(n, 0.0, 1000 * n, 300, answer) for n in range(12)]
        run = Simulation(plan(policy, BOTH * 3), [one.request for one in crowd])
        for one in crowd:
            run._send(one, 0.0)
        run._poll(0.2)
        run.books.report(0.2)
        states = [(state.free_s, state.record.busy, state.num_others) for state in run.books.states]
        news = [job(99, 0.2, 50_000 + 100 * n, 40) for n in range(6)]
        picks.append((states, [run.router.choose(one, 0.2) for one in news]))
    assert picks[0] == picks[1]

"""What routers of a modelled cluster may know, and what the published ones do with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from sglang_tiered_lab.trace.cluster.books import ActiveBlocks, Knowledge
from sglang_tiered_lab.trace.cluster.plan import Change, Member, Plan
from sglang_tiered_lab.trace.cluster.profiles import load_profiles
from sglang_tiered_lab.trace.cluster.residency import Expected
from sglang_tiered_lab.trace.cluster.routers import Tuning
from sglang_tiered_lab.trace.cluster.server import Job
from sglang_tiered_lab.trace.cluster.simulation import Simulation, run_cluster
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


def answering(
    run: Simulation, number: int, server: int, units: Sequence[int], answer: int = 2
) -> Job:
    """A request that a server has answered the first token of, as the books know it."""
    job = Job(number, prompt(0.0, units, answer), 0, 0.0)
    job.server = job.decode = server
    run.books.sent(job, 0)
    run.books.handed(job)
    run.books.answered(job)
    return job


def test_dynamo_counts_a_shared_block_once() -> None:
    """Two long prompts that share all blocks weigh less than one that is a little longer."""
    run = begun("dynamo", 2, [])
    for number, units in enumerate((range(40), range(40), range(100, 145))):
        answering(run, number, number // 2, units)
    assert chosen(run, prompt(0.0, range(200, 204)), 0.0) == 0
    # Forty of these blocks are under way there: the first server would hold six more.
    assert chosen(run, prompt(0.0, [*range(100, 140), *range(300, 306)]), 0.0) == 1


def test_active_blocks_end_with_their_last_prompt() -> None:
    blocks = ActiveBlocks(2, UNIT)
    long, short = (Job(n, prompt(0.0, range(count)), 0, 0.0) for n, count in enumerate((8, 3)))
    blocks.add(0, long)
    blocks.add(0, short)
    blocks.add(1, short)
    assert blocks.tokens == [8 * UNIT, 3 * UNIT]
    assert blocks.held(long) == {0: 8 * UNIT, 1: 3 * UNIT}
    blocks.remove(0, long)
    assert blocks.held(long) == {0: 3 * UNIT, 1: 3 * UNIT}
    blocks.remove(0, short)
    blocks.remove(1, short)
    assert blocks.tokens == [0, 0] and not blocks.held(short)


@pytest.mark.parametrize("policy", ["cost", "oracle", "dynamo", "llm-d"])
def test_no_router_hears_how_long_answers_will_be(policy: str) -> None:
    """Requests that wait behind a full device and differ in their answers alone are one."""
    picks = []
    for answer in (2, 30_000):
        crowd = [prompt(0.0, range(1000 * n, 1000 * n + 300), answer) for n in range(12)]
        run = begun(policy, 3, crowd)
        run._poll(0.2)
        run.books.report(0.2)
        states = [(state.free_s, state.busy, state.num_others) for state in run.books.told.states]
        news = [prompt(0.0, range(50_000 + 100 * n, 50_040 + 100 * n)) for n in range(6)]
        picks.append((states, [chosen(run, one, 0.2) for one in news]))
    assert picks[0] == picks[1]


def test_decode_servers_are_chosen_by_mean_answers() -> None:
    members = [Member(kind=KIND, role="prefill"), *[Member(kind=KIND, role="decode")] * 3]
    found = []
    for answer in (2, 20_000):
        run = Simulation(
            dataclasses.replace(plan("cost", 1), members=members), [prompt(0.0, range(8))]
        )
        jobs = [Job(n, prompt(0.0, range(9 * n, 9 * n + 8), answer), 0, 0.0) for n in range(9)]
        for job in jobs:
            run._send(job, 0.0)
        found.append([job.decode for job in jobs])
    assert found[0] == found[1]


def test_decodes_stretch_no_expectation_at_once() -> None:
    """Two servers whose reports are equal promise the same, though decodes slow one of them."""
    run = begun("cost", 2, [])
    for number in range(20):
        job = answering(run, number, 0, range(100 * number, 100 * number + 60), 3000)
        run.servers[0].begin_decode(job)
    work = []
    for number in range(2):
        run.router.open_servers = [number]
        state = run.books.told.states[number]
        before_s = state.free_s
        chosen(run, prompt(0.0, range(9000, 9040)), 0.0)
        work.append(state.free_s - before_s)
    assert work[0] == work[1]


def test_llm_d_sees_metrics_when_it_polls() -> None:
    run = begun("llm-d", 2, [])
    long = prompt(0.0, range(300))
    run._poll(0.0)
    jobs = [Job(n, prompt(0.0, range(400 * n, 400 * n + 300)), 0, 0.0) for n in range(4)]
    for job in jobs:
        job.server = job.decode = 0
        run.books.sent(job, 0)
        run.books.handed(job)
        run.servers[0].plan(job, run.books.truth.match(()).one(0, 1, UNIT))
        run.servers[0].enqueue(job)
    blind = {chosen(run, prompt(0.0, range(9000 + n, 9002 + n)), 0.0) for n in range(20)}
    assert blind == {0, 1}
    run._poll(0.05)
    assert {chosen(run, long, 0.05) for _ in range(5)} == {1}


def test_llm_d_takes_drives_for_less_than_memory() -> None:
    run = begun("llm-d", 2, [])
    units = range(20)
    truth = run.books.truth
    truth.add(units, truth.bits(0, (2,)))
    truth.add(range(8), truth.bits(1, (0,)))
    assert chosen(run, prompt(0.0, units), 0.0) == 1


def test_wrong_prices_mislead_a_servers_own_plans() -> None:
    """A server that takes its prefill for free loads nothing, and so computes all again."""
    twice = [prompt(100.0 * n, range(24)) for n in range(2)]
    fast = dataclasses.replace(KIND, peer=(1e-3, 1e-11))
    base = Plan(members=[Member(kind=fast)] * 2, policy="in-turn", unit_tokens=UNIT)

    def from_peers(seed: int, **known: Any) -> int:
        made = dataclasses.replace(base, seed=seed, knowledge=Knowledge(**known))
        return run_cluster(made, twice).hit_tokens["peer"]

    assert from_peers(0, price_factor=1.0)
    # Drawn so that a prefill seems cheap or a fetch dear to some server.
    wrong = [
        from_peers(seed, price_noise=6.0, misleads_servers=told)
        for told in (False, True)
        for seed in range(6)
    ]
    assert all(wrong[:6]), "an error of the router alone changed what servers do"
    assert not all(wrong[6:])


def test_a_server_that_died_comes_back_empty() -> None:
    """It is there until it dies, although it joins later; and has no page when it is back."""
    changes = [Change(at_s=50.0, what="die", server=0), Change(at_s=60.0, what="join", server=0)]
    early = [prompt(10.0 * n, range(20)) for n in range(3)]
    late = [prompt(100.0 + 20.0 * n, range(20)) for n in range(2)]
    more = {"changes": changes, "tiers": frozenset({"host", "nvme"})}
    for policy in ("in-turn", "cost", "cache-aware"):
        run = Simulation(plan(policy, 2, **more), [*early, *late])
        run.router.open_servers = [0, 1]
        assert run.servers[0].is_open
        run.run()
        assert run.servers[0].is_open and run.servers[1].is_open
    late = [prompt(1.0, range(20)), prompt(2.0, range(20)), prompt(100.0, range(900, 910))]
    run = Simulation(plan("in-turn", 2, knowledge=Knowledge(lag_s=55.0), **more), late)
    run.run()
    run.books.look(200.0)
    assert not run.servers[0].tiers[2].units or 900 in run.servers[0].tiers[2].units
    assert not run.books.view.blocks.get(0, 0) >> 2 * 2 & 1, "an event from before its death"


def test_what_was_learnt_of_servers_dies_with_them() -> None:
    run = Simulation(plan("cost", 2), [prompt(0.0, range(4))])
    state = run.books.told.states[0]
    state.slowdown = 3.0
    state.reserve(0.0, 100.0)
    predicted = run.books.predicted
    predicted.add([7], predicted.bits(0, (0,)))
    server = run.servers[0]
    server.is_open = False
    run._die(server, 1.0)
    assert state.slowdown == 1.0 and state.queue_s(1.0) == 0.0
    assert not predicted.blocks


def test_siblings_are_expected_until_the_last() -> None:
    soon = Expected(2)
    soon.expect(0, [1, 2, 3])
    soon.expect(0, [1, 2, 4])
    soon.expect(1, [1])
    soon.settle(0, [1, 2, 3])
    assert soon.match([1, 2, 3]).device == {0: 2, 1: 1}
    soon.forget_server(1)
    soon.settle(0, [1, 2, 4])
    soon.settle(1, [1])
    assert not soon.blocks


@pytest.mark.parametrize("policy", ["cost", "dynamo"])
def test_nothing_stays_expected_after_a_death(policy: str) -> None:
    """A prompt that waited for a decode server which died is sent to another to be prefilled."""
    slow = dataclasses.replace(KIND, network_bytes_per_s=1e9)
    members = [Member(kind=slow, role="prefill")] * 3 + [Member(kind=slow, role="decode")] * 2
    # The one that it was prefilled by takes no more.
    changes = [Change(at_s=5.9, what="drain", server=0), Change(at_s=6.0, what="die", server=4)]
    requests = [prompt(0.1 * n, range(100 * n, 100 * n + 60)) for n in range(60)]
    told = {"knowledge": Knowledge(lag_s=0.5), "tuning": Tuning(predicted_s=5.0)}
    made = plan(policy, 1, changes=changes, **told)
    run = Simulation(dataclasses.replace(made, members=members), requests)
    assert run.run().num_restarted
    run.router._held(Job(99, requests[0], 0, 0.0), 1e6)
    assert not run.books.predicted.blocks


def test_a_death_shortens_no_answer() -> None:
    """What is left of one after a server's death is not how long it was."""
    change = Change(at_s=5.0, what="die", server=1)
    run = Simulation(plan("in-turn", 2, changes=[change]), [prompt(0.0, range(4), answer=2000)])
    before = run.books.mean_new_tokens
    assert run.run().num_restarted == 1
    assert run.books.mean_new_tokens == pytest.approx(before + 0.02 * (2000 - before))

"""What a modelled server keeps, in which tier, and what it prefills together."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from sglang_tiered.policy.routing import NOTHING_HELD
from sglang_tiered_lab.trace.cluster.outcome import Outcome
from sglang_tiered_lab.trace.cluster.plan import Member, Plan
from sglang_tiered_lab.trace.cluster.profiles import Kind, load_profiles
from sglang_tiered_lab.trace.cluster.server import Job, Server, make_costs
from sglang_tiered_lab.trace.cluster.simulation import Simulation, run_cluster
from sglang_tiered_lab.trace.cluster.tree import HostMemory, Nodes, SharedBlocks
from sglang_tiered_lab.trace.replay.server import Request

PAGE = 64
SMALL = dataclasses.replace(
    load_profiles().kind("h100", "llama-3.1-8b"),
    kv_tokens=64 * PAGE,
    host_tokens=128 * PAGE,
    nvme_tokens=10_000 * PAGE,
)


def one(kind: Kind = SMALL, tiers: str = "") -> Plan:
    return Plan(
        members=[Member(kind=kind)],
        policy="in-turn",
        unit_tokens=PAGE,
        tiers=frozenset(tiers.split()),
    )


def serve(requests: Sequence[Request], kind: Kind = SMALL, tiers: str = "") -> Outcome:
    return run_cluster(one(kind, tiers), requests)


def ask(at_s: float, prompt: int, num_tokens: int, num_new: int = 1) -> Request:
    """A prompt of its own number, in pages."""
    first = 1000 * prompt
    return Request(at_s, num_tokens, num_new, range(first, first - (-num_tokens // PAGE)), False)


def test_host_memory_keeps_part_of_a_round() -> None:
    """Plain LRU evicts each prompt just before it comes again."""
    once = [ask(float(n), n % 16, 20 * PAGE) for n in range(16)]
    rounds = [ask(float(n), n % 16, 20 * PAGE) for n in range(16 * 6)]
    first, found = serve(once, tiers="host nvme"), serve(rounds, tiers="host nvme")
    assert not sum(first.hit_tokens.values())
    assert found.hit_tokens["host"] > 0.02 * found.prompt_tokens
    assert found.hit_tokens["nvme"] > found.hit_tokens["host"]


def test_a_prompt_loses_its_last_node_first() -> None:
    """Its beginning is a node, since a shorter prompt ended there: without it the rest would be
    useless, and without the rest it stays."""
    turns = [ask(0, 0, 20 * PAGE), ask(1, 0, 40 * PAGE)]
    for num_pages, kept in ((20, 40), (40, 20), (50, 0)):
        found = serve([*turns, ask(2, 1, num_pages * PAGE), ask(3, 0, 60 * PAGE)])
        assert found.hit_tokens["device"] == (20 + kept) * PAGE
    found = serve([ask(0, 0, 40 * PAGE), ask(1, 1, 40 * PAGE), ask(2, 0, 40 * PAGE)])
    assert not found.hit_tokens["device"], "a node goes whole"


def test_pages_are_hit_whole_and_never_the_last() -> None:
    def hits(num_tokens: int) -> int:
        return serve([ask(0, 0, num_tokens), ask(1, 0, num_tokens)]).hit_tokens["device"]

    assert [hits(count) for count in (63, 64, 65, 127, 128, 129)] == [0, 0, 64, 64, 64, 128]


def test_what_decodes_is_in_device_memory_once() -> None:
    """Beside a long answer of half the memory the other half serves as cache."""
    long = ask(0, 0, 30 * PAGE, num_new=10_000)
    kind = dataclasses.replace(SMALL, kv_tokens=64 * PAGE + 10_000)
    found = serve([long, ask(1, 1, 30 * PAGE), ask(2, 1, 30 * PAGE)], kind)
    assert found.done_s[0] > 5
    assert found.hit_tokens["device"] == 29 * PAGE


def test_what_runs_has_whole_pages_and_one_more() -> None:
    """SGLang frees a page for every request at every step."""
    server = Simulation(one(), []).servers[0]
    job = Job(0, ask(0, 0, 100, num_new=10), 0, 0.0)
    server.plan(job, NOTHING_HELD)
    server.begin(job)
    assert server.tiers[0].capacity_tokens == SMALL.kv_tokens - 3 * PAGE


def test_what_memory_loses_meanwhile_is_loaded() -> None:
    """The prompt before it evicts what it found on the device when it came."""
    found = serve(
        [ask(0, 0, 20 * PAGE), ask(1, 1, 60 * PAGE), ask(1 + 1e-4, 0, 20 * PAGE)], tiers="nvme"
    )
    assert found.hit_tokens == {"device": 0, "host": 0, "nvme": 19 * PAGE, "peer": 0, "bucket": 0}


def test_prompts_that_wait_are_prefilled_together() -> None:
    hardware = SMALL.hardware
    prompts = [ask(0, 0, 10 * PAGE), *(ask(1e-4, n, 5 * PAGE) for n in (1, 2, 3))]
    found = serve(prompts)
    fixed_s = hardware.prefill_fixed_s
    together_s = fixed_s + 3 * (hardware.prefill_s(5 * PAGE, 0) - fixed_s)
    first_s = hardware.prefill_s(10 * PAGE, 0)
    assert found.ttft_s[0] == pytest.approx(first_s)
    # Beside the first one's decode, which has ended by then.
    assert found.ttft_s[1:] == pytest.approx([first_s + together_s - 1e-4] * 3, rel=1e-3)
    found = serve(prompts, dataclasses.replace(SMALL, chunk_tokens=10 * PAGE))
    assert found.ttft_s[1] == found.ttft_s[2] < found.ttft_s[3], "no more than a chunk"


def test_decodes_stand_still_where_steps_do_not_mix() -> None:
    apart = dataclasses.replace(SMALL, mixes=False, kv_tokens=10_000 * PAGE)
    requests = [ask(0, 0, PAGE, num_new=50), ask(0.05, 1, 2000 * PAGE)]
    found, alone = serve(requests, apart), serve(requests[:1], apart)
    prefill_s = apart.hardware.prefill_s(2000 * PAGE, 0)
    # The step that was under way ends first.
    assert prefill_s < found.ttft_s[1] < prefill_s + 1.01 * alone.tpot_s[0]
    assert found.done_s[0] == pytest.approx(alone.done_s[0] + prefill_s, rel=1e-3)


def test_host_memory_balances_whatever_is_asked() -> None:
    draw = random.Random(1)
    nodes = Nodes()
    tier = HostMemory(400, 100, nodes)
    for _ in range(3000):
        prompt, length = draw.randrange(12), draw.randrange(1, 12)
        units = list(range(100 * prompt, 100 * prompt + length))
        lengths = [10] * length
        held = 0
        while held < length and units[held] in tier:
            held += 1
        nodes.add(units)
        new = tier.touch(reversed(units), reversed(lengths))
        if held:
            tier.came_back(units[:held], lengths[:held])
        if new:
            tier.was_stored(units, 10 * length)
        gone = tier.trim()
        nodes.forget(gone)
        assert not any(unit in tier for unit in gone)
        tier.check_integrity()


def test_prompts_that_run_share_their_blocks() -> None:
    """The second one has room beside the first, as most of its memory is the same."""
    common = range(40)
    first, second = (
        Request(at_s, 44 * PAGE, 20_000, [*common, *range(own, own + 4)], False)
        for at_s, own in ((0.0, 100), (10.0, 200))
    )
    kind = dataclasses.replace(SMALL, kv_tokens=64 * PAGE + 2 * 20_000)
    found = serve([first, second], kind)
    assert found.done_s[0] > 60
    assert found.ttft_s[1] < 1
    apart = second._replace(units=range(300, 344))
    assert serve([first, apart], kind).ttft_s[1] > 50


def test_a_shared_block_is_there_once() -> None:
    shared = SharedBlocks()
    for units in ([1, 2, 3], [1, 2], [1]):
        shared.hold(units)
    assert (shared.num_spared, shared.num_held([1, 2, 4, 3])) == (3, 2)
    shared.release([1, 2, 3])
    assert (shared.num_spared, shared.num_held([1, 2, 3])) == (1, 2)
    shared.release([1, 2])
    shared.release([1])
    assert shared.num_spared == shared.num_held([1]) == 0


@pytest.mark.parametrize("before", [0, 1536])
def test_a_chunk_is_a_step_of_decodes(before: int) -> None:
    """Attention to a long prefix takes its time, but brings no decode another token."""
    kind = load_profiles().kind("h100", "llama-3.1-8b")
    server = Server(0, kind, "both", PAGE, (kind.kv_tokens, 0, 0), make_costs(kind, PAGE))
    server.begin_decode(Job(0, ask(0.0, 0, 1000, 5000), 0, 0.0))
    cached = Job(1, ask(0.0, 1, before * PAGE), 0, 0.0)
    prompt = Job(2, ask(0.0, 1, before * PAGE + 2 * kind.chunk_tokens), 0, 0.0)
    server.tiers[0].touch(cached.request.units, [PAGE] * before)
    server._nodes.add(cached.request.units)
    server.plan(prompt, NOTHING_HELD)
    server.begin(prompt)
    server.launch()
    server.advance(server.next_s())
    assert prompt.hits[0] == before * PAGE
    assert server.left_s == pytest.approx(0, abs=1e-9)
    assert server.steps == pytest.approx(2)

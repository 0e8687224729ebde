"""One decision: by seconds where there are prices, else by tokens that wait."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.clock import Clock
from kit.cost_records import record_of
from sglang_tiered.policy.cost_model import CostModel, PrefillCost
from sglang_tiered.policy.routing import Held, RequestClass, ServerState
from sglang_tiered.policy.server_costs import DecodeLoad, Room, Waiting
from sglang_tiered.route.ext_proc import FULL_DUPLEX, Decider, Request, process
from sglang_tiered.route.fleet import Fleet, Member
from sglang_tiered.route.picker import Picked, Picker, Refused
from sglang_tiered.route.prompt import Prompt, TokenReader
from sglang_tiered.route.record import Numbers
from sglang_tiered.route.replicas import DEVICE, DISK, Replica
from sglang_tiered.route.settings import Classes, Source

PAGE = 64


def costs_of(token_s: float) -> CostModel:
    prefill = PrefillCost((1e-3, token_s, 1e-9), token_bytes=1000)
    return CostModel(page_tokens=PAGE, bytes_per_token=1000, prefill=prefill)


MODEL, SLOW = costs_of(1e-4), costs_of(1e-2)


PLAIN = RequestClass("plain")


class World:
    """Servers that were heard of just now."""

    def __init__(self, folder: Path) -> None:
        file = folder / "servers"
        file.write_text("")
        self.clock = Clock(100.0)
        self.fleet = Fleet(Source(str(file)), clock=self.clock)
        self.picker = Picker(self.fleet, clock=self.clock, draw=lambda: 0.0)

    def add(
        self, *, num_ranks: int = 1, is_priced: bool = True, costs: CostModel = MODEL, **more: Any
    ) -> Member:
        number = len(self.fleet.members) + 1
        member = Member(f"http://192.0.2.{number}:30000", f"192.0.2.{number}:30000")
        if is_priced:
            for rank in range(num_ranks):
                record = record_of(costs, **{"rank": rank, **more})
                state = ServerState(record, self.clock())
                member.replicas[rank] = Replica(member.url, state)
                member.role, member.bootstrap_port = record.role, record.bootstrap_port
            member.num_ranks = num_ranks
        member.is_up, member.seen_s = True, self.clock()
        self.fleet.members[member.address] = member
        return member

    def pick(self, prompt: Prompt, klass: RequestClass = PLAIN, **more: Any) -> Picked:
        picked = self.picker.pick(prompt, klass, **more)
        assert isinstance(picked, Picked), picked
        return picked


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.fleet._context.destroy(linger=0)


def prompt_of(num_tokens: int = 10 * PAGE, **more: Any) -> Prompt:
    return Prompt(num_tokens, array("I", range(num_tokens)), **more)


def test_pages_that_are_held_decide(world: World) -> None:
    servers = [world.add() for _ in range(3)]
    prompt = prompt_of()
    servers[1].replicas[0].pages.store(DEVICE, prompt.keys(PAGE)[:8])
    picked = world.pick(prompt)
    assert picked.by == "cost" and picked.targets[0] is servers[1]
    assert picked.held == Held(device=8 * PAGE)
    assert len(picked.targets) == 3 == len(set(picked.destination.split(",")))


def test_a_long_queue_outweighs_pages(world: World) -> None:
    busy, idle = world.add(queue_wait_s=9.0), world.add()
    prompt = prompt_of()
    busy.replicas[0].pages.store(DEVICE, prompt.keys(PAGE))
    assert world.pick(prompt).targets[0] is idle


def test_siblings_follow_before_any_event(world: World) -> None:
    world.add()
    for _ in range(2):
        world.add(queue_wait_s=0.5)
    long = prompt_of(100 * PAGE)
    first = world.pick(long)
    second = world.pick(long)
    assert second.targets[0] is first.targets[0] and second.held.device == 100 * PAGE
    for picked in (first, second):
        world.picker.answered(picked, True, picked.targets[0].address)
        world.picker.ended(picked)  # a second time
    assert not any(one.pages._soon for one in world.fleet.replicas())
    assert [one.tokens_sent for one in world.fleet.members.values()] == [0, 0, 0]


def test_stored_pages_count_as_nvme_and_of_peers(world: World) -> None:
    servers = [world.add(server="00") for _ in range(3)]
    prompt = prompt_of()
    mirror = world.fleet.stored._mirror
    for member, num_pages in zip(servers, (1, 6), strict=False):
        known = mirror.join(member.url, "")
        assert known is not None and mirror.add_pages(known, prompt.stored(PAGE)[:num_pages])
        member.replicas[0].known = known
    held = world.picker._held(world.fleet.replicas(), prompt)
    assert list(held.values()) == [
        Held(nvme=PAGE, peer=5 * PAGE),
        Held(nvme=6 * PAGE),
        Held(peer=6 * PAGE),
    ]


def test_requests_that_were_sent_count_before_reports(world: World) -> None:
    for _ in range(3):
        world.add()
    picked = []
    for number in range(3):
        ids = array("I", [number] * 10 * PAGE)
        picked.append(world.pick(Prompt(len(ids), ids)).targets[0])
    assert len(set(picked)) == 3


@pytest.mark.parametrize("ids", [None, array("I", range(100 * PAGE))])
def test_a_guessed_length_has_a_price_too(world: World, ids: array[int] | None) -> None:
    """What nobody reads in time is the longest: a slow server has the fewest tokens waiting."""
    fast = world.add(queue_wait_s=0.5)
    world.add(costs=SLOW, computes_on="cpu")
    prompt = Prompt(100 * PAGE, ids, is_stream=True)
    picked = world.pick(prompt)
    assert (picked.by, picked.targets[0]) == ("cost", fast)
    world.clock.now += 9.0
    world.picker.answered(picked, True, fast.address)
    state = fast.replicas[0].state
    assert (state.slowdown > 1.0) is (ids is not None), "a guess teaches nothing"


def test_without_prices_the_fewest_tokens_decide(world: World) -> None:
    first, second = world.add(), world.add(is_priced=False)
    long = world.pick(Prompt(5000))
    assert long.by == "least-tokens"
    others = [world.pick(Prompt(100)).targets[0] for _ in range(3)]
    assert set(others) == {first, second} - {long.targets[0]}
    world.picker.ended(long)
    assert world.pick(Prompt(100)).targets[0] is long.targets[0]


def test_a_retry_goes_where_it_was_not(world: World) -> None:
    servers = [world.add() for _ in range(3)]
    tried = [world.pick(prompt_of(), request="a").targets[0]]
    tried += [world.pick(prompt_of(), request="a", is_retry=True).targets[0] for _ in range(2)]
    assert set(tried) == set(servers)
    assert world.pick(prompt_of(), request="a", is_retry=True), "all were tried: any may be again"


@pytest.mark.parametrize(("num_prefills", "num_decodes"), [(1, 2), (2, 1), (1, 3), (1, 1)])
def test_a_retry_takes_a_scarce_half_again(
    world: World, num_prefills: int, num_decodes: int
) -> None:
    """Nobody knows which half failed: each is passed over as long as its role has another."""
    prefills = [world.add(role="prefill", bootstrap_port=8998) for _ in range(num_prefills)]
    decodes = [world.add(role="decode") for _ in range(num_decodes)]
    tries = [world.pick(prompt_of(), request="a", is_retry=number > 0) for number in range(3)]
    assert {one.prefill for one in tries} == set(prefills)
    assert {one.targets[0] for one in tries} == set(decodes)


def test_pairs_stand_in_where_the_rest_failed(world: World) -> None:
    world.add()
    prefill, decode = world.add(role="prefill", bootstrap_port=8998), world.add(role="decode")
    assert world.pick(prompt_of(), request="a").prefill is None
    again = world.pick(prompt_of(), request="a", is_retry=True)
    assert (again.prefill, again.targets) == (prefill, [decode])


def test_nvme_of_others_counts_within_a_namespace(world: World) -> None:
    first, second = world.add(server="aa"), world.add(server="bb", queue_wait_s=9.0)
    prompt = prompt_of()
    second.replicas[0].pages.store(DISK, prompt.keys(PAGE))
    assert world.pick(prompt).held.peer == 10 * PAGE
    other = world.add(server="cc", namespace="22" * 32)
    picked = world.pick(prompt, subset={other.address})
    assert picked.held == Held() and first.tokens_sent == prompt.num_tokens


def test_late_request_is_refused_unless_a_server_rests(world: World) -> None:
    world.add(queue_wait_s=9.0)
    soon = RequestClass("soon", limit_s=1.0)
    refused = world.picker.pick(prompt_of(), soon)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.klass) == (429, "soon") and 8 <= refused.retry_after_s <= 10
    assert world.pick(prompt_of(), RequestClass("kept", limit_s=1.0, is_sheddable=False))
    world.add()
    assert world.pick(prompt_of(100_000), soon), "a prediction may be wrong"


def test_replica_is_named(world: World) -> None:
    member, prompt = world.add(num_ranks=2), prompt_of()
    member.replicas[1].pages.store(DEVICE, prompt.keys(PAGE))
    picked = world.pick(prompt)
    assert picked.headers()["x-override-routed-dp-rank"] == "1" and picked.targets == [member]


def test_pair_computes_and_answers(world: World) -> None:
    prefills = [world.add(role="prefill", bootstrap_port=8998) for _ in range(2)]
    full = world.add(role="decode", device=Room(4000, 4096))
    decode = world.add(role="decode")
    prompt = prompt_of()
    prefills[1].replicas[0].pages.store(DEVICE, prompt.keys(PAGE))
    picked = world.pick(prompt, request="a")
    assert (picked.prefill, picked.targets) == (prefills[1], [decode])
    told = picked.headers()
    assert told["x-prefiller-host-port"] == prefills[1].address
    assert told["x-override-bootstrap-host"] == "192.0.2.2"
    assert told["x-override-bootstrap-port"] == "8998"
    again = world.pick(prompt, request="a", is_retry=True)
    assert (again.prefill, again.targets) == (prefills[0], [full])
    room = "x-override-bootstrap-room"
    assert again.headers()[room] != told[room]


def test_decode_servers_are_taken_in_turn(world: World) -> None:
    """Between two records one is not sent all that comes; who waits for its handoff counts."""
    world.add(role="prefill", bootstrap_port=8998)
    steps, room = (100, 500, 1e6, 2600, 5.1e6, 500), Room(0, 1 << 20)
    for number in range(4):
        waiting = Waiting(0 if number else 7, 0)
        world.add(role="decode", decode=DecodeLoad(5, 64, steps), waiting=waiting, device=room)
    counts = Counter(world.pick(prompt_of()).destination for _ in range(21))
    assert list(counts.values()) == [7, 7, 7]


@pytest.mark.parametrize("rank", [0, 3])
def test_room_leads_to_the_picked_replica(world: World, rank: int) -> None:
    """A header that names a replica of one half is mirrored to the other."""
    prefill = world.add(role="prefill", bootstrap_port=8998, num_ranks=4)
    world.add(role="decode", num_ranks=2)
    prefill.replicas[rank].pages.store(DEVICE, prompt_of().keys(PAGE))
    del prefill.replicas[1]  # which has told nothing yet
    told = [world.pick(prompt_of()).headers() for _ in range(20)]
    assert {int(one["x-override-bootstrap-room"]) % 4 for one in told} == {rank}
    assert not any("dp-rank" in name for one in told for name in one)


def test_halves_without_costs_are_a_pair(world: World) -> None:
    """Each was sent requests by itself, which it cannot answer."""
    prefill, decode = world.add(is_priced=False), world.add(is_priced=False)
    prefill.role, prefill.bootstrap_port, decode.role = "prefill", 8998, "decode"
    picked = world.pick(prompt_of())
    assert (picked.prefill, picked.targets) == (prefill, [decode])
    assert picked.headers()["x-override-bootstrap-port"] == "8998"


def test_slowdown_is_learnt_of_streams_alone(world: World) -> None:
    member = world.add()
    state = member.replicas[0].state
    for is_stream, is_good, served, learns in (
        (False, True, member.address, False),
        (True, False, member.address, False),
        (True, True, "192.0.2.99:1", False),
        (True, True, member.address, True),
    ):
        picked = world.pick(prompt_of(is_stream=is_stream))
        world.clock.now += 9.0
        member.seen_s = world.clock()
        world.picker.answered(picked, is_good, served)
        assert (state.slowdown > 1.0) is learns


def test_servers_that_are_all_late_are_picked(world: World) -> None:
    late, drained, refused = world.add(), world.add(), world.add()
    drained.is_draining, refused.is_up = True, False
    world.clock.now += 10.0
    assert world.pick(prompt_of()).targets == [late]
    ready = world.add()
    assert world.pick(prompt_of()).targets == [ready]
    assert world.pick(prompt_of(), subset={late.address}).targets == [late]
    ready.is_up = False
    world.clock.now += 60.0
    refused_all = world.picker.pick(prompt_of(), PLAIN)
    assert isinstance(refused_all, Refused) and refused_all.status == 503


@pytest.mark.parametrize("late", ["prefill", "decode"])
def test_a_half_that_is_late_is_picked(world: World, late: str) -> None:
    """Where it is the only one of its role, and before a late server that does both."""
    prefill, decode = world.add(role="prefill", bootstrap_port=8998), world.add(role="decode")
    for member in (prefill if late == "prefill" else decode, world.add()):
        member.seen_s -= 10.0
    picked = world.pick(prompt_of())
    assert (picked.prefill, picked.targets) == (prefill, [decode])


@pytest.mark.parametrize("request_id", ["mine", "long" * 15_000])
def test_id_used_again_keeps_its_failover(world: World, request_id: str) -> None:
    """A client that sends its id with every request had each retried where it had just failed."""
    idle, busy = world.add(), world.add(queue_wait_s=9.0)
    for _ in range(2):
        assert world.pick(prompt_of(), request=request_id).targets[0] is idle
        retried = world.pick(prompt_of(), request=request_id, is_retry=True)
        assert retried.targets[0] is busy
    assert sum(map(len, world.picker._tried)) <= 128


# ---- Asked by a gateway, message by message ----


def test_body_that_ends_with_trailers_is_picked_for(world: World) -> None:
    """Its last chunk does not say that it is the last. No byte of a header evades the pick."""
    head, body, end = Request(), Request(), Request()
    head.protocol_config.request_body_mode = FULL_DUPLEX
    head.request_headers.end_of_stream = False
    head.request_headers.headers.headers.add(key="x-request-id", raw_value=b"\xff")
    body.request_body.body = b'{"prompt": [1, 2]}'
    end.request_trailers.SetInParent()
    member = world.add(is_priced=False)

    async def messages() -> AsyncIterator[Any]:
        for message in (head, body, end):
            yield message

    async def run() -> list[Any]:
        reader = TokenReader(None, world.fleet.tokenize, 5.0)
        decider = Decider(reader, world.picker, Classes(None), Numbers())
        try:
            return [one async for one in process(decider, messages(), None)]
        finally:
            reader.close()

    answers = asyncio.run(run())
    kinds = [one.WhichOneof("choice") for one in answers]
    assert kinds == ["request_headers", "request_body", "request_trailers"]
    part = answers[1].request_body.response.body_mutation.streamed_response
    assert (part.body, part.end_of_stream) == (body.request_body.body, False)
    inner = answers[0].dynamic_metadata.fields["envoy.lb"].struct_value
    assert inner["x-gateway-destination-endpoint"] == member.address

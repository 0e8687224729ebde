"""The score of a server: load and slow tiers never make it better, and ties are shared out."""

from __future__ import annotations

import collections
import copy
import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kit.cost_records import record_of
from sglang_tiered.policy.cost_model import MAX_OWN_LOSS, CostModel, PrefillCost, TransferCost
from sglang_tiered.policy.routing import (
    TIE_S,
    TIE_SHARE,
    DecodeState,
    Held,
    ServerState,
    choose_decode,
    choose_server,
    estimate,
    least_ttft,
)

PAGE, BYTES = 64, 1000
Prices = tuple[float, float]
prices = st.tuples(st.floats(0, 0.5), st.floats(1e-12, 1e-6))
three = st.tuples(prices, prices, prices)
pages = st.integers(0, 40).map(lambda count: count * PAGE)
holdings = st.builds(Held, pages, pages, pages, pages, pages)
ahead = st.tuples(pages, pages, pages)
seconds = st.floats(0, 3)


def make_costs(tiers: tuple[Prices, ...], prefill: float = 1e-4) -> CostModel:
    return CostModel(
        page_tokens=PAGE,
        bytes_per_token=BYTES,
        prefill=PrefillCost((2e-3, prefill, 1e-9)),
        transfers=[TransferCost(tier) for tier in tiers],
    )


def make_state(
    costs: CostModel, free_s: float = 0.0, num_others: int = 0, slowdown: float = 1.0, **load: Any
) -> ServerState:
    """Of a server that is heard of for ever."""
    state = ServerState(record_of(costs, num_others=num_others, **load), 0.0)
    state.free_s, state.slowdown, state.silent_s = free_s, slowdown, math.inf
    return state


states = st.builds(
    make_state,
    three.map(make_costs),
    free_s=seconds,
    busy=st.floats(0, 1),
    ahead_tokens=ahead,
    slowdown=st.floats(0.25, 4),
    service_s=st.floats(0, 1),
    num_others=st.integers(0, 50),
)


def tokens_of(held: Held, rest: int) -> int:
    return held.device + held.host + held.num_loadable + rest


def score(state: ServerState, held: Held, rest: int, at_s: float = 0.0) -> float:
    return estimate(state, held, tokens_of(held, rest), at_s).score_s


def idle(number: int) -> list[ServerState]:
    return [make_state(make_costs(())) for _ in range(number)]


def chosen(states: list[ServerState], num_tokens: int = 100, held: Any = None, **how: Any) -> Any:
    """The choice among these servers."""
    how.setdefault("draw", random.random)
    return choose_server(dict(enumerate(states)), held or {}, num_tokens, 0.0, **how)


@given(
    *(states, holdings, st.integers(1, 3000), seconds, ahead, st.floats(0, 1), st.integers(0, 50))
)
def test_more_load_never_makes_a_server_better(
    calm: ServerState,
    held: Held,
    rest: int,
    more_s: float,
    more_loading: tuple[int, ...],
    busier: float,
    num_more: int,
) -> None:
    record, loaded = calm.record, copy.copy(calm)
    loaded.record = msgspec.structs.replace(
        record,
        busy=max(record.busy, busier),
        ahead_tokens=tuple(a + b for a, b in zip(record.ahead_tokens, more_loading, strict=True)),
    )
    loaded.free_s += more_s
    loaded.num_others += num_more
    assert score(calm, held, rest) <= score(loaded, held, rest) * (1 + 1e-9)


prompts = st.tuples(holdings, st.integers(1, 100_000))


@given(states, st.lists(prompts, min_size=1, max_size=4), prompts, seconds, seconds)
@example(  # a long one behind many short ones
    make_state(make_costs(()), free_s=3.0, busy=0.9, service_s=0.02),
    *([(Held(), 60_000)], (Held(), 2000), 0.0, 0.0),
)
def test_requests_sent_never_make_their_server_better(
    state: ServerState,
    sent: list[tuple[Held, int]],
    other: tuple[Held, int],
    now_s: float,
    later_s: float,
) -> None:
    """Not for any other prompt, then or later: it would draw them all to itself."""
    for its_held, its_rest in sent:
        before = copy.copy(state)
        state.reserve(now_s, estimate(state, its_held, tokens_of(its_held, its_rest), now_s).work_s)
        for at_s in (now_s, now_s + later_s):
            assert score(before, *other, at_s) <= score(state, *other, at_s) * (1 + 1e-9)


@given(states, holdings, st.integers(1, 5000))
def test_expectations_follow_the_servers_own_plan(
    state: ServerState, held: Held, rest: int
) -> None:
    """A prefill that holds up others loads more than is best for the request alone."""
    state.slowdown = 1.0
    n, costs = tokens_of(held, rest), state.costs
    before = held.device + held.host
    spans = ((0, held.nvme), (1, held.peer), (2, held.object))
    plan = costs.plan(
        num_held=held.num_loadable,
        num_new=n - before,
        num_before=before,
        ahead=state.record.ahead_tokens,
        queue_wait_s=state.free_s,
        num_others=state.num_others,
        spans=spans,
    )
    found = estimate(state, held, n, 0.0, charge=0.0)
    own_s = costs.prefill.prices[0] + costs.prefill.seconds(n - before, before)
    assert found.loaded == plan.num_tokens
    assert found.work_s == pytest.approx(own_s - plan.saved_s)
    assert found.ttft_s >= found.score_s * (1 - 1e-9)
    if not state.num_others:
        assert found.ttft_s == pytest.approx(found.score_s)
    least_s = found.score_s - state.free_s - costs.prefill.prices[0]
    assert found.ttft_s - found.score_s <= MAX_OWN_LOSS * least_s + 1e-9


@given(three, st.integers(0, 2), st.floats(1, 100), holdings, st.integers(1, 3000), seconds)
def test_a_slower_tier_never_attracts(
    tiers: tuple[Prices, ...], which: int, factor: float, held: Held, rest: int, queue_s: float
) -> None:
    slower = list(tiers)
    slower[which] = (tiers[which][0] * factor, tiers[which][1] * factor)
    one, other = (
        make_state(make_costs(tuple(each)), queue_s, busy=0.5) for each in (tiers, slower)
    )
    assert score(one, held, rest) <= score(other, held, rest) * (1 + 1e-9)


@given(st.lists(st.floats(0, 60), min_size=1, max_size=20), st.integers(1, 5000), st.booleans())
def test_without_information_the_least_load_wins(
    queues: list[float], num_tokens: int, has_holder: bool
) -> None:
    states = [make_state(make_costs(()), free_s=queue_s) for queue_s in queues]
    everywhere = Held(device=PAGE) if has_holder else Held()
    server, expected = chosen(states, num_tokens, elsewhere=everywhere, draw=lambda: 0.0)
    least = min(estimate(one, everywhere, num_tokens, 0.0).score_s for one in states)
    assert expected.score_s <= least + max(TIE_S, TIE_SHARE * least)
    assert queues[server] <= min(queues) + max(TIE_S, TIE_SHARE * least)


def test_ties_do_not_herd() -> None:
    states, draw = idle(16), random.Random(1).random
    taken = collections.Counter(chosen(states, 1000, draw=draw)[0] for _ in range(1600))
    assert len(taken) == 16
    assert max(taken.values()) < 160


@given(
    st.lists(st.tuples(states, holdings), min_size=1, max_size=12),
    st.integers(1, 8000),
    st.integers(0, 99),
)
def test_the_bound_never_hides_the_best(
    servers: list[tuple[ServerState, Held]], rest: int, seed: int
) -> None:
    """Some servers are not planned for; the choice is as if all were."""
    states = [state for state, _ in servers]
    n = max(tokens_of(held, rest) for _, held in servers)
    held = {number: one for number, (_, one) in enumerate(servers)}
    _, expected = chosen(states, n, held, draw=random.Random(seed).random)
    estimates = [estimate(one, held[number], n, 0.0) for number, one in enumerate(states)]
    least = min(one.score_s for one in estimates)
    assert expected.score_s <= least + max(TIE_S, TIE_SHARE * least) + 1e-9
    soonest = min(one.ttft_s for one in estimates)
    assert least_ttft(dict(enumerate(states)), held, n, 0.0) == pytest.approx(soonest)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_score_that_is_no_number_hides_nobody(broken: float) -> None:
    states = idle(3)
    for state in states:
        state.slowdown = broken
    chosen(states)
    states[1].slowdown = 1.0
    states[1].free_s = 100.0
    for _ in range(9):
        assert chosen(states)[0] == 1
    assert 100 < least_ttft(dict(enumerate(states)), {}, 100, 0.0) < 101


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9000)), min_size=1, max_size=8),
    st.integers(1, 5000),
)
def test_decode_goes_where_there_is_room(loads: list[tuple[int, int]], num_tokens: int) -> None:
    states = [
        DecodeState((0.01, 1e-4), 10_000, num_running=n, num_tokens=used) for n, used in loads
    ]
    chosen = choose_decode(dict(enumerate(states)), num_tokens, 100, draw=random.random)
    has_room = [one.num_tokens + num_tokens + 100 <= one.max_tokens for one in states]
    assert has_room[chosen] or not any(has_room)
    if any(has_room):
        best = min(one.next_step_s for one, room in zip(states, has_room, strict=True) if room)
        assert states[chosen].next_step_s <= best * 1.01


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1000)), max_size=50))
def test_what_is_learnt_stays_within_bounds(answers: list[tuple[float, float]]) -> None:
    state = make_state(make_costs(()))
    for predicted_s, seen_s in answers:
        state.answered(predicted_s, seen_s)
    assert 0.25 <= state.slowdown <= 4

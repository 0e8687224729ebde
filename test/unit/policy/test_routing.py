"""What a router makes of records: nothing counts twice or is forgotten, and silence is no rest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import cost_records
from sglang_tiered.policy.cost_model import CostModel, PrefillCost
from sglang_tiered.policy.routing import (
    Held,
    ServerState,
    choose_decode,
    choose_server,
    estimate,
    retry_after_s,
)
from sglang_tiered.policy.server_costs import (
    TIERS,
    DecodeLoad,
    PrefillPrices,
    RankCosts,
    Room,
    ServerCosts,
    TierPrices,
    parse_server_costs,
)

MODEL = CostModel(
    page_tokens=64, bytes_per_token=1000, prefill=PrefillCost((1e-3, 1e-4, 1e-9), token_bytes=1000)
)


def record_of(**more: Any) -> RankCosts:
    load = {"queue_wait_s": 0.5, "running_prefill_s": 0.25, "busy": 0.5, "service_s": 0.125}
    load |= {"num_others": 7, "ahead_tokens": (64, 0, 128)}
    return cost_records.record_of(MODEL, **{**load, **more})


def state_of(record: RankCosts) -> ServerState:
    return ServerState(record, 100.0)


def test_what_was_sent_counts_until_snapshots_have_it() -> None:
    """Of decode too: a router asks for one snapshot several times."""
    state = state_of(record_of())
    decode = state.decode
    decode.reserve(100.5, 700)
    for age_s, expected in ((0.75, (3, 1724)), (0.25, (2, 1024))):
        busy = {"decode": DecodeLoad(2, 8, (0,) * 6), "device": Room(1024, 4096)}
        state.report(record_of(age_s=age_s, **busy), 101.0)
        assert (decode.num_running, decode.num_tokens) == expected


def test_a_queue_ages_by_what_runs_alone() -> None:
    """A scheduler that hangs has done nothing more, however often it is asked."""
    state = state_of(record_of(age_s=0.1))
    assert state.queue_s(100.0) == pytest.approx(0.65)
    for now_s in range(101, 160):
        state.report(record_of(age_s=float(now_s)), float(now_s))
        assert state.queue_s(float(now_s)) == pytest.approx(0.5)


@pytest.mark.parametrize(("running_s", "left_s"), [(0.25, 1.5), (30.0, 2.25)])
def test_a_server_heard_no_more_is_not_idle(running_s: float, left_s: float) -> None:
    state = state_of(record_of(queue_wait_s=2.25, running_prefill_s=running_s))
    at_s = 100.0 + running_s
    assert state.queue_s(at_s) == pytest.approx(2.25)
    assert state.queue_s(at_s + 1e6) == pytest.approx(left_s)
    state.reserve(at_s + 1e6, 1.0)
    assert state.queue_s(at_s + 2e6) == pytest.approx(left_s + 1.0)


def test_what_was_sent_since_the_snapshot_stays() -> None:
    """While a long batch runs, reports tell of the time before it."""
    idle = {"queue_wait_s": 0.0, "running_prefill_s": 3.0, "num_others": 1}
    state = state_of(record_of(**idle))
    for at_s in (100.1, 100.2, 100.3):
        state.reserve(at_s, 1.0)
    state.report(record_of(**idle, age_s=0.35), 100.5)
    assert state.queue_s(100.5) == pytest.approx(2.65 + 2.0)
    assert state.num_others == 3
    state.report(record_of(**idle, age_s=0.05), 100.6)
    assert state.queue_s(100.6) == pytest.approx(2.95)
    assert (state.num_others, state.sent) == (1, [])


def test_equal_prices_are_one_model_until_they_change() -> None:
    first, second = state_of(record_of()), state_of(record_of())
    assert first.costs is second.costs
    second.report(record_of(prefill=PrefillPrices((1e-3, 1e-3, 1e-9, 1e-9), 9)), 101.0)
    assert second.costs.prefill.prices[1] == 1e-3 > first.costs.prefill.prices[1]


@given(st.tuples(st.floats(1e-3, 0.1), st.floats(0, 1e-2)), st.sets(st.integers(1, 64), min_size=2))
def test_steps_are_priced_by_their_batch(prices: tuple[float, float], sizes: set[int]) -> None:
    steps = [(b, 1e6 * (prices[0] + prices[1] * b)) for b in sizes]
    sums = [
        sum(column) for column in zip(*((1, b, t, b * b, b * t) for b, t in steps), strict=True)
    ]
    moments = (*map(float, sums), 0.0)
    state = state_of(record_of(decode=DecodeLoad(0, 8, moments)))  # type: ignore[arg-type]
    assert state.decode.prices == pytest.approx(prices, rel=1e-3, abs=1e-6)


@given(st.tuples(*[st.floats(0, 1e30)] * 6), st.integers(0, 1))
def test_no_moments_break_a_choice(moments: Any, capacity: int) -> None:
    record = record_of(decode=DecodeLoad(0, 8, moments), device=Room(0, capacity))
    states = {number: state_of(one).decode for number, one in enumerate((record, record_of()))}
    assert all(0 <= price < 1e31 for price in states[0].prices)
    assert choose_decode(states, 100, 10, draw=lambda: 0.0) in states


BIGGEST = (1 << 53) - 1


@pytest.mark.parametrize("num_tokens", [1, 5000, 1_000_000])
@pytest.mark.parametrize("price", [0.0, 1e6])
@pytest.mark.parametrize("service_s", [0.0, 5e-324, 1e9])
def test_the_worst_record_hides_nobody(num_tokens: int, price: float, service_s: float) -> None:
    worst = record_of(
        prefill=PrefillPrices((1e6, price, price, price), 0),
        tiers={name: TierPrices((1e6, price), 0, healthy=True) for name in TIERS},
        kv_bytes_per_token=BIGGEST,
        ahead_tokens=(BIGGEST,) * 3,
        num_others=BIGGEST,
        queue_wait_s=1e9,
        running_prefill_s=1e9,
        service_s=service_s,
        busy=1.0,
    )
    data = msgspec.json.encode(ServerCosts(draining=False, num_ranks=1, ranks=(worst,)))
    states = dict(enumerate(map(state_of, (*parse_server_costs(data).ranks, record_of()))))
    held = {0: Held(nvme=BIGGEST // 64 * 64)}
    assert estimate(states[0], held[0], num_tokens, 100.0).score_s < float("inf")
    for candidates in ([0], [0, 1]):
        among = {one: states[one] for one in candidates}
        server, _ = choose_server(among, held, num_tokens, 100.0, draw=lambda: 0.0)
        assert server == candidates[-1]


@pytest.mark.parametrize(
    ("limit_s", "predicted_s", "queue_s", "after_s"),
    [
        (2.0, 2.0, 10.0, None),
        (2.0, 5.5, 10.0, 4),
        (2.0, 5.5, 0.5, 1),
        (2.0, 5.5, 0.0, None),
        (2.0, float("inf"), float("inf"), 60),
        (2.0, 1e6, 1e6, 60),
    ],
)
def test_late_requests_come_again_when_queues_are_shorter(
    limit_s: float, predicted_s: float, queue_s: float, after_s: int | None
) -> None:
    assert retry_after_s(limit_s, predicted_s, queue_s) == after_s

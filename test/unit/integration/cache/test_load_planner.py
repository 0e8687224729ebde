"""Plans follow what was measured, waits end, and the books of waiting requests balance."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.clock import Clock
from sglang_tiered.integration.cache.load_planner import (
    ALWAYS_DEADLINE_S,
    LoadPlanner,
)
from sglang_tiered.policy.cost_model import (
    MAX_OWN_LOSS,
    CostModel,
    LoadDecision,
    PrefillCost,
    TransferCost,
)
from sglang_tiered.storage.base import Span, Tier

TOKEN_S = 1e-4
BYTES_PER_TOKEN = 1000
LOAD_TOKEN_S = 1e-5


def make_planner(
    *, load_token_s: float = LOAD_TOKEN_S, follows: bool = False, always: bool = False
) -> tuple[LoadPlanner[str], Clock]:
    costs = CostModel(
        page_tokens=64,
        bytes_per_token=BYTES_PER_TOKEN,
        prefill=PrefillCost((1e-3, TOKEN_S, 0.0)),
        transfers=[TransferCost((1e-6, load_token_s / BYTES_PER_TOKEN))],
    )
    clock = Clock(100.0)
    return LoadPlanner(costs, clock, follows=follows, always=always), clock


def load(
    planner: LoadPlanner[str],
    clock: Clock,
    num_bytes: int,
    seconds: float,
    tier: Tier = Tier.NVME,
) -> None:
    reading = planner.begin_read(num_bytes, tier)
    clock.now += seconds
    planner.end_read(reading, is_complete=True)


def arrive(
    planner: LoadPlanner[str], request: str, num_held: int, num_new: int, **more: Any
) -> int:
    asked = {"num_held": num_held, "num_new": num_new, "num_before": 0, "num_ahead": 0}
    return planner.arrives(request, **asked, **more)


def waits(planner: LoadPlanner[str], *, is_read: bool = True) -> bool:
    """Whether a request goes on waiting for the whole of its load."""
    return planner.should_wait("r", num_missing=6400, num_before=0, num_ahead=0, is_read=is_read)


@given(
    ratio=st.floats(0.1, 6.0),
    num_new=st.sampled_from([6500, 32_000]),
    num_running=st.sampled_from([0, 1, 64]),
    tier=st.sampled_from([Tier.NVME, Tier.PEER]),
)
def test_load_that_begins_is_waited_for(
    ratio: float, num_new: int, num_running: int, tier: Tier
) -> None:
    """Not begun and given up, nor cut by its own deadline, nor dearer than it may be."""
    costs = CostModel(
        page_tokens=64,
        bytes_per_token=BYTES_PER_TOKEN,
        prefill=PrefillCost((1e-3, TOKEN_S, 0.0), token_bytes=BYTES_PER_TOKEN),
        transfers=[TransferCost((1e-6, ratio * TOKEN_S / BYTES_PER_TOKEN)) for _ in range(2)],
    )
    planner: LoadPlanner[str] = LoadPlanner(costs)
    planner.note_run(num_running)
    num_loaded = arrive(planner, "r", 6400, num_new, spans=[Span(tier, 100)])
    if ratio > 1 + MAX_OWN_LOSS or (ratio > 1 and not num_running):
        assert num_loaded == 0
    if not num_loaded:
        return
    planner.begins("r")
    load_s, prefill_s = ratio * TOKEN_S * num_loaded, TOKEN_S * (num_new - num_loaded)
    assert load_s + prefill_s <= (1 + MAX_OWN_LOSS) * TOKEN_S * num_new + 1e-3
    assert planner.should_wait(
        "r", num_missing=num_loaded, num_before=0, num_ahead=0, is_read=False
    )
    assert planner.gains_by_its_turn("r", num_ahead=0)
    if tier is not Tier.NVME:
        assert planner.far_deadline_s >= load_s


def test_agreed_load_has_its_time_but_no_more() -> None:
    """Of several ranks, this one would compute sooner."""
    planner, clock = make_planner()
    for _ in range(6):
        load(planner, clock, 1 << 20, 10.0, Tier.OBJECT)
    assert arrive(planner, "r", 6400, 6500, spans=[Span(Tier.OBJECT, 100)]) == 0
    planner.agreed("r", 640, num_ahead=0)
    planner.begins("r")
    load_s = planner.costs.load_seconds((0, 0, 640))
    assert planner.far_deadline_s >= load_s > 1.0
    priced = planner.loads.get("r").load
    assert priced is not None and priced.plan.load_s == pytest.approx(load_s)
    assert planner.tokens_ahead(6400) == (5760, 0, 640)
    assert planner.num_waiting_tokens == 6500 - 640
    planner.agreed("r", 0, num_ahead=0)  # and not after all
    assert planner.loads.get("r").load is None
    assert planner.num_waiting_tokens == 6500 and planner.tokens_ahead(640) == (640, 0, 0)


def test_following_rank_drops_no_load_by_its_speed() -> None:
    planner, clock = make_planner(follows=True)
    assert arrive(planner, "r", 6400, 6500) == 6400
    load(planner, clock, 64 << 20, 1000.0)  # of a bucket that was slow once
    clock.now += 1000
    assert waits(planner)
    assert not planner.tokens[LoadDecision.GAVE_UP]


@pytest.mark.parametrize("progress", ["nothing", "cold", "admitted", "computed"])
def test_a_busy_server_computes_nothing_that_waits(progress: str) -> None:
    """One that computes has those behind it wait for longer, which compute then."""
    planner, clock = make_planner()
    for request in ("r", "other"):
        planner.loads.arrives(request)
        arrive(planner, request, 6400, 6500)
    planner.loads.held_up(planner.loads.get("r"))
    clock.now += 10 * 6400 * TOKEN_S
    if progress == "cold":  # of requests that leave no room
        planner.leaves("other")
        planner.note_batch([(6400, 0)], 6400 * TOKEN_S)
    elif progress == "admitted":
        planner.loads.get("other").num_loaded = 6400
        planner.leaves("other")
    elif progress == "computed":
        planner.note_batch([(6400, 0)], 6400 * TOKEN_S, num_copied=6400)
    goes_on = progress in ("admitted", "computed")
    assert planner.gains_by_its_turn("r", num_ahead=0) == goes_on
    assert waits(planner, is_read=False) == goes_on
    clock.now += 2 * 6400 * TOKEN_S
    assert not planner.gains_by_its_turn("r", num_ahead=0), "and nobody waits without an end"
    assert not waits(planner, is_read=False)


def test_load_at_any_price_awaits_room_briefly() -> None:
    """One before it may hang, and leave none."""
    planner, clock = make_planner(always=True)
    planner.loads.arrives("r")
    assert arrive(planner, "r", 6400, 6500) == 6400
    planner.loads.held_up(planner.loads.get("r"))
    clock.now += 0.9 * ALWAYS_DEADLINE_S
    assert planner.gains_by_its_turn("r", num_ahead=0)
    clock.now += 0.2 * ALWAYS_DEADLINE_S
    assert not planner.gains_by_its_turn("r", num_ahead=0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(1, 99))))
def test_waiting_tokens_are_those_of_who_waits(events: list[tuple[int, int, int]]) -> None:
    """A request arrives again as it is put off, and leaves once; an unknown one changes nothing."""
    planner, _ = make_planner()
    waiting: dict[str, int] = {}
    for who, num_held, num_rest in events:
        name = f"r{who}"
        if num_rest % 3 == 0:
            planner.leaves(name)
            waiting.pop(name, None)
        else:
            num_new = num_held * 64 + num_rest
            waiting[name] = num_new - arrive(planner, name, num_held * 64, num_new)
        assert planner.num_waiting_tokens == sum(waiting.values())
        assert planner.num_waiting == len(waiting)
    planner.clear()
    assert (planner.num_waiting_tokens, planner.num_waiting, planner.queue_wait_s) == (0, 0, 0.0)
    assert not planner.loads


def test_only_the_slow_bucket_is_declined() -> None:
    planner, clock = make_planner()
    spans = [Span(Tier.NVME, 47), Span(Tier.OBJECT, 53)]  # whose border is at no even part
    assert arrive(planner, "r", 6400, 6500, spans=spans) == 6400
    for _ in range(6):
        load(planner, clock, 1 << 20, 30.0, Tier.OBJECT)
    assert arrive(planner, "s", 6400, 6500, spans=spans) == 47 * 64
    assert planner.timings[Tier.OBJECT].durations.take().count == 6
    assert planner.timings[Tier.NVME].durations.take().count == 0
    assert not planner.wants_probe(Tier.OBJECT)  # just measured
    clock.now += 1000
    assert planner.wants_probe(Tier.OBJECT)


def test_reads_cut_short_teach_slowness() -> None:
    planner, clock = make_planner()
    num_tried = 0
    for number in range(20):
        if arrive(planner, f"r{number}", 3200, 3300, spans=[Span(Tier.OBJECT, 50)]):
            num_tried += 1
            planner.begins(f"r{number}")
            reading = planner.begin_read(3200 * BYTES_PER_TOKEN, Tier.OBJECT)
            clock.now += planner.far_deadline_s
            planner.end_read(reading, is_complete=False)
        planner.leaves(f"r{number}")
    assert 1 <= num_tried <= 3, "a bucket that hangs was believed again and again"

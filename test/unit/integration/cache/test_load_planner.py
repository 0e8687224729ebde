"""Plans follow what was measured, waits end, and the books of waiting requests balance."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.clock import Clock
from sglang_tiered.integration.cache.load_planner import (
    STALE_AFTER_S,
    YIELD_SHARE,
    LoadPlanner,
)
from sglang_tiered.policy.cost_model import (
    MAX_OWN_LOSS,
    CostModel,
    LoadDecision,
    PrefillCost,
    TransferCost,
)
from sglang_tiered.storage.base import Tier

TOKEN_S = 1e-4
BYTES_PER_TOKEN = 1000
LOAD_TOKEN_S = 1e-5


def make_planner(
    *, load_token_s: float = LOAD_TOKEN_S, follows: bool = False
) -> tuple[LoadPlanner[str], Clock]:
    costs = CostModel(
        page_tokens=64,
        bytes_per_token=BYTES_PER_TOKEN,
        prefill=PrefillCost((1e-3, TOKEN_S, 0.0)),
        transfers=[TransferCost((1e-6, load_token_s / BYTES_PER_TOKEN))],
    )
    clock = Clock(100.0)
    return LoadPlanner(costs, clock, follows=follows), clock


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


def test_only_what_loads_faster_is_loaded() -> None:
    fast, _ = make_planner()
    assert arrive(fast, "r", 6400, 6500) == 6400
    fast.begins("r")
    assert fast.tokens[LoadDecision.LOAD] == 6400
    slow, _ = make_planner(load_token_s=2 * TOKEN_S)
    assert arrive(slow, "r", 6400, 6500) == 0
    assert slow.tokens[LoadDecision.DECLINED] == 0  # it may be considered again while it waits
    slow.leaves("r")
    assert slow.tokens == {
        LoadDecision.ABSENT: 100,
        LoadDecision.LOAD: 0,
        LoadDecision.DECLINED: 6400,
        LoadDecision.GAVE_UP: 0,
    }


def test_prefill_that_holds_up_others_is_dearer() -> None:
    planner, _ = make_planner(load_token_s=1.1 * TOKEN_S)
    assert arrive(planner, "alone", 6400, 6500) == 0
    planner.leaves("alone")
    planner.note_run(8)
    assert arrive(planner, "among others", 6400, 6500) == 6400
    planner.leaves("among others")
    for _ in range(2):  # nothing ran
        planner.step()
    assert arrive(planner, "alone again", 6400, 6500) == 0


@given(
    ratio=st.floats(0.1, 6.0),
    num_new=st.sampled_from([6500, 32_000]),
    num_running=st.sampled_from([0, 1, 64]),
    tier=st.sampled_from([Tier.NVME, Tier.PEER]),
)
def test_load_that_begins_is_waited_for(
    ratio: float, num_new: int, num_running: int, tier: Tier
) -> None:
    """Whatever a choice for others may cost, it is not begun and given up, nor cut by its own
    deadline, and costs this request no more than it may."""
    costs = CostModel(
        page_tokens=64,
        bytes_per_token=BYTES_PER_TOKEN,
        prefill=PrefillCost((1e-3, TOKEN_S, 0.0), token_bytes=BYTES_PER_TOKEN),
        transfers=[TransferCost((1e-6, ratio * TOKEN_S / BYTES_PER_TOKEN)) for _ in range(2)],
    )
    planner: LoadPlanner[str] = LoadPlanner(costs)
    planner.note_run(num_running)
    num_loaded = arrive(planner, "r", 6400, num_new, spans=[(tier, 6400)])
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


def test_low_rank_leaves_remote_reads_their_time() -> None:
    """With priorities, nobody is ahead of the first rank."""
    planner, _ = make_planner()
    for number in range(50):
        arrive(planner, str(number), 0, 6500, rank=1)
    arrive(planner, "r", 6400, 6500, spans=[(Tier.OBJECT, 6400)], rank=1)
    planner.begins("r")
    assert planner.far_deadline_s > 30.0


def test_agreed_load_has_its_time_but_no_more() -> None:
    """Of several ranks, this one would compute sooner."""
    planner, clock = make_planner()
    for _ in range(6):
        load(planner, clock, 1 << 20, 10.0, Tier.OBJECT)
    assert arrive(planner, "r", 6400, 6500, spans=[(Tier.OBJECT, 6400)]) == 0
    planner.agreed("r", 640, num_ahead=0)
    planner.begins("r")
    load_s = planner.costs.load_seconds((0, 0, 640))
    assert planner.far_deadline_s >= load_s > 1.0
    assert planner.left_s("r") == pytest.approx(load_s)
    assert planner.tokens_ahead(6400) == (5760, 0, 640)
    assert planner.num_waiting_tokens == 6500 - 640
    planner.agreed("r", 0, num_ahead=0)  # and not after all
    assert planner.left_s("r") == math.inf
    assert planner.num_waiting_tokens == 6500 and planner.tokens_ahead(640) == (640, 0, 0)


def test_request_that_is_looked_at_keeps_its_place() -> None:
    """Memory is full, or its device pages went: it was no newcomer before, nor is it one after."""
    planner, _ = make_planner()
    for name in "abc":
        arrive(planner, name, 0, 1000)
    arrive(planner, "a", 640, 1000)
    places = [planner.loads.get(name).place for name in "abc"]
    assert [place.number for place in places if place] == [0, 1, 2]
    assert planner.tokens[LoadDecision.ABSENT] == 3000


def test_every_held_token_is_counted_once() -> None:
    planner, _ = make_planner()
    assert arrive(planner, "loads", 6400, 6500) == 6400
    planner.begins("loads")
    planner.leaves("loads")
    assert arrive(planner, "withdrawn", 6400, 6500) == 6400  # its load never begins
    planner.leaves("withdrawn")
    arrive(planner, "flushed", 640, 6500)
    planner.clear()
    assert planner.tokens[LoadDecision.LOAD] == 6400
    assert planner.tokens[LoadDecision.DECLINED] == 6400 + 640
    assert planner.tokens[LoadDecision.ABSENT] == 100 + 100 + 5860


def test_slow_loads_are_declined_until_a_probe() -> None:
    planner, clock = make_planner()
    for _ in range(6):
        load(planner, clock, 1 << 20, 30.0)
    assert arrive(planner, "r", 6400, 6500) == 0
    assert not planner.wants_probe()  # just measured
    clock.now += STALE_AFTER_S[Tier.NVME]
    assert planner.wants_probe()
    assert not planner.wants_probe()  # one at a time
    for _ in range(8):
        load(planner, clock, 1 << 20, 1e-2)
    assert arrive(planner, "s", 6400, 6500) == 6400
    assert planner.timings[Tier.NVME].durations.take().count == 14
    assert planner.timings[Tier.NVME].busy_s == pytest.approx(6 * 30.0 + 8 * 1e-2)


def test_hanging_disk_is_declined_before_it_answers() -> None:
    planner, clock = make_planner()
    assert arrive(planner, "first", 6400, 6500) == 6400
    reading = planner.begin_read(6400 * BYTES_PER_TOKEN)
    num_loaded = 0
    for number in range(12):
        clock.now += 1.0
        num_loaded += arrive(planner, f"r{number}", 6400, 6500) > 0
        planner.leaves(f"r{number}")
    assert num_loaded <= 4
    assert arrive(planner, "last", 6400, 6500) == 0
    planner.end_read(reading, is_complete=False)


def test_slow_load_hides_behind_a_queue() -> None:
    planner, _ = make_planner(load_token_s=2 * TOKEN_S)
    for number in range(20):
        arrive(planner, f"cold-{number}", 0, 6400)
    assert arrive(planner, "r", 6400, 6500) == 6400
    for number in range(20):
        planner.leaves(f"cold-{number}")
    assert arrive(planner, "r", 6400, 6500) == 0


def test_waiting_ends_when_reads_are_late() -> None:
    planner, clock = make_planner()
    arrive(planner, "r", 6400, 6500)
    assert waits(planner)
    clock.now += 0.9 * 6400 * TOKEN_S
    assert waits(planner)
    clock.now += 0.3 * 6400 * TOKEN_S  # later than expected by more than computing takes
    assert not waits(planner)
    assert planner.tokens[LoadDecision.GAVE_UP] == 6400


def test_following_rank_drops_no_load_by_its_speed() -> None:
    planner, clock = make_planner(follows=True)
    assert arrive(planner, "r", 6400, 6500) == 6400
    load(planner, clock, 64 << 20, 1000.0)  # of a bucket that was slow once
    clock.now += 1000
    assert waits(planner)
    assert not planner.tokens[LoadDecision.GAVE_UP]


def test_wait_for_the_last_weighs_the_whole_load() -> None:
    planner, _ = make_planner(load_token_s=2 * TOKEN_S)
    asked = {"num_missing": 640, "num_before": 5760, "num_ahead": 0, "is_read": True}
    assert not planner.should_wait("r", **asked)
    assert planner.should_wait("r", **asked, num_lost=5760)
    assert not planner.should_wait("r", **{**asked, "num_missing": 5000}, num_lost=640)
    assert planner.tokens[LoadDecision.GAVE_UP] == 640 + 5000 + 640


def test_load_waiting_for_its_turn_is_not_late() -> None:
    planner, clock = make_planner()
    arrive(planner, "r", 6400, 6500)
    assert waits(planner, is_read=False)
    clock.now += 1000  # a long forward pass of others
    assert waits(planner, is_read=False)
    assert waits(planner)


def test_load_waits_for_room_while_it_gains() -> None:
    planner, _ = make_planner()
    assert planner.patience_s("a") == 0.0
    arrive(planner, "a", 6_400, 6_401)
    gain_s = 6_400 * (TOKEN_S - LOAD_TOKEN_S)
    assert planner.patience_s("a") == pytest.approx(gain_s, rel=0.05)
    planner.leaves("a")
    assert planner.patience_s("a") == 0.0
    always = LoadPlanner[str](planner.costs, always=True)
    arrive(always, "a", 64, 65)
    assert always.patience_s("a") == 10.0


def test_put_off_load_behind_too_many_is_dropped() -> None:
    planner, _ = make_planner()
    arrive(planner, "r", 6400, 6500)
    assert planner.gains_by_its_turn("r", num_ahead=6400)
    assert not planner.gains_by_its_turn("r", num_ahead=100 * 6400)
    planner.leaves("r")
    assert not planner.gains_by_its_turn("r", num_ahead=0)


@pytest.mark.parametrize("progress", ["nothing", "cold", "admitted", "computed"])
def test_a_busy_server_computes_nothing_that_waits(progress: str) -> None:
    """Each wait for room is longer than computing would take alone, while others have the room. One
    that computes has those behind it wait for longer, which compute then: all hits are lost."""
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


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 5000)), max_size=40))
def test_queue_is_as_long_as_what_waits(events: list[tuple[int, bool, int]]) -> None:
    planner, _ = make_planner(load_token_s=1.0)  # so that nothing is loaded
    waiting: dict[str, int] = {}
    for number, comes, length in events:
        request = f"r{number}"
        if comes:
            arrive(planner, request, 0, length)
            waiting[request] = length
        else:
            planner.drop(request)
            waiting.pop(request, None)
        assert len(planner.loads) == planner.num_waiting == len(waiting)
    assert planner.queue_wait_s == pytest.approx(TOKEN_S * sum(waiting.values()))
    for request in itertools.chain(waiting):
        planner.leaves(request)
    assert planner.queue_wait_s == 0.0


def test_when_told_to_load_always_no_price_counts() -> None:
    clock = Clock(100.0)
    costs = CostModel(
        page_tokens=64, bytes_per_token=BYTES_PER_TOKEN, transfers=[TransferCost((1e9, 1.0))]
    )
    planner: LoadPlanner[str] = LoadPlanner(costs, clock, always=True)
    assert arrive(planner, "r", 6400, 6500) == 6400
    assert planner.gains_by_its_turn("r", num_ahead=10**9)
    clock.now += 1000
    assert waits(planner)


def test_long_prefill_lets_a_close_load_in() -> None:
    planner, clock = make_planner()
    arrive(planner, "returning", 6400, 6500)
    planner.begins("returning")
    arrive(planner, "new", 0, 64_000)
    left_s = planner.left_s("returning")
    assert 0 < left_s <= YIELD_SHARE * 64_000 * TOKEN_S
    assert planner.yields("new", left_s)
    assert not planner.yields("returning", left_s)  # its own prefill is short


def test_no_request_yields_beyond_its_share() -> None:
    planner, clock = make_planner()
    arrive(planner, "new", 0, 64_000)
    assert planner.yields("new", 0.0)
    clock.now += YIELD_SHARE * 64_000 * TOKEN_S + 1e-6
    assert not planner.yields("new", 0.0)
    # Loads of others that follow change nothing.
    assert not planner.yields("new", 0.01)


def test_no_request_yields_to_a_hanging_load() -> None:
    planner, clock = make_planner()
    arrive(planner, "returning", 6400, 6500)
    arrive(planner, "new", 0, 64_000)
    assert not planner.yields("new", planner.left_s("returning"))  # put off
    planner.begins("returning")
    clock.now += 3 * 6400 * LOAD_TOKEN_S
    assert planner.left_s("returning") == math.inf
    assert not planner.yields("new", planner.left_s("returning"))
    assert planner.left_s("unknown") == math.inf


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


def test_load_ahead_of_requests_is_short() -> None:
    """A request that comes meanwhile waits for it."""
    planner = LoadPlanner[str](
        CostModel(
            page_tokens=64,
            bytes_per_token=BYTES_PER_TOKEN,
            prefill=PrefillCost((1e-3, 2e-3, 0.0)),
            transfers=[TransferCost((1e-6, 1e-3 / BYTES_PER_TOKEN))],
        )
    )
    assert planner.plan_ahead(2048, num_before=0) == 192
    assert planner.plan_ahead(2048, num_before=0, least=256) == 512, "twice the shortest"
    assert planner.plan_ahead(2048, num_before=0, ends=[960, 2048]) == 960

"""Plans over two tiers: by their own costs never worse than computing or than the first tier
alone, and a tier that has become slow does not take the other one's loads with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.integration.load_planner import MIN_OBJECT_DEADLINE_S, LoadPlanner
from sglang_tiered.policy.cost_model import MIN_GAIN, CostModel, PrefillCost, TransferCost
from sglang_tiered.storage.layered.tiers import Tier

PAGE, BYTES = 64, 1000
prices = st.tuples(st.floats(1e-6, 1.0), st.floats(1e-12, 1e-6))
lengths = st.integers(0, 40)


def make_costs(first: tuple[float, float], second: tuple[float, float]) -> CostModel:
    return CostModel(
        page_tokens=PAGE,
        bytes_per_token=BYTES,
        prefill=PrefillCost((2e-3, 1e-4, 1e-9)),
        transfer=TransferCost(first),
        below=TransferCost(second),
    )


@given(prices, prices, lengths, lengths, st.integers(1, 2000), st.floats(0, 2))
def test_a_plan_is_never_worse_than_what_it_could_have_left_out(
    first: tuple[float, float],
    second: tuple[float, float],
    num_above: int,
    num_below: int,
    num_rest: int,
    queue_wait_s: float,
) -> None:
    costs = make_costs(first, second)
    above, below = num_above * PAGE, num_below * PAGE
    num_new = above + below + num_rest
    asked = {"num_new": num_new, "num_before": 0, "queue_wait_s": queue_wait_s}
    plan = costs.plan(num_held=above + below, spans=[(False, above), (True, below)], **asked)
    alone = costs.plan(num_held=above, **asked)

    def total_s(num_tokens: int, num_below: int) -> float:
        rest = costs.prefill.seconds(num_new - num_tokens, num_tokens)
        if not num_tokens:
            return rest
        saved = costs.prefill.seconds(num_new, 0) - rest
        load_s = costs.load_seconds(num_tokens, num_below=num_below)
        return max(0.0, load_s - queue_wait_s) + rest + MIN_GAIN * saved

    assert plan.num_tokens % PAGE == 0
    assert plan.num_below == max(0, plan.num_tokens - above)
    best = total_s(plan.num_tokens, plan.num_below)
    assert best <= total_s(0, 0) + 1e-12
    if alone.num_tokens in (0, above):  # else its cuts lie elsewhere
        assert best <= total_s(alone.num_tokens, 0) + 1e-12


def test_a_plan_ends_where_the_fast_tier_ends_if_the_slow_one_does_not_pay() -> None:
    costs = make_costs((1e-4, 1e-9), (30.0, 1e-9))
    above, below = 37 * PAGE, 11 * PAGE
    spans = [(False, above), (True, below)]
    plan = costs.plan(num_held=above + below, num_new=4000, num_before=0, spans=spans)
    assert (plan.num_tokens, plan.num_below) == (above, 0)
    quick = make_costs((1e-4, 1e-9), (1e-3, 1e-9))
    plan = quick.plan(num_held=above + below, num_new=4000, num_before=0, spans=spans)
    assert (plan.num_tokens, plan.num_below) == (above + below, below)


def test_both_parts_of_a_load_are_read_at_the_same_time() -> None:
    costs = make_costs((0.0, 1e-6), (0.0, 2e-6))
    assert costs.load_seconds(300, num_below=100) == pytest.approx(200 * BYTES * 1e-6)
    assert costs.load_seconds(300, num_below=200) == pytest.approx(200 * BYTES * 2e-6)
    assert costs.load_seconds(100, num_below=100) == pytest.approx(100 * BYTES * 2e-6)
    behind = costs.load_seconds(100, num_ahead=150, num_ahead_below=50)
    assert behind == pytest.approx((100 + 100 + 2 * 50) * BYTES * 1e-6), "loads follow each other"


class Now:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def arrive(planner: LoadPlanner[str], request: str, above: int, below: int) -> int:
    return planner.arrives(
        request,
        num_held=above + below,
        num_new=above + below + 100,
        num_before=0,
        num_ahead=0,
        spans=[(Tier.NVME, above), (Tier.OBJECT, below)],
    )


def test_a_bucket_that_turns_slow_is_declined_and_the_disk_is_not() -> None:
    now = Now()
    planner: LoadPlanner[str] = LoadPlanner(make_costs((1e-4, 1e-9), (1e-2, 1e-9)), now)
    assert arrive(planner, "r", 3200, 3200) == 6400
    for _ in range(6):
        reading = planner.begin_read(1 << 20, Tier.OBJECT)
        now.seconds += 30.0
        planner.end_read(reading, is_complete=True)
    assert arrive(planner, "s", 3200, 3200) == 3200
    assert planner.meters[Tier.OBJECT].num_loads == 6
    assert planner.meters[Tier.NVME].num_loads == 0
    assert not planner.wants_probe(Tier.OBJECT)  # just measured
    now.seconds += 1000
    assert planner.wants_probe(Tier.OBJECT)


def test_reads_cut_short_by_their_deadline_teach_that_the_bucket_is_slow() -> None:
    now = Now()
    planner: LoadPlanner[str] = LoadPlanner(make_costs((1e-4, 1e-9), (1e-2, 1e-9)), now)
    num_tried = 0
    for number in range(20):
        if arrive(planner, f"r{number}", 0, 3200):
            num_tried += 1
            planner.begins(f"r{number}")
            reading = planner.begin_read(3200 * BYTES, Tier.OBJECT)
            now.seconds += planner.object_deadline_s
            planner.end_read(reading, is_complete=False)
        planner.leaves(f"r{number}")
    assert 1 <= num_tried <= 3, "a bucket that hangs was believed again and again"


def test_a_quick_failure_teaches_nothing_about_speed() -> None:
    now = Now()
    planner: LoadPlanner[str] = LoadPlanner(make_costs((1e-4, 1e-9), (1e-2, 1e-9)), now)
    for _ in range(10):
        reading = planner.begin_read(1 << 20, Tier.OBJECT)
        planner.end_read(reading, is_complete=False)
    assert arrive(planner, "r", 0, 3200) == 3200


def test_a_read_may_take_as_long_as_the_prefill_it_replaces() -> None:
    planner: LoadPlanner[str] = LoadPlanner(make_costs((1e-4, 1e-9), (1e-2, 1e-9)), Now())
    assert planner.object_deadline_s == MIN_OBJECT_DEADLINE_S
    arrive(planner, "r", 0, 6400)
    planner.begins("r")
    assert planner.object_deadline_s >= planner.costs.prefill.seconds(6400, 0)

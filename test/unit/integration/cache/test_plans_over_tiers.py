"""Plans over several tiers: by their own costs never worse than computing or than the first tiers
alone, and a tier that has become slow does not take the others' loads with it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.clock import Clock
from sglang_tiered.integration.cache.load_planner import MIN_FAR_DEADLINE_S, TIERS, LoadPlanner
from sglang_tiered.policy.cost_model import (
    MIN_GAIN,
    CostModel,
    PrefillCost,
    TransferCost,
    remote_first,
)
from sglang_tiered.storage.base import Tier

PAGE, BYTES = 64, 1000
prices = st.tuples(st.floats(1e-6, 1.0), st.floats(1e-12, 1e-6))
lengths = st.integers(0, 40)


DISK, PEERS, BUCKET = range(3)


def make_costs(
    first: tuple[float, float],
    second: tuple[float, float],
    peers: tuple[float, float] = (5e-3, 1e-9),
) -> CostModel:
    return CostModel(
        page_tokens=PAGE,
        bytes_per_token=BYTES,
        prefill=PrefillCost((2e-3, 1e-4, 1e-9)),
        transfers=[TransferCost(first), TransferCost(peers), TransferCost(second)],
    )


@given(
    *(prices, prices, prices),
    st.permutations([DISK, PEERS, BUCKET]),
    *(lengths, lengths, lengths),
    st.integers(1, 2000),
    st.floats(0, 2),
)
def test_a_plan_never_loads_what_costs_more(
    disk: tuple[float, float],
    peers: tuple[float, float],
    bucket: tuple[float, float],
    tiers: list[int],
    num_first: int,
    num_second: int,
    num_third: int,
    num_rest: int,
    queue_wait_s: float,
) -> None:
    costs = make_costs(disk, bucket, peers)
    held = [number * PAGE for number in (num_first, num_second, num_third)]
    spans = [span for span in zip(tiers, held, strict=True) if span[1]]
    num_new = sum(held) + num_rest
    asked = {"num_new": num_new, "num_before": 0, "queue_wait_s": queue_wait_s}
    plan = costs.plan(num_held=sum(held), spans=spans, **asked)

    def parts(num_tokens: int) -> list[int]:
        taken = [0, 0, 0]
        for tier, length in spans:
            taken[tier] = min(length, num_tokens)
            num_tokens -= taken[tier]
        return taken

    def total_s(num_tokens: int) -> float:
        everything = costs.prefill.seconds(num_new, 0)
        if not num_tokens:
            return everything
        saved = costs.prefill.saved_seconds(num_tokens, num_new, 0)
        load_s = costs.load_seconds(parts(num_tokens))
        return max(0.0, load_s - queue_wait_s) + everything - (1 - MIN_GAIN) * saved

    assert plan.num_tokens % PAGE == 0
    assert list(plan.parts or (0, 0, 0)) == parts(plan.num_tokens)
    assert plan.num_remote == plan.num_tokens - parts(plan.num_tokens)[DISK]
    best = total_s(plan.num_tokens)
    assert best <= total_s(0) + 1e-12
    for end in itertools.accumulate(length for _, length in spans):  # each is a length it compared
        assert best <= total_s(end) + 1e-12


@given(prices, prices, lengths, lengths, st.integers(1, 2000), st.floats(0, 2))
def test_an_absent_tier_changes_no_plan(
    first: tuple[float, float],
    second: tuple[float, float],
    num_above: int,
    num_below: int,
    num_rest: int,
    queue_wait_s: float,
) -> None:
    """Whatever peers would cost, where none hold anything."""
    above, below = num_above * PAGE, num_below * PAGE
    asked = {
        "num_held": above + below,
        "num_new": above + below + num_rest,
        "num_before": 0,
        "queue_wait_s": queue_wait_s,
        "spans": [(DISK, above), (BUCKET, below)],
    }
    plans = [make_costs(first, second, peers).plan(**asked) for peers in ((1e-6, 1e-12), (9, 1.0))]
    assert plans[0] == plans[1]


def test_a_plan_stops_before_unprofitable_slow_tiers() -> None:
    costs = make_costs((1e-4, 1e-9), (30.0, 1e-9))
    above, below = 37 * PAGE, 11 * PAGE
    spans = [(DISK, above), (BUCKET, below)]
    plan = costs.plan(num_held=above + below, num_new=4000, num_before=0, spans=spans)
    assert (plan.num_tokens, plan.num_remote) == (above, 0)
    spans = [(DISK, above), (PEERS, below)]
    plan = costs.plan(num_held=above + below, num_new=4000, num_before=0, spans=spans)
    assert (plan.num_tokens, plan.num_remote) == (above + below, below)


def test_parts_of_a_load_are_read_together() -> None:
    costs = make_costs((0.0, 1e-6), (0.0, 2e-6), (0.0, 4e-6))
    assert costs.load_seconds((200, 0, 100)) == pytest.approx(200 * BYTES * 1e-6)
    assert costs.load_seconds((100, 0, 200)) == pytest.approx(200 * BYTES * 2e-6)
    assert costs.load_seconds((100, 150, 200)) == pytest.approx(150 * BYTES * 4e-6)
    assert costs.load_seconds((0, 0, 100)) == pytest.approx(100 * BYTES * 2e-6)
    behind = costs.load_seconds((100, 0, 0), (100, 25, 50))
    assert behind == pytest.approx((100 + 100 + 4 * 25 + 2 * 50) * BYTES * 1e-6), (
        "loads follow each other"
    )


@given(st.integers(0, 500), st.lists(st.integers(0, 200), min_size=0, max_size=3))
def test_what_is_missing_is_what_comes_from_farthest(num_tokens: int, parts: list[int]) -> None:
    taken = remote_first(num_tokens, parts)
    assert sum(taken) == num_tokens
    assert all(took <= part for took, part in zip(taken[1:], parts[1:], strict=True))
    for tier in range(1, len(parts)):
        if taken[tier] < parts[tier]:
            assert not any(taken[:tier])


Made = tuple[LoadPlanner[str], Clock]


@pytest.fixture
def made() -> Made:
    """A planner above a quick disk and an ordinary bucket, and its clock."""
    clock = Clock(100.0)
    return LoadPlanner(make_costs((1e-4, 1e-9), (1e-2, 1e-9)), clock), clock


def arrive(planner: LoadPlanner[str], request: str, above: int, below: int) -> int:
    return planner.arrives(
        request,
        num_held=above + below,
        num_new=above + below + 100,
        num_before=0,
        num_ahead=0,
        spans=[(Tier.NVME, above), (Tier.OBJECT, below)],
    )


def test_only_the_slow_bucket_is_declined(made: Made) -> None:
    planner, clock = made
    assert arrive(planner, "r", 3200, 3200) == 6400
    for _ in range(6):
        reading = planner.begin_read(1 << 20, Tier.OBJECT)
        clock.now += 30.0
        planner.end_read(reading, is_complete=True)
    assert arrive(planner, "s", 3200, 3200) == 3200
    assert planner.timings[Tier.OBJECT].durations.take().count == 6
    assert planner.timings[Tier.NVME].durations.take().count == 0
    assert not planner.wants_probe(Tier.OBJECT)  # just measured
    clock.now += 1000
    assert planner.wants_probe(Tier.OBJECT)


def test_reads_cut_short_teach_slowness(made: Made) -> None:
    planner, clock = made
    num_tried = 0
    for number in range(20):
        if arrive(planner, f"r{number}", 0, 3200):
            num_tried += 1
            planner.begins(f"r{number}")
            reading = planner.begin_read(3200 * BYTES, Tier.OBJECT)
            clock.now += planner.far_deadline_s
            planner.end_read(reading, is_complete=False)
        planner.leaves(f"r{number}")
    assert 1 <= num_tried <= 3, "a bucket that hangs was believed again and again"


def test_a_quick_failure_teaches_nothing_about_speed(made: Made) -> None:
    planner, clock = made
    for _ in range(10):
        reading = planner.begin_read(1 << 20, Tier.OBJECT)
        planner.end_read(reading, is_complete=False)
    assert arrive(planner, "r", 0, 3200) == 3200


def test_a_read_may_take_its_prefills_time(made: Made) -> None:
    planner, _ = made
    assert planner.far_deadline_s == MIN_FAR_DEADLINE_S
    arrive(planner, "r", 0, 6400)
    planner.begins("r")
    assert planner.far_deadline_s >= planner.costs.prefill.saved_seconds(6400, 6400, 0) > 0.5


def test_far_tiers_are_asked_fastest_first() -> None:
    clock = Clock(100.0)
    planner: LoadPlanner[str] = LoadPlanner(make_costs((1e-4, 1e-9), (5e-2, 5e-9)), clock)
    assert planner.far_order() == [Tier.PEER, Tier.OBJECT], "unmeasured, peers are nearer"
    for _ in range(4):
        reading = planner.begin_read(16 << 20, Tier.PEER)
        clock.now += 5.0
        planner.end_read(reading, is_complete=True)
    assert not planner.wants_probe(Tier.PEER)  # which learns
    assert planner.far_order() == [Tier.OBJECT, Tier.PEER]


def test_tiers_go_by_the_number_of_their_cost() -> None:
    planner: LoadPlanner[str] = LoadPlanner(make_costs((1e-4, 1e-9), (30.0, 1e-9)))
    assert TIERS == (Tier.NVME, Tier.PEER, Tier.OBJECT)
    spans = [(Tier.NVME, 640), (Tier.PEER, 640), (Tier.OBJECT, 640)]
    asked = {"num_held": 1920, "num_new": 2000, "num_before": 0, "num_ahead": 0}
    assert planner.arrives("r", spans=spans, **asked) == 1280


class NeverWalked(dict[str, Any]):
    """Loads that can be asked for by name only."""

    def __iter__(self) -> Any:
        raise AssertionError("all loads were walked through")

    values = items = keys = __iter__  # type: ignore[assignment]


def test_waiting_costs_the_same_beside_many_loads(made: Made) -> None:
    """With hundreds of them each step paid for their square."""
    planner, _ = made
    for number in range(3):
        arrive(planner, f"r{number}", 3200, 3200)
        planner.begins(f"r{number}")
    planner.loads._records = NeverWalked(planner.loads._records)
    planner.should_wait("r0", num_missing=3200, num_before=0, num_ahead=64, is_read=True)
    planner.gains_by_its_turn("r1", num_ahead=64)
    arrive(planner, "another", 3200, 3200)
    planner.leaves("r2")


def test_load_that_has_landed_is_ahead_of_nobody(made: Made) -> None:
    """Loads from NVMe would be priced as if the bucket's were before them, and declined."""
    planner, _ = made
    for request, num_nvme, num_object in (("landed", 0, 6400), ("loading", 6400, 0)):
        arrive(planner, request, num_nvme, num_object)
        planner.begins(request)
    assert planner.tokens_ahead(6400) == (0, 0, 6400)
    planner.load_ended("landed")
    assert planner.tokens_ahead(6400) == (6400, 0, 0)
    planner.leaves("landed")
    assert planner.tokens_ahead(6400) == (6400, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 99)), max_size=40))
def test_loads_in_flight_are_counted_exactly(
    events: list[tuple[int, int, int]],
) -> None:
    planner: LoadPlanner[str] = LoadPlanner(make_costs((1e-4, 1e-9), (1e-2, 1e-9)))
    for number, event, num_pages in events:
        request = f"r{number}"
        if event == 0:
            arrive(planner, request, 64 * num_pages, 64 * (99 - num_pages))
        elif event < 3:
            planner.begins(request)
        elif event == 3:
            planner.load_ended(request)
        else:
            planner.leaves(request)
        loads = {name: record.load for name, record in planner.loads._records.items()}
        begun = {name: load for name, load in loads.items() if load and load.queued_at is not None}
        for name in [None, *begun]:
            parts = [load.plan.parts for other, load in begun.items() if other != name]
            expected = [sum(each) for each in zip(*parts, strict=True)] or [0] * len(TIERS)
            counted = planner._loading_but(None if name is None else begun[name])
            assert counted == expected + [0] * (len(TIERS) - len(expected))
    planner.clear()
    assert planner._loading_but(None) == [0] * len(TIERS)

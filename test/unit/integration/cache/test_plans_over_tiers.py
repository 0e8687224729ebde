"""Plans over several tiers cost no more than computing or than the first tiers alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.clock import Clock
from sglang_tiered.integration.cache.load_planner import LoadPlanner
from sglang_tiered.policy.cost_model import (
    MIN_GAIN,
    CostModel,
    PrefillCost,
    TransferCost,
)
from sglang_tiered.storage.base import Span, Tier

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
    st.tuples(prices, prices, prices),
    st.permutations([DISK, PEERS, BUCKET]),
    st.tuples(lengths, lengths, lengths),
    st.integers(1, 2000),
    st.floats(0, 2),
)
def test_a_plan_never_loads_what_costs_more(
    all_prices: tuple[tuple[float, float], ...],
    tiers: list[int],
    pages: tuple[int, ...],
    num_rest: int,
    queue_wait_s: float,
) -> None:
    disk, peers, bucket = all_prices
    costs = make_costs(disk, bucket, peers)
    held = [number * PAGE for number in pages]
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
        spans=[Span(Tier.NVME, above // PAGE), Span(Tier.OBJECT, below // PAGE)],
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

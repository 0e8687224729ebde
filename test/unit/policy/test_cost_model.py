"""What the cost model learns, and that no plan it makes is dearer than computing everything."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.policy.cost_model import (
    MIN_GAIN,
    CostModel,
    OnlineCost,
    PrefillCost,
    TransferCost,
)

BATCH_S, TOKEN_S, PAIR_S = 4e-3, 4.5e-4, 1.5e-8  # two CPU cores
LOAD_S, BYTE_S = 3e-3, 1 / 0.8e9
BYTES_PER_TOKEN = 3072


def prefill_seconds(new: int, before: int) -> float:
    return BATCH_S + TOKEN_S * new + PAIR_S * new * (before + new / 2)


def load_seconds(num_bytes: int) -> float:
    return LOAD_S + BYTE_S * num_bytes


def learnt_prefill(seed: int = 0, num_batches: int = 80) -> PrefillCost:
    source, cost = random.Random(seed), PrefillCost()
    for _ in range(num_batches):
        new, before = source.choice([64, 500, 2000, 4000]), source.choice([0, 1000, 8000])
        cost.observe([(new, before)], prefill_seconds(new, before) * source.lognormvariate(0, 0.15))
    return cost


def learnt_transfer(seed: int = 0, slowdown: float = 1.0) -> TransferCost:
    source, cost = random.Random(seed), TransferCost()
    for _ in range(80):
        num_bytes = source.choice([1 << 18, 1 << 22, 1 << 25])
        seconds = slowdown * load_seconds(num_bytes) * source.lognormvariate(0, 0.15)
        cost.observe(num_bytes, seconds)
    return cost


def model(slowdown: float = 1.0) -> CostModel:
    return CostModel(
        page_tokens=64,
        bytes_per_token=BYTES_PER_TOKEN,
        prefill=learnt_prefill(),
        transfers=[learnt_transfer(slowdown=slowdown)],
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("new", "before"), [(256, 0), (4000, 0), (512, 8000), (16000, 0)])
def test_noisy_batches_predict_prefill_within_a_third(seed: int, new: int, before: int) -> None:
    expected = prefill_seconds(new, before) - BATCH_S
    assert learnt_prefill(seed).seconds(new, before) == pytest.approx(expected, rel=0.33)


@pytest.mark.parametrize("copy_s", [0.0, 2e-5])
def test_returns_alone_teach_prefill_and_copies(copy_s: float) -> None:
    """After a restart every request may return, with its prefix copied to the device."""
    source, cost = random.Random(1), PrefillCost()
    for _ in range(80):
        new, before = source.choice([96, 200, 700]), source.choice([1000, 2000, 8000])
        seconds = prefill_seconds(new, before) + copy_s * before
        cost.observe([(new, before)], seconds * source.lognormvariate(0, 0.1), before)
    expected = prefill_seconds(2000, 0) - BATCH_S
    assert cost.seconds(2000, 0) == pytest.approx(expected, rel=0.5)
    saved = prefill_seconds(2000, 0) - prefill_seconds(100, 1900) - copy_s * 1900
    assert cost.saved_seconds(1900, 2000, 0) == pytest.approx(saved, rel=0.5)


def test_load_is_declined_whose_copy_takes_longer() -> None:
    costs = model()
    assert costs.plan(num_held=6400, num_new=6500, num_before=0).num_tokens == 6400
    for _ in range(200):  # a device that is slow to reach
        costs.prefill.observe([(100, 6400)], prefill_seconds(100, 6400) + 6400 * 1e-3, 6400)
        costs.prefill.observe([(1000, 0)], prefill_seconds(1000, 0))
    assert costs.plan(num_held=6400, num_new=6500, num_before=0).num_tokens == 0
    assert not costs.should_wait(num_saved=6400, num_before=0, left_s=0.01)


@pytest.mark.parametrize("num_bytes", [1 << 18, 1 << 22, 1 << 26])
def test_noisy_loads_predict_a_load_within_a_third(num_bytes: int) -> None:
    expected = load_seconds(num_bytes)
    assert learnt_transfer().seconds(num_bytes) == pytest.approx(expected, rel=0.33)


def test_suddenly_slow_disk_is_declined_after_five_loads() -> None:
    costs = model()
    for num_loads, slowness, taken in ((1, 1, 3968), (1, 30, 3968), (5, 300, 0), (5, 1, 3968)):
        for _ in range(num_loads):
            costs.transfers[0].observe(12 << 20, slowness * load_seconds(12 << 20))
        assert costs.plan(num_held=4000, num_new=4032, num_before=0).num_tokens == taken


def test_load_ends_at_a_usable_state() -> None:
    costs = model()
    asked = {"num_held": 4000, "num_new": 4032, "num_before": 0}
    assert costs.plan(**asked, ends=[128, 2496, 3776]).num_tokens == 3776
    assert costs.plan(**asked, ends=[]).num_tokens == 0
    behind_a_queue = {**asked, "ends": [128, 2496, 3776], "ahead": (20_000,)}
    assert costs.plan(**behind_a_queue).num_tokens in (0, 128, 2496, 3776)


prices = st.tuples(st.floats(1e-6, 1.0), st.floats(1e-12, 1e-6))  # of a tier
lengths = st.integers(0, 40)
NUM_TIERS = 3


@given(
    tiers=st.tuples(prices, prices, prices),
    order=st.permutations(range(NUM_TIERS)),
    pages=st.tuples(lengths, lengths, lengths),
    num_rest=st.integers(1, 2000),
    num_before=st.integers(0, 40_000),
    ahead=st.tuples(st.integers(0, 200_000)),
    queue_wait_s=st.floats(0, 20),
)
def test_a_plan_never_loads_what_costs_more(
    tiers: tuple[tuple[float, float], ...],
    order: list[int],
    pages: tuple[int, ...],
    num_rest: int,
    num_before: int,
    ahead: tuple[int],
    queue_wait_s: float,
) -> None:
    """Than computing everything, or the first tiers alone."""
    costs = CostModel(
        page_tokens=64,
        bytes_per_token=BYTES_PER_TOKEN,
        prefill=PrefillCost((BATCH_S, TOKEN_S, PAIR_S)),
        transfers=[TransferCost(tier) for tier in tiers],
    )
    held = [number * 64 for number in pages]
    spans = [span for span in zip(order, held, strict=True) if span[1]]
    num_new = sum(held) + num_rest
    asked = {"num_new": num_new, "num_before": num_before}
    waits = {"ahead": ahead, "queue_wait_s": queue_wait_s}
    plan = costs.plan(num_held=sum(held), spans=spans, **asked, **waits)

    def parts(num_tokens: int) -> list[int]:
        taken = [0] * NUM_TIERS
        for tier, length in spans:
            taken[tier] = min(length, num_tokens)
            num_tokens -= taken[tier]
        return taken

    everything = costs.prefill.seconds(num_new, num_before)

    def saved_s(num_tokens: int) -> float:
        return costs.prefill.saved_seconds(num_tokens, num_new, num_before)

    def total_s(num_tokens: int) -> float:
        if not num_tokens:
            return everything
        load_s = costs.load_seconds(parts(num_tokens), ahead)
        waits_s = max(0.0, load_s - queue_wait_s)
        return waits_s + everything - (1 - MIN_GAIN) * saved_s(num_tokens)

    assert plan.num_tokens % 64 == 0
    assert list(plan.parts or [0] * NUM_TIERS) == parts(plan.num_tokens)
    assert plan.num_remote == plan.num_tokens - parts(plan.num_tokens)[0]
    assert plan.saved_s == pytest.approx(saved_s(plan.num_tokens))
    rest_s = costs.prefill.seconds(num_new - plan.num_tokens, num_before + plan.num_tokens)
    assert rest_s + plan.saved_s <= everything * (1 + 1e-9)  # a copy to the device costs something
    best = total_s(plan.num_tokens)
    for end in itertools.accumulate((length for _, length in spans), initial=0):
        assert best <= total_s(end) * (1 + 1e-9), "each is a length it compared"


def test_parts_of_a_load_are_read_together() -> None:
    costs = CostModel(
        page_tokens=64,
        bytes_per_token=1000,
        transfers=[TransferCost((0.0, price)) for price in (1e-6, 2e-6, 4e-6)],
    )
    for parts, of_slowest in (
        ((200, 0, 100), 400 * 1e-6),
        ((100, 0, 200), 800 * 1e-6),
        ((100, 150, 20), 300 * 1e-6),
    ):
        assert costs.load_seconds(parts) == pytest.approx(1000 * of_slowest)
    behind = costs.load_seconds((100, 0, 0), (100, 25, 50))
    own, others = 100, 100 + 2 * 25 + 4 * 50
    assert behind == pytest.approx((own + others) * 1e-3), "loads follow each other"


def test_slow_load_is_bounded_by_the_queue_wait() -> None:
    costs = CostModel(
        page_tokens=64,
        bytes_per_token=BYTES_PER_TOKEN,
        prefill=PrefillCost((BATCH_S, TOKEN_S, 0.0)),
        # Twice as slow as computing.
        transfers=[TransferCost((0.0, 2 * TOKEN_S / BYTES_PER_TOKEN))],
    )
    held = {"num_held": 6400, "num_new": 6400, "num_before": 0}
    assert costs.plan(**held).num_tokens == 0
    half = costs.plan(**held, queue_wait_s=3200 * 2 * TOKEN_S).num_tokens
    assert 2800 <= half <= 3200
    assert costs.plan(**held, queue_wait_s=6400 * 2 * TOKEN_S).num_tokens == 6400


def test_waiting_ends_where_computing_the_rest_is_sooner() -> None:
    costs = model()
    compute_s = costs.prefill.seconds(2000, 2000)
    assert costs.should_wait(num_saved=2000, num_before=2000, left_s=0.9 * compute_s)
    assert not costs.should_wait(num_saved=2000, num_before=2000, left_s=1.1 * compute_s)
    assert not costs.should_wait(num_saved=0, num_before=2000, left_s=0.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_clock_that_jumped_teaches_nothing(seconds: float) -> None:
    cost = OnlineCost((1.0, 1.0), (1.0, 1.0), level_half_life=1)
    cost.learn((1.0, 1.0), seconds)
    assert cost.num_observed == 0
    assert cost.predict((1.0, 1.0)) == 2.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9), st.floats(1e-9, 1e6)), max_size=60))
def test_whatever_was_observed_costs_stay_finite_and_positive(
    observations: list[tuple[float, float, float]],
) -> None:
    cost = OnlineCost((1e-3, 1e-9), (1.0, 1e7), level_half_life=1)
    for fixed, size, seconds in observations:
        cost.learn((fixed, size), seconds)
    assert all(0 <= price < math.inf for price in cost.prices)
    assert 0 < cost.predict((1.0, 1e7)) < math.inf

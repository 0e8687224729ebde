"""Random batches, tile sizes and schedules through the kernel, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import interpreted
from pod_cases import assert_close, make_case, shape_of

from sglang_tiered_kernels.pod_attention import PodConfig, Roles, Schedule

BATCHES = {
    "rows": st.lists(
        st.one_of(
            st.tuples(st.just(1), st.integers(0, 150)),
            st.tuples(st.integers(0, 70), st.integers(0, 90)),
        ),
        min_size=1,
        max_size=4,
    ),
    "heads": st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    "page_size": st.sampled_from([1, 16, 32]),
    "window": st.sampled_from([-1, -1, 0, 17, 64]),
    "config": st.builds(
        PodConfig,
        name=st.just("any"),
        block_m=st.sampled_from([16, 64]),
        block_n=st.sampled_from([16, 32]),
        block_n_decode=st.sampled_from([16, 32]),
        split_len=st.sampled_from([0, 32, 64]),
    ),
    "roles": st.sampled_from([Roles.FUSED, Roles.SERIAL, Roles.PLANNED]),
    "schedule": st.sampled_from(list(Schedule)),
    "num_sms": st.one_of(st.integers(1, 9), st.sampled_from([64, 300])),
    "seed": st.integers(0, 99),
}


@interpreted
def check(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    page_size: int,
    window: int,
    config: PodConfig,
    num_sms: int,
    seed: int,
    **options: Any,
) -> None:
    case = make_case(
        [extend for extend, _ in rows],
        [prefix for _, prefix in rows],
        shape_of(heads=heads, page_size=page_size),
        window=window,
        seed=seed,
    )
    assert_close(case.run(case.plan(config, num_sms), **options), case.expected())


@pytest.mark.parametrize("number", [10, pytest.param(150, marks=pytest.mark.slow)])
def test_random_batches_match(number: int) -> None:
    health = [HealthCheck.too_slow]
    bounds = settings(max_examples=number, suppress_health_check=health)
    bounds(given(**BATCHES)(check))()

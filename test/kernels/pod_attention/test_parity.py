"""The Triton kernel against the float64 reference, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import interpreted
from pod_cases import SMALL, assert_close, make_case, shape_of, sinks_of

from sglang_tiered_kernels.pod_attention import PodConfig, Roles, Schedule

# A chunk of prefill on a prefix, decodes of uneven lengths, a short prompt, a row without tokens.
EXTEND = [61, 1, 1, 1, 5, 0]
PREFIX = [70, 22, 150, 64, 0, 7]
FP8 = torch.float8_e4m3fn


@interpreted
def check(
    extend: list[int],
    prefix: list[int],
    shape: dict[str, Any],
    window: int = -1,
    sinks: bool = False,
    **options: Any,
) -> None:
    case = make_case(extend, prefix, shape_of(**shape), window=window)
    if sinks:
        options["sinks"] = sinks_of(case.shape)
    actual = case.run(case.plan(), roles=Roles.FUSED, **options)
    assert_close(actual, case.expected(**{k: v for k, v in options.items() if k != "schedule"}))
    padding = case.out[len(actual) :]
    assert padding.isnan().all(), "tokens beyond the batch's were written"


ALL = {"window": 90, "sinks": True, "logit_cap": 4.0, "k_scale": 0.5, "v_scale": 2.0}
SMALL_HEADS = {"heads": (2, 1)}
BF16 = torch.bfloat16


def batch(extend: list[int], prefix: list[int], **shape: Any) -> dict[str, Any]:
    return {"extend": extend, "prefix": prefix, "shape": shape}


def mixed(shape: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return {"extend": EXTEND, "prefix": PREFIX, "shape": shape or {}, **options}


ROWS: dict[str, dict[str, Any]] = {
    **{
        f"prompts of {n}": batch([n, n, 2], [0, 45, 62], heads=(2, 1))
        for n in (1, 31, 32, 33, 63, 127)
    },
    **{f"decodes at {n}": batch([1, 1], [n, 129]) for n in (1, 31, 32, 63, 64, 65, 127)},
    **{f"pages of {n}": mixed(SMALL_HEADS | {"page_size": n}) for n in (1, 16, 32, 64)},
    **{
        f"{q} heads over {kv}": batch([35, 1, 1], [10, 22, 100], heads=(q, kv))
        for q, kv in ((2, 2), (4, 1), (8, 1), (20, 1), (6, 2))
    },
    **{
        f"a window of {n} over pages of {size}": mixed(SMALL_HEADS | {"page_size": size}, window=n)
        for n in (0, 1, 31, 40, 63, 1000)
        for size in (1, 64)
    },
    "bf16": mixed({"dtype": BF16}),
    "fp16 on e4m3": mixed({"kv_dtype": FP8}),
    "fp16 on e5m2": mixed({"kv_dtype": torch.float8_e5m2}),
    "bf16 on e4m3": mixed({"dtype": BF16, "kv_dtype": FP8}),
    "heads of 128": mixed({"head_dim": 128, "heads": (2, 1)}),
    "a cap bends scores": mixed(logit_cap=3.0, sm_scale=0.125),
    "and saturates": mixed(logit_cap=3.0, sm_scale=50.0),
    "scales, once": mixed({"kv_dtype": FP8}, k_scale=0.25, v_scale=3.0),
    "sinks join each denominator once": mixed(sinks=True, v_scale=2.0),
    "scores far from zero neither overflow nor vanish": mixed(sm_scale=60.0),
    "all at once": mixed({"heads": (8, 2), "page_size": 64, "kv_dtype": FP8}, **ALL),
    **{one.name.lower(): mixed(schedule=one) for one in Schedule},
    "only prefill": batch([33, 20], [0, 40]),
    "only decode": batch([1, 1], [5, 100]),
    "no rows": batch([], []),
    "no tokens": batch([0, 0], [9, 0]),
    "one first token": batch([1], [0]),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_kernel_equals_the_reference(row: dict[str, Any]) -> None:
    """And leaves nothing of the batch unwritten, and reads no key behind the window."""
    check(**row)


@interpreted
def test_a_row_of_many_splits_is_merged_stepwise() -> None:
    case = make_case([1, 40], [32 * 37 + 5, 3], shape_of(heads=(2, 1)))
    plan = case.plan(replace(SMALL, split_len=32))
    assert plan.merges[:, 2].tolist() == [38]
    assert_close(case.run(plan, roles=Roles.FUSED), case.expected())


@interpreted
def test_a_plan_serves_layer_after_layer() -> None:
    case = make_case(EXTEND, PREFIX)
    plan = case.plan()
    first = case.run(plan, roles=Roles.FUSED).clone()
    for schedule in (Schedule.TICKET, Schedule.PERSISTENT, Schedule.TICKET):
        assert torch.equal(case.run(plan, roles=Roles.FUSED, schedule=schedule), first)


@interpreted
def test_each_role_alone_writes_its_own_queries_only() -> None:
    case = make_case(EXTEND, PREFIX)
    expected = case.expected()
    decoding = torch.zeros(69, dtype=torch.bool)
    decoding[61:64] = True
    plan = case.plan()
    for roles, own in ((Roles.PREFILL, ~decoding), (Roles.DECODE, decoding)):
        actual = case.run(plan, roles=roles)
        assert_close(actual[own], expected[own])
        assert actual[~own].isnan().all()


@interpreted
def test_slot_types_and_strides_change_no_bits() -> None:
    case = make_case(EXTEND, PREFIX)
    plain = case.run(case.plan(), roles=Roles.FUSED).clone()
    case.kv_indices = case.kv_indices.int()
    # Queries as a slice of a fused projection, keys and values as halves of one buffer.
    wide = torch.full((case.q.shape[0], 9, 64), torch.nan, dtype=case.q.dtype)
    wide[:, 2:6] = case.q
    case.q = wide[:, 2:6]
    both = torch.stack([case.k_cache, case.v_cache], dim=1)
    case.k_cache, case.v_cache = both[:, 0], both[:, 1]
    case.out = torch.full_like(wide, torch.nan)[:, 3:7]
    assert torch.equal(case.run(case.plan(), roles=Roles.FUSED), plain)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@interpreted
def test_slots_beyond_32_bits_are_addressed(name: str) -> None:
    case = make_case([20, 1], [40, 70], shape_of(heads=(2, 1), kv_dtype=FP8))
    plain = case.run(case.plan(), roles=Roles.FUSED).clone()
    cache = getattr(case, name)
    # Half of the slots lie beyond. Memory is only taken by the pages that are touched.
    stride = 2**32 // len(cache)
    wide = torch.empty(len(cache) * stride, dtype=torch.uint8).view(FP8)
    wide = wide.as_strided(cache.shape, (stride, 64, 1))
    wide.copy_(cache)
    setattr(case, name, wide)
    assert torch.equal(case.run(case.plan(), roles=Roles.FUSED), plain)


# ---- Any batch ----


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
def check_batch(
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
    bounds(given(**BATCHES)(check_batch))()

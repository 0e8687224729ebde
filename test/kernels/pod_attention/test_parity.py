"""The Triton kernel against the float64 reference, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import interpreted
from pod_cases import SMALL, assert_close, make_case, shape_of, sinks_of

from sglang_tiered_kernels.pod_attention import Roles, Schedule

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


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 127])
def test_prompts_of_odd_lengths_match_the_reference(length: int) -> None:
    check(extend=[length, length, 2], prefix=[0, 45, 62], shape={"heads": (2, 1)})


@pytest.mark.parametrize("length", [1, 31, 32, 63, 64, 65, 127])
def test_decodes_at_the_edges_of_steps_and_splits(length: int) -> None:
    check(extend=[1, 1], prefix=[length, 129], shape={})


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
def test_pages_are_read_through_slots_and_by_address(page_size: int) -> None:
    check(extend=EXTEND, prefix=PREFIX, shape={"heads": (2, 1), "page_size": page_size})


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (8, 1), (20, 1), (6, 2)])
def test_each_query_head_reads_its_own_kv_head(heads: tuple[int, int]) -> None:
    check(extend=[35, 1, 1], prefix=[10, 22, 100], shape={"heads": heads})


@pytest.mark.parametrize(
    "shape",
    [
        {"dtype": torch.bfloat16},
        {"kv_dtype": FP8},
        {"kv_dtype": torch.float8_e5m2},
        {"dtype": torch.bfloat16, "kv_dtype": FP8},
        {"head_dim": 128, "heads": (2, 1)},
    ],
    ids=["bf16", "fp16 on e4m3", "fp16 on e5m2", "bf16 on e4m3", "128"],
)
def test_dtypes_and_head_sizes(shape: dict[str, Any]) -> None:
    check(extend=EXTEND, prefix=PREFIX, shape=shape)


@pytest.mark.parametrize("window", [0, 1, 31, 40, 63, 1000])
@pytest.mark.parametrize("page_size", [1, 64])
def test_keys_behind_the_window_are_never_read(window: int, page_size: int) -> None:
    shape = {"heads": (2, 1), "page_size": page_size}
    check(extend=EXTEND, prefix=PREFIX, shape=shape, window=window)


ALL = {"window": 90, "sinks": True, "logit_cap": 4.0, "k_scale": 0.5, "v_scale": 2.0}


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param({}, {"logit_cap": 3.0, "sm_scale": 0.125}, id="a cap bends scores"),
        pytest.param({}, {"logit_cap": 3.0, "sm_scale": 50.0}, id="and saturates"),
        pytest.param({"kv_dtype": FP8}, {"k_scale": 0.25, "v_scale": 3.0}, id="scales, once"),
        pytest.param({}, {"sinks": True, "v_scale": 2.0}, id="sinks join each denominator once"),
        pytest.param({}, {"sm_scale": 60.0}, id="scores far from zero neither overflow nor vanish"),
        pytest.param({"heads": (8, 2), "page_size": 64, "kv_dtype": FP8}, ALL, id="all at once"),
        *(pytest.param({}, {"schedule": one}, id=one.name.lower()) for one in Schedule),
    ],
)
def test_features_match(shape: dict[str, Any], options: dict[str, Any]) -> None:
    check(extend=EXTEND, prefix=PREFIX, shape=shape, **options)


@pytest.mark.parametrize(
    ("extend", "prefix"),
    [([33, 20], [0, 40]), ([1, 1], [5, 100]), ([], []), ([0, 0], [9, 0]), ([1], [0])],
    ids=["only prefill", "only decode", "no rows", "no tokens", "one first token"],
)
def test_an_empty_role_leaves_nothing_unwritten(extend: list[int], prefix: list[int]) -> None:
    check(extend=extend, prefix=prefix, shape={})


@interpreted
def test_a_row_of_many_splits_is_merged_stepwise() -> None:
    case = make_case([1, 40], [32 * 37 + 5, 3], shape_of(heads=(2, 1)))
    plan = case.plan(replace(SMALL, split_len=32))
    assert plan.merges[:, 2].tolist() == [38]
    assert_close(case.run(plan, roles=Roles.FUSED), case.expected())


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

"""The plain PyTorch path against the reference, and refusals in one sentence."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pod_cases import Case, assert_close, make_case, shape_of, sinks_of

from sglang_tiered_kernels.pod_attention import PodShape, make_plan, supports, warm_up

EXTEND = [61, 1, 1, 1, 5, 0]
PREFIX = [70, 22, 150, 64, 0, 7]


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The path of a machine without a GPU, on one thread: tensors this small lose to more."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
        {"heads": (6, 2), "head_dim": 80, "dtype": torch.float32, "page_size": 16},
    ],
    ids=["fp16", "fp8", "any head size"],
)
@pytest.mark.parametrize("window", [-1, 0, 40])
def test_a_cpu_computes_the_same(shape: dict[str, Any], window: int) -> None:
    case = make_case(EXTEND, PREFIX, shape_of(**shape), window=window)
    for options in (
        {},
        {"logit_cap": 4.0, "sinks": sinks_of(case.shape), "k_scale": 0.5, "v_scale": 2.0},
    ):
        actual = case.run(case.plan(), **options)
        assert_close(actual, case.expected(**options))
        assert case.out[len(actual) :].isnan().all(), "tokens beyond the batch's were written"


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3) | st.integers(0, 40), st.integers(0, 60)), max_size=6
    ),
    page_size=st.sampled_from([1, 16]),
    window=st.sampled_from([-1, 0, 7, 50]),
)
def test_a_cpu_computes_any_batch(rows: list[tuple[int, int]], page_size: int, window: int) -> None:
    shape = shape_of(page_size=page_size, dtype=torch.float32)
    case = make_case([e for e, _ in rows], [p for _, p in rows], shape, window=window)
    assert_close(case.run(case.plan()), case.expected())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 96}, "head_dim 96 is not supported .* use another"),
        ({"q_dtype": torch.float32, "kv_dtype": torch.float32}, "queries in torch.float32"),
        ({"kv_dtype": torch.float16}, "torch.bfloat16 with a KV cache in torch.float16"),
        ({"num_q_heads": 128, "num_kv_heads": 1}, "128 query heads per KV head"),
        ({"kv_dtype": torch.uint8}, "a KV cache in torch.uint8"),
    ],
)
def test_a_gpu_refuses_what_its_kernel_lacks(changes: dict[str, Any], message: str) -> None:
    shape = PodShape(32, 8, 128, 64, torch.bfloat16, torch.bfloat16)
    assert supports(shape) is None
    refusal = supports(dataclasses.replace(shape, **changes))
    assert refusal is not None
    assert re.search(message, refusal)
    assert supports(dataclasses.replace(shape, **changes), "cpu") is None


@pytest.mark.parametrize(
    ("kv_dtype", "capability", "message"),
    [
        (torch.bfloat16, (9, 0), None),
        (torch.bfloat16, (7, 5), "needs compute capability 8.0"),
        (torch.float8_e4m3fn, (8, 9), None),
        (torch.float8_e4m3fn, (8, 6), "torch.float8_e4m3fn needs compute capability 8.9"),
    ],
)
def test_an_old_gpu_is_refused_before_compiling(
    kv_dtype: torch.dtype,
    capability: tuple[int, int],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    refusal = supports(PodShape(32, 8, 128, 64, torch.bfloat16, kv_dtype))
    assert refusal is None if message is None else message in str(refusal)


def test_what_no_kernel_can_compute_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(head_dim=80)
    plan = make_plan([3], [0], shape, num_sms=1)
    plan.device = torch.device("cuda")
    with pytest.raises(ValueError, match="head_dim 80 is not supported"):
        make_case([3], [0], shape).run(plan)
    far = make_case([3], [0]).k_cache.to("meta")
    with pytest.raises(ValueError, match="nothing for this meta device"):
        warm_up(far, far, shape_of())
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "nothing for this ROCm device" in str(supports(shape_of(), "cuda"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: {"q": case.q.flatten(1)}, r"q has shape \[72, 256\]; .* for \[n, 4, 64\]"),
        (lambda case: {"k_cache": case.k_cache.float()}, "k_cache is torch.float32; the plan is"),
        (lambda case: {"v_cache": case.v_cache.mT.contiguous().mT}, "v_cache has stride 2 within"),
        (lambda case: {"q": case.q[:, :2]}, r"q has shape \[72, 2, 64\]"),
        (lambda case: {"q": case.q[:60]}, "q has 60 tokens; the plan's rows have 69"),
        (lambda case: {"out": case.out[:60]}, "out has 60 tokens"),
        (lambda case: {"kv_indptr": case.kv_indptr[1:]}, r"is \[6\] torch.int32; give \[7\]"),
        (lambda case: {"kv_indptr": case.kv_indptr.long()}, "torch.int64; give"),
        (lambda case: {"kv_indices": case.kv_indices.float()}, "float32; give one dimension of"),
        (lambda case: {"kv_indices": case.kv_indices[:313]}, "has 313 slots; .* rows have 382"),
        (lambda case: {"out": case.out.to("meta")}, "on meta; the plan is on cpu"),
        (lambda _: {"sm_scale": 0.0}, "sm_scale 0.0"),
        (lambda _: {"sm_scale": float("inf")}, "sm_scale inf"),
        (lambda _: {"k_scale": -1.0}, "k_scale -1.0"),
        (lambda _: {"sinks": torch.zeros(2)}, r"sinks \[2\] on cpu; give one per query head"),
    ],
)
def test_tensors_that_misfit_are_refused_before_writing(
    change: Callable[[Case], dict[str, Any]], message: str
) -> None:
    case = make_case(EXTEND, PREFIX)
    changes = change(case)
    options = {k: v for k, v in changes.items() if not hasattr(case, k)}
    broken = dataclasses.replace(case, **{k: v for k, v in changes.items() if hasattr(case, k)})
    out = case.out.clone()
    with pytest.raises(ValueError, match=message):
        broken.run(case.plan(), **options)
    assert torch.equal(case.out.isnan(), out.isnan())

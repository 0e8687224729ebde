"""What only a GPU can show: bfloat16's arithmetic, real SM numbers, streams and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from pod_cases import Case, assert_close, make_case, shape_of, sinks_of

from sglang_tiered_kernels.pod_attention import CONFIGS, PodPlan, Roles, Schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def plan_of(case: Case, name: str = "A") -> PodPlan:
    properties = torch.cuda.get_device_properties(0)
    return case.plan(CONFIGS[name], num_sms=properties.multi_processor_count)


def large() -> Case:
    """Enough tiles of both roles to fill any GPU several times."""
    shape = shape_of(heads=(32, 8), head_dim=128, page_size=64, dtype=torch.bfloat16)
    return make_case([2048] + [1] * 64, [2048] + [2000] * 64, shape).to("cuda")


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, FP8])
def test_every_configuration_matches_the_reference(
    name: str, head_dim: int, kv_dtype: torch.dtype
) -> None:
    """With the loads, products and layouts that no interpreter has."""
    dtype = torch.bfloat16 if kv_dtype is FP8 else kv_dtype
    for page_size, window in ((1, -1), (64, -1), (64, 300)):
        kind = {"head_dim": head_dim, "page_size": page_size, "dtype": dtype, "kv_dtype": kv_dtype}
        shape = shape_of(heads=(8, 2), **kind)
        rows = [700, 1, 1, 1, 127, 1, 0], [900, 63, 5000, 640, 0, 1999, 7]
        case = make_case(*rows, shape, window=window).to("cuda")
        for options in ({}, {"logit_cap": 30.0, "sinks": sinks_of(shape).to("cuda")}):
            expected = case.expected(**options)
            for roles in (Roles.FUSED, Roles.SERIAL):
                assert_close(case.run(plan_of(case, name), roles=roles, **options), expected)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_the_runner_of_a_tile_changes_no_result(schedule: Schedule) -> None:
    case = large()
    plan = plan_of(case)
    serial = case.run(plan, roles=Roles.SERIAL).double()
    assert not serial.isnan().any()
    first = case.run(plan, roles=Roles.FUSED, schedule=schedule).clone()
    assert_close(first, serial)
    for _ in range(70):  # beyond the launches that share one clearing of the counters
        assert torch.equal(case.run(plan, roles=Roles.FUSED, schedule=schedule), first)


def test_a_captured_launch_replays_with_fresh_counters() -> None:
    case = large()
    plan = plan_of(case)
    expected = case.run(plan, roles=Roles.FUSED).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            case.run(plan, roles=Roles.FUSED)
    for _ in range(5):
        case.out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(case.out[: plan.num_tokens], expected)


def test_roles_may_run_on_two_streams() -> None:
    case = large()
    plan = plan_of(case)
    expected = case.run(plan, roles=Roles.SERIAL).clone()
    case.out.fill_(float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    case.launch(plan, roles=Roles.PREFILL)
    with torch.cuda.stream(side):
        case.launch(plan, roles=Roles.DECODE)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(case.out[: plan.num_tokens], expected)

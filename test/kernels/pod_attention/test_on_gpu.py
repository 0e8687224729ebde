"""What only a GPU can show: bfloat16's arithmetic, real SM numbers, streams and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from pod_cases import Case, assert_close, make_case, shape_of

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

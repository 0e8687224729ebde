"""Every tile runs once, whatever the SMs are called, and the tickets mix the roles as promised."""

from __future__ import annotations

import pytest
import torch
from interpreted import interpreted
from pod_cases import Case, make_case, shape_of

from sglang_tiered_kernels.pod_attention import PodPlan, Roles, Schedule

# Count, SM, begin, end; the interpreter's clock is the number of the running block.
COUNT, SM, BEGIN = range(3)


def mixed(extend: int, decodes: int) -> Case:
    """Decode rows of about two splits beside one chunk."""
    prefix = [33 + 11 * i for i in range(decodes)]
    return make_case([extend] + [1] * decodes, [20, *prefix], shape_of(heads=(2, 1)))


def traced(
    case: Case, plan: PodPlan, schedule: Schedule, roles: Roles = Roles.FUSED
) -> torch.Tensor:
    tiles = plan.num_prefill_tiles + plan.num_decode_tiles
    trace = torch.zeros(tiles, 4, dtype=torch.int64)
    case.run(plan, roles=roles, schedule=schedule, trace=trace)
    return trace


@interpreted
def check_once(schedule: Schedule, num_sms: int, extend: int, decodes: int) -> None:
    case = mixed(extend, decodes)
    serial = case.run(case.plan(), roles=Roles.SERIAL).clone()
    plan = case.plan(num_sms=num_sms)
    trace = traced(case, plan, schedule)
    assert trace[:, COUNT].tolist() == [1] * len(trace)
    assert torch.equal(case.out[: plan.num_tokens], serial)


TICKET = Schedule.TICKET


@pytest.mark.parametrize(
    ("schedule", "num_sms", "extend", "decodes"),
    [
        *((TICKET, num_sms, 90, 5) for num_sms in (1, 2, 3, 7, 64, 300)),
        *((one, 2, *work) for one in Schedule for work in ((130, 1), (20, 9))),  # a role runs out
    ],
)
def test_every_tile_runs_once_on_any_sm(
    schedule: Schedule, num_sms: int, extend: int, decodes: int
) -> None:
    check_once(schedule=schedule, num_sms=num_sms, extend=extend, decodes=decodes)


@pytest.mark.parametrize("num_sms", [1, 3])
@interpreted
def test_an_sm_gets_roles_in_the_planned_ratio(num_sms: int) -> None:
    case = mixed(130, 6)
    plan = case.plan(num_sms=num_sms)
    prefill_tickets, decode_tickets = plan.tickets
    period = prefill_tickets + decode_tickets
    trace = traced(case, plan, Schedule.TICKET)
    order = trace[:, BEGIN].argsort()
    was_prefill = (order < plan.num_prefill_tiles).tolist()

    # What the paper's figure 9 does, block by block.
    left = {True: plan.num_prefill_tiles, False: plan.num_decode_tiles}
    taken = [0] * num_sms
    for block, prefill in enumerate(was_prefill):
        sm = block % num_sms
        assert trace[order[block], SM] == sm
        wanted = taken[sm] % period * prefill_tickets % period < prefill_tickets
        taken[sm] += 1
        expected = wanted if left[wanted] else not wanted
        assert prefill is expected, f"block {block} on SM {sm}"
        left[expected] -= 1
    assert left == {True: 0, False: 0}


@interpreted
def test_the_gate_decides_only_where_it_is_asked() -> None:
    from sglang_tiered_kernels.pod_attention import launch  # needs Triton

    launched: list[int] = []

    class Recorder:
        def __getitem__(self, grid: object) -> object:
            del grid
            return lambda *_, **options: launched.append(options["ROLES"])

    def roles_of(plan: PodPlan, roles: Roles) -> list[int]:
        launched.clear()
        case.run(plan, roles=roles)
        return list(launched)

    prefill, decode, both = 1, 2, 3
    kernel, launch.pod_kernel = launch.pod_kernel, Recorder()
    try:
        case = mixed(40, 2)
        plan = case.plan()
        for fuse in (True, False):
            plan.fuse = fuse
            assert roles_of(plan, Roles.PLANNED) == ([both] if fuse else [prefill, decode])
            assert roles_of(plan, Roles.FUSED) == [both]
            assert roles_of(plan, Roles.SERIAL) == [prefill, decode]
        case = make_case([40], [3])
        assert roles_of(case.plan(), Roles.FUSED) == [prefill]
        assert roles_of(case.plan(), Roles.DECODE) == []
    finally:
        launch.pod_kernel = kernel

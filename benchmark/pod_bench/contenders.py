"""Who is measured: a name and a call that computes the whole batch. Our own tiles are here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_tiered_kernels.pod_attention import (
    PodConfig,
    PodPlan,
    Roles,
    Schedule,
    make_plan,
    pod_attention,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pod_bench.batch import Batch


Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_CPU_SMS = 4  # where there are none, plans still have splits


@dataclass(frozen=True)
class Contender:
    """run: computes the batch in stream order and returns [tokens, q_heads, dim], whole or as its
    prefill and decode parts; everything it launches counts. plan_s: host time of what it prepares
    once per forward, not in ``run``."""

    name: str
    run: Callable[[], Output]
    plan_s: float = 0.0
    note: str = ""


def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def on_two_streams(
    first: Callable[[], object], second: Callable[[], object], out: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Both at once, the second on a stream of its own; whoever comes after waits for both."""
    side = torch.cuda.Stream()

    def run() -> torch.Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            second()
        first()
        current.wait_stream(side)
        return out

    return run


def own_contenders(batch: Batch, config: PodConfig | None) -> list[Contender]:
    """Our tiles: one launch per role; both roles in one launch, by the plan's schedule and by
    each."""
    device = batch.q.device

    def plan() -> PodPlan:
        return make_plan(
            batch.mix.extend_lens,
            batch.mix.prefix_lens,
            batch.shape,
            num_sms=num_sms(device),
            config=config,
            device=device,
        )

    def call(
        own: PodPlan, out: torch.Tensor, roles: Roles, schedule: Schedule | None
    ) -> torch.Tensor:
        pod_attention(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            out,
            batch.kv_indptr,
            batch.kv_indices,
            own,
            sm_scale=batch.sm_scale,
            roles=roles,
            schedule=schedule,
        )
        return out

    plan()  # the first one imports and allocates
    started = time.perf_counter()
    shared = plan()
    plan_s = time.perf_counter() - started
    gate = "fuse" if shared.fuse else "serial"
    kinds = [
        ("own_serial", Roles.SERIAL, Schedule.TICKET),
        ("own_fused", Roles.FUSED, None),
        ("own_ticket", Roles.FUSED, Schedule.TICKET),
        ("own_persistent", Roles.FUSED, Schedule.PERSISTENT),
    ]
    contenders = []
    for name, roles, schedule in kinds:
        own, out = plan(), batch.empty_out()

        def run(
            own: PodPlan = own,
            out: torch.Tensor = out,
            roles: Roles = roles,
            schedule: Schedule | None = schedule,
        ) -> torch.Tensor:
            return call(own, out, roles, schedule)

        contenders.append(Contender(name, run, plan_s, f"gate: {gate}, config {own.config.name}"))
    if device.type == "cuda":
        # A plan's workspace must not be shared by two streams.
        out, first, second = batch.empty_out(), plan(), plan()
        run = on_two_streams(
            lambda: call(first, out, Roles.PREFILL, Schedule.TICKET),
            lambda: call(second, out, Roles.DECODE, Schedule.TICKET),
            out,
        )
        contenders.append(Contender("own_streams", run, plan_s))
    return contenders

"""Makes kernel arguments out of tensors and a plan. Importing this needs Triton."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton

from sglang_tiered_kernels.pod_attention.plan import FIRST_TICKET, NUM_SM_SLOTS, make_plan
from sglang_tiered_kernels.pod_attention.shape import Schedule
from sglang_tiered_kernels.pod_attention.triton_kernel import merge_kernel, pod_kernel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tiered_kernels.pod_attention.heuristics import PodConfig
    from sglang_tiered_kernels.pod_attention.plan import PodPlan
    from sglang_tiered_kernels.pod_attention.shape import PodShape


# ROLES of the kernel.
PREFILL, DECODE, BOTH = 1, 2, 3
_SCHEDULES = {Schedule.TICKET: 0, Schedule.PERSISTENT: 1, None: 0}
_LOG2_E = math.log2(math.e)
# Partial results merged per step.
_MERGE_BLOCK = 16
_INTERPRETED = not isinstance(pod_kernel, triton.JITFunction)


def constants(
    shape: PodShape,
    config: PodConfig,
    *,
    roles: int,
    schedule: Schedule | None = Schedule.TICKET,
    window: bool = False,
    logit_cap: bool = False,
    sinks: bool = False,
    index64: bool = False,
    fake_sms: int = 0,
) -> dict[str, Any]:
    """What the kernel is compiled for: its constexprs by name and the compiler's options."""
    return {
        "Q_HEADS": shape.num_q_heads,
        "KV_HEADS": shape.num_kv_heads,
        "D": shape.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        # Matrix products have at least 16 rows.
        "BLOCK_H": max(16, triton.next_power_of_2(shape.group)),
        "BLOCK_N_DECODE": config.block_n_decode,
        "ROLES": roles,
        "SCHEDULE": _SCHEDULES[schedule],
        "WINDOW": window,
        "LOGIT_CAP": logit_cap,
        "SINKS": sinks,
        "AFFINE": shape.page_size % config.block_n == 0,
        "AFFINE_DECODE": shape.page_size % config.block_n_decode == 0,
        "INDEX64": index64,
        "UPCAST": _INTERPRETED and shape.q_dtype == torch.bfloat16,
        "SM_SLOTS": NUM_SM_SLOTS,
        "FIRST_TICKET": FIRST_TICKET,
        "FAKE_SMS": fake_sms,
        "STAGES": config.prefill_stages,
        "STAGES_DECODE": config.decode_stages,
        "num_warps": config.decode_warps if roles == DECODE else config.num_warps,
        # Said, since the default is about to change and with it the rounding.
        "enable_fp_fusion": True,
    }


def merge_constants(shape: PodShape, *, sinks: bool) -> dict[str, Any]:
    """Like ``constants``, for the kernel that merges split rows."""
    return {
        "Q_HEADS": shape.num_q_heads,
        "D": shape.head_dim,
        "SINKS": sinks,
        "BLOCK_S": _MERGE_BLOCK,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }


def _prepare(
    plan: PodPlan,
    strides: tuple[int, ...],
    *,
    slots: tuple[int, int],
    roles: int,
    schedule: Schedule | None,
    **kind: bool,
) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:
    """Return what layers of a plan have in common: the grid, the kernel's numbers and options."""
    shape, config = plan.shape, plan.config
    num_prefill, num_decode = plan.num_prefill_tiles, plan.num_decode_tiles
    tiles = {PREFILL: num_prefill, DECODE: num_decode, BOTH: num_prefill + num_decode}[roles]
    if schedule is Schedule.PERSISTENT:
        tiles = min(tiles, plan.num_sms * config.ctas_per_sm)
    numbers = num_prefill, num_decode, *plan.tickets, plan.decode_table_offset, plan.window
    furthest = max(
        num_slots * strides[place] + shape.num_kv_heads * strides[place + 1]
        for num_slots, place in zip(slots, (4, 6), strict=True)
    )
    options = constants(
        shape,
        config,
        roles=roles,
        schedule=schedule,
        window=plan.window >= 0,
        index64=furthest > 2**31 - 1,
        fake_sms=plan.num_sms if _INTERPRETED else 0,
        **kind,
    )
    return (tiles,), numbers, options


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    plan: PodPlan,
    *,
    prefill: bool,
    decoding: bool,
    schedule: Schedule | None,
    scale: float,
    logit_cap: float,
    sinks: torch.Tensor | None,
    v_scale: float,
) -> None:
    """Launch the chosen roles: together under a schedule, or one after the other under None."""
    if prefill and decoding and schedule is not None:
        launches = [BOTH]
    else:
        launches, schedule = [PREFILL] * prefill + [DECODE] * decoding, None
    capped, some_sinks = logit_cap > 0, q if sinks is None else sinks
    strides = *q.stride()[:2], *out.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2]
    slots = k_cache.shape[0], v_cache.shape[0]
    partials = _partials(plan)
    for roles in launches:
        # A layer mostly differs from the last in its tensors alone.
        kind = roles, schedule, capped, sinks is None, slots, strides
        if kind not in plan.kept:
            plan.kept[kind] = _prepare(
                plan,
                strides,
                slots=slots,
                roles=roles,
                schedule=schedule,
                logit_cap=capped,
                sinks=sinks is not None,
            )
        grid, numbers, options = plan.kept[kind]
        pod_kernel[grid](
            q,
            k_cache,
            v_cache,
            out,
            some_sinks,
            *partials,
            plan.counters() if roles == BOTH else plan.table,
            plan.table,
            kv_indptr,
            kv_indices,
            *numbers,
            # Under a cap: to the argument of tanh(x) = 1 - 2 / (exp2(2x log2 e) + 1).
            2 * scale / logit_cap * _LOG2_E if capped else scale * _LOG2_E,
            logit_cap * _LOG2_E,
            float(v_scale),
            *strides,
            **options,
        )
    if decoding and len(plan.merges):
        merge = "merge", sinks is None
        if merge not in plan.kept:
            plan.kept[merge] = merge_constants(plan.shape, sinks=sinks is not None)
        if "merges" not in plan.kept:
            plan.kept["merges"] = plan.table[plan.merge_table_offset :]
        merge_kernel[(len(plan.merges), plan.shape.num_q_heads)](
            *partials,
            out,
            some_sinks,
            plan.kept["merges"],
            float(v_scale),
            *out.stride()[:2],
            **plan.kept[merge],
        )


def warm_up(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    shape: PodShape,
    configs: Iterable[PodConfig],
    *,
    index_dtype: torch.dtype,
    window: int,
    **options: Any,
) -> None:
    """Launch every kernel that batches of this shape need, on a batch of two short rows."""
    device = k_cache.device
    for config in configs:
        # Splits of one step, so that the second row is merged.
        config = replace(config, split_len=config.block_n_decode)  # noqa: PLW2901
        extend, prefix = [2, 1], [0, 2 * config.block_n_decode]
        plan = make_plan(
            extend, prefix, shape, num_sms=1, window=window, config=config, device=device
        )
        q = torch.zeros(3, shape.num_q_heads, shape.head_dim, dtype=shape.q_dtype, device=device)
        starts = torch.tensor([0, 2, 3 + prefix[1]], dtype=torch.int32, device=device)
        # Every key is that of slot 0, or of its page.
        slots = torch.zeros(plan.num_kv_tokens, dtype=index_dtype, device=device)
        for schedule in (Schedule.TICKET, Schedule.PERSISTENT, None):
            run(
                q,
                k_cache,
                v_cache,
                torch.empty_like(q),
                starts,
                slots,
                plan,
                prefill=True,
                decoding=True,
                schedule=schedule,
                scale=1.0,
                v_scale=1.0,
                **options,
            )


def _partials(plan: PodPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """The workspace as [partials, q_heads, dim] and [partials, q_heads], both float32."""
    if "partials" not in plan.kept:
        workspace = plan.workspace()
        outputs = plan.num_partials * plan.shape.num_q_heads * plan.shape.head_dim
        plan.kept["partials"] = workspace[:outputs], workspace[outputs:]
    kept: tuple[torch.Tensor, torch.Tensor] = plan.kept["partials"]
    return kept

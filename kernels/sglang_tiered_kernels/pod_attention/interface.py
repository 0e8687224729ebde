"""POD attention: the prefill and decode rows of a mixed batch in one launch.

After POD-Attention (Kamath et al., arXiv 2410.18038): prefill is limited by matrix products and
decode by memory, so running both on every SM at once hides the smaller behind the larger. The
README has the algorithm; ``make_plan`` cuts a batch, ``pod_attention`` runs a layer of it.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch

from sglang_tiered_kernels.pod_attention.fallback import torch_pod_attention
from sglang_tiered_kernels.pod_attention.heuristics import CONFIGS
from sglang_tiered_kernels.pod_attention.shape import Roles, Schedule, supports

if TYPE_CHECKING:
    from sglang_tiered_kernels.pod_attention.plan import PodPlan
    from sglang_tiered_kernels.pod_attention.shape import PodShape


_INDEX_DTYPES = (torch.int32, torch.int64)


def pod_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    plan: PodPlan,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    roles: Roles = Roles.PLANNED,
    schedule: Schedule | None = None,
) -> None:
    """Causal attention of every new token of the batch to its row's keys, written to ``out``.

    q, out: [tokens, q_heads, dim], rows in the plan's order; tokens beyond the plan's are neither
        read nor written. ``out`` has the dtype of ``q`` and must not overlap it.
    k_cache, v_cache: [slots, kv_heads, dim]. The new tokens' keys and values must have been written
        to the pool before, on the same stream.
    kv_indptr: [rows + 1] int32, where each row begins in ``kv_indices``. kv_indices: int32 or
        int64, the slots of each row's tokens in order, prefix and new. Slots that no query of the
        row sees (behind the window) are not read. Both must stay as they are while the plan is in
        use: what a layer derives from them the next one may reuse.
    sm_scale: multiplies the scores; positive. logit_cap: scores become ``cap * tanh(score / cap)``;
        0 for none. sinks: [q_heads], a logit per head that joins the softmax's denominator.
    k_scale, v_scale: what the cache's keys and values are to be multiplied with (fp8 caches).
    roles, schedule: see the enumerations; the plan's schedule by default. Who runs a tile, and
        when, does not change its result:
        the same call gives the same bits again. Another schedule, or the roles apart, is another
        compilation, which may round differently.

    All tensors are borrowed, on the plan's device, contiguous in ``dim``. On a GPU nothing waits
    and nothing is read back. On a CPU the result comes from plain PyTorch, or, with
    ``TRITON_INTERPRET=1``, from Triton's interpreter.
    Raises ValueError for tensors that do not fit the plan or a shape ``supports`` refuses.
    """
    if "supported" not in plan.kept:  # asked once a forward, not once a layer
        refusal = supports(plan.shape, plan.device)
        if refusal is not None:
            raise ValueError(refusal)
        plan.kept["supported"] = True
    _check(q, k_cache, v_cache, out, kv_indptr, kv_indices, plan)
    if not (sm_scale * k_scale > 0 and math.isfinite(sm_scale * k_scale)):
        raise ValueError(f"sm_scale {sm_scale} times k_scale {k_scale} must be positive and finite")
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.device != q.device):
        raise ValueError(
            f"sinks {list(sinks.shape)} on {sinks.device}; give one per query head "
            f"([{q.shape[1]}]) on {q.device}"
        )
    prefill = roles is not Roles.DECODE and len(plan.prefill_units) > 0
    decoding = roles is not Roles.PREFILL and len(plan.decode_units) > 0
    if not (prefill or decoding):
        return
    if plan.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        torch_pod_attention(
            q,
            k_cache,
            v_cache,
            out,
            kv_indptr,
            kv_indices,
            plan,
            prefill=prefill,
            decoding=decoding,
            scale=sm_scale * k_scale,
            v_scale=v_scale,
            logit_cap=logit_cap,
            sinks=sinks,
        )
        return
    # A machine without Triton imports this package and gets the path above.
    from sglang_tiered_kernels.pod_attention import launch  # noqa: PLC0415

    fused = roles is Roles.FUSED or (roles is Roles.PLANNED and plan.fuse)
    launch.run(
        q,
        k_cache,
        v_cache,
        out,
        kv_indptr,
        kv_indices,
        plan,
        scale=sm_scale * k_scale,
        logit_cap=logit_cap,
        sinks=sinks,
        v_scale=v_scale,
        prefill=prefill,
        decoding=decoding,
        schedule=(schedule or plan.schedule) if fused else None,
    )


def warm_up(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    shape: PodShape,
    *,
    index_dtype: torch.dtype = torch.int64,
    window: int = -1,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compile the kernels of later calls, so that no request waits seconds for the compiler.

    k_cache, v_cache: those of a layer; one page of them is read. index_dtype: of ``kv_indices`` to
    come. window, logit_cap, sinks: as the layers of one kind will have them; call it for each kind.
    Triton keeps what it compiled on disk, so the next start is fast. Does nothing on a CPU.
    Raises ValueError for a shape that ``supports`` refuses.
    """
    refusal = supports(shape, k_cache.device)
    if refusal is not None:
        raise ValueError(refusal)
    if k_cache.device.type == "cpu":
        return
    from sglang_tiered_kernels.pod_attention import launch  # noqa: PLC0415

    launch.warm_up(
        k_cache,
        v_cache,
        shape,
        CONFIGS.values(),
        index_dtype=index_dtype,
        window=window,
        logit_cap=logit_cap,
        sinks=sinks,
    )


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    plan: PodPlan,
) -> None:
    """Raise ValueError, in one sentence, for the first argument that does not fit."""
    shape = plan.shape
    heads = (shape.num_q_heads, shape.head_dim)
    kv_heads = (shape.num_kv_heads, shape.head_dim)
    for name, tensor, wanted, dtype in (
        ("q", q, heads, shape.q_dtype),
        ("out", out, heads, shape.q_dtype),
        ("k_cache", k_cache, kv_heads, shape.kv_dtype),
        ("v_cache", v_cache, kv_heads, shape.kv_dtype),
    ):
        if tensor.ndim != 3 or tensor.shape[1:] != wanted:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; "
                f"the plan is for [n, {wanted[0]}, {wanted[1]}]"
            )
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}; the plan is for {dtype}")
        if tensor.stride(2) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(2)} within a head; make it contiguous there"
            )
    for name, tensor in (("q", q), ("out", out)):
        if tensor.shape[0] < plan.num_tokens:
            raise ValueError(
                f"{name} has {tensor.shape[0]} tokens; the plan's rows have {plan.num_tokens}"
            )
    if kv_indptr.shape != (plan.num_rows + 1,) or kv_indptr.dtype != torch.int32:
        raise ValueError(
            f"kv_indptr is {list(kv_indptr.shape)} {kv_indptr.dtype}; "
            f"give [{plan.num_rows + 1}] torch.int32, one more than rows"
        )
    if kv_indices.ndim != 1 or kv_indices.dtype not in _INDEX_DTYPES:
        raise ValueError(
            f"kv_indices is {list(kv_indices.shape)} {kv_indices.dtype}; give one dimension of "
            "int32 or int64 slots"
        )
    if len(kv_indices) < plan.num_kv_tokens:
        raise ValueError(
            f"kv_indices has {len(kv_indices)} slots; the plan's rows have {plan.num_kv_tokens} "
            "tokens, prefix and new"
        )
    for tensor in (q, out, k_cache, v_cache, kv_indptr, kv_indices):
        if tensor.device != plan.table.device:
            raise ValueError(f"a tensor is on {tensor.device}; the plan is on {plan.table.device}")

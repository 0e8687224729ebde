"""POD attention in plain PyTorch, for devices without Triton: the same results, no tiles.

Decode rows go through the paged reference's batched decode and the others through its extend, so a
server without a GPU can run with this backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from sglang_tiered_kernels.paged_attention import DecodePlan, decode, extend, plan_decode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sglang_tiered_kernels.pod_attention.plan import PodPlan


class _Gathers(NamedTuple):
    """The data that the layers of a forward share. indices: the tensor it was made from."""

    indices: torch.Tensor
    prefill_rows: list[torch.Tensor]
    prefill_lens: list[int]
    prefill_queries: torch.Tensor  # [prefill tokens] int64
    decode_plan: DecodePlan
    decode_queries: torch.Tensor  # [decode rows] int64


def torch_pod_attention(
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
    v_scale: float,
    **options: Any,
) -> None:
    """Write the chosen roles' queries to ``out``. options: ``scale`` (key scale included),
    ``logit_cap`` and ``sinks``."""
    gathers = plan.kept.get("gathers")
    if gathers is None or gathers.indices is not kv_indices:
        gathers = plan.kept["gathers"] = _gathers(kv_indptr, kv_indices, plan)
    window = plan.window if plan.window >= 0 else None
    if prefill and gathers.prefill_rows:
        attended = extend(
            q.index_select(0, gathers.prefill_queries),
            k_cache,
            v_cache,
            gathers.prefill_rows,
            gathers.prefill_lens,
            sliding_window=window,
            **options,
        )
        out.index_copy_(0, gathers.prefill_queries, _scaled(attended, v_scale))
    if decoding and len(gathers.decode_queries):
        attended = decode(
            q.index_select(0, gathers.decode_queries),
            k_cache,
            v_cache,
            gathers.decode_plan,
            **options,
        )
        out.index_copy_(0, gathers.decode_queries, _scaled(attended, v_scale))


def _scaled(attended: torch.Tensor, v_scale: float) -> torch.Tensor:
    return attended if v_scale == 1.0 else attended * v_scale


def _gathers(kv_indptr: torch.Tensor, kv_indices: torch.Tensor, plan: PodPlan) -> _Gathers:
    starts = kv_indptr.tolist()
    lengths = plan.extend_lens + plan.prefix_lens
    rows = [
        kv_indices[start : start + length]
        for start, length in zip(starts, lengths.tolist(), strict=False)  # one start more than rows
    ]
    decoding = (plan.extend_lens == 1) & (plan.prefix_lens > 0)
    first_query = np.cumsum(plan.extend_lens) - plan.extend_lens
    token_decodes = np.repeat(decoding, plan.extend_lens)
    prefilling = np.flatnonzero(~decoding & (plan.extend_lens > 0)).tolist()

    def on_device(values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(kv_indices.device)

    return _Gathers(
        indices=kv_indices,
        prefill_rows=[rows[i] for i in prefilling],
        prefill_lens=plan.extend_lens[prefilling].tolist(),
        prefill_queries=on_device(np.flatnonzero(~token_decodes)),
        decode_plan=plan_decode(
            [rows[i] for i in np.flatnonzero(decoding)],
            sliding_window=plan.window if plan.window >= 0 else None,
        ),
        decode_queries=on_device(first_query[decoding]),
    )

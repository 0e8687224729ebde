"""POD attention, written for reading: one row, one head, one matrix at a time.

The oracle of the kernel's tests and of the benchmark's gate. It is slow and needs no plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def reference_pod_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    *,
    sm_scale: float,
    window: int = -1,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Attention of a batch of prefill and decode rows over a paged KV cache, in ``dtype``.

    Arguments are those of ``pod_attention`` and ``make_plan``. Returns [tokens, q_heads, dim] in
    ``dtype``, for the ``sum(extend_lens)`` tokens of the batch.
    """
    num_tokens = sum(extend_lens)
    heads, group = q.shape[1], q.shape[1] // k_cache.shape[1]
    out = torch.empty(num_tokens, heads, q.shape[2], dtype=dtype, device=q.device)
    begin = 0
    for row, (extend, prefix) in enumerate(zip(extend_lens, prefix_lens, strict=True)):
        # Keys that no query sees are not read: their slots may have been given away.
        seen = max(0, prefix - window) if window >= 0 else 0
        length = prefix + extend
        start = int(kv_indptr[row])
        slots = kv_indices[start + seen : start + length].long()
        position = torch.arange(prefix, length, device=q.device)[:, None]  # [queries, 1]
        key_position = torch.arange(seen, length, device=q.device)[None, :]  # [1, keys]
        visible = key_position <= position
        if window >= 0:
            visible &= key_position >= position - window
        for head in range(heads if extend else 0):
            keys = k_cache[slots, head // group].to(dtype)
            values = v_cache[slots, head // group].to(dtype)
            scores = q[begin : begin + extend, head].to(dtype) @ keys.T * (sm_scale * k_scale)
            if logit_cap > 0:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                # A sink is one more key with this score and a value of zero.
                sink = sinks[head].to(dtype).expand(extend, 1)
                scores = torch.cat([scores, sink], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : len(slots)]
            out[begin : begin + extend, head] = weights @ values * v_scale
        begin += extend
    return out

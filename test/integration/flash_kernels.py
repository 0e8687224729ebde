"""SGLang's FlashAttention 3 backend on a CPU: ``sgl_kernel``'s function for it in plain PyTorch.

Everything around that function, metadata, page tables and writes of the pool, is SGLang's own.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """While this is open, the backend can be imported and made; its function stays."""
    package, flash = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    for module, names in (
        (package, ("merge_state_v2",)),
        (flash, ("flash_attn_with_kvcache", "flash_attn_varlen_func", "get_scheduler_metadata")),
    ):
        for name in names:
            setattr(module, name, None)
    fakes = {"sgl_kernel": package, "sgl_kernel.flash_attn": flash}
    sys.modules.update(fakes)
    try:
        from sglang.srt.layers.attention import flashattention_backend

        flashattention_backend.flash_attn_with_kvcache = attend
        yield
    finally:
        for name in fakes:
            del sys.modules[name]


def attend(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """q: [tokens, heads, dim]; caches: [pages, page_size, kv_heads, dim]; causal from the end."""
    assert causal and not softcap
    result = torch.empty_like(q) if out is None else out
    group = q.shape[1] // k_cache.shape[2]
    bounds = cu_seqlens_q.tolist()
    for row, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        length = int(cache_seqlens[row])
        pages = page_table[row, : -(-length // k_cache.shape[1])].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * softmax_scale
        position = torch.arange(length - (end - begin), length)[:, None]
        key = torch.arange(length)[None]
        seen = key <= position
        if window_size[0] >= 0:
            seen &= key >= position - window_size[0]
            values = values.where(seen.any(0)[:, None, None], 0.0)
        scores = scores.where(seen, -torch.inf)
        if sinks is not None:
            extra = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, extra], -1)
        weights = scores.softmax(-1)[..., :length]
        result[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return result

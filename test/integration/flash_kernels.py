"""SGLang's FlashAttention 3 and FlashInfer backends on a CPU: the function of ``sgl_kernel`` and
FlashInfer's wrappers in plain PyTorch.

Everything around them, metadata, page tables, index updates, masks and writes of the pool, is
SGLang's own.
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
    lengths = cache_seqlens.tolist()
    pages = [page_table[i, : -(-n // k_cache.shape[1])].long() for i, n in enumerate(lengths)]
    keys, values = (
        torch.cat([cache[p].flatten(0, 1)[:n] for p, n in zip(pages, lengths, strict=True)]).float()
        for cache in (k_cache, v_cache)
    )
    ends = torch.tensor([0, *lengths]).cumsum(0)
    result, sums = _attend(
        q,
        keys,
        values,
        cu_seqlens_q,
        ends,
        causal=True,
        sm_scale=softmax_scale,
        window_left=window_size[0],
    )
    if sinks is not None:
        result = result * (sums - torch.logaddexp(sums, sinks.float())).exp()[..., None]
    result = result.to(q.dtype)
    return result if out is None else out.copy_(result)


def install_flashinfer() -> Any:
    """Return SGLang's backend class with these wrappers in the place of FlashInfer's."""
    from sglang.srt.layers.attention import flashinfer_backend as module

    module.BatchPrefillWithPagedKVCacheWrapper = Paged  # type: ignore[attr-defined]
    module.BatchPrefillWithRaggedKVCacheWrapper = Ragged  # type: ignore[attr-defined]
    module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    module.fast_decode_plan = None  # type: ignore[attr-defined]
    module._safe_merge_state = _merge  # type: ignore[attr-defined]
    return module.FlashInferAttnBackend


class Paged:
    """Prefill over slots. A mask of the plan replaces the causal one; a window is the plan's."""

    is_cuda_graph_enabled = False

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def begin_forward(self, *given: Any, custom_mask: Any = None, **named: Any) -> None:
        self._queries, self._keys, self._slots = (each.clone() for each in given[:3])
        self._mask, self._window = custom_mask, named.get("window_left", -1)

    def forward(self, q: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
        return self.forward_return_lse(q, cache, **options)[0]

    def forward_return_lse(
        self,
        q: torch.Tensor,
        cache: Any,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options |= {"window_left": self._window, "mask": self._mask}
        slots = self._slots[: int(self._keys[-1])].long()
        keys, values = (
            buffer[slots].float() * (1.0 if scale is None else scale)
            for buffer, scale in zip(cache, (k_scale, v_scale), strict=True)
        )
        return _attend(q, keys, values, self._queries, self._keys, **options)


class Ragged(Paged):
    """Prefill over the new tokens alone."""

    def begin_forward(self, queries: torch.Tensor, *_: Any, **__: Any) -> None:
        self._queries = queries.clone()

    def forward(self, q: torch.Tensor, *keys_values: Any, **options: Any) -> torch.Tensor:
        return self.forward_return_lse(q, *keys_values, **options)[0]

    def forward_return_lse(  # type: ignore[override]
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _attend(q, k.float(), v.float(), self._queries, self._queries, **options)


class Decode(Paged):
    """One query a row. It owns its slots as in a CUDA graph, since SGLang's are else on "cuda"."""

    is_cuda_graph_enabled = True

    def __init__(self, *_: Any, **__: Any) -> None:
        self._paged_kv_indices_buf = torch.zeros(4096, dtype=torch.int32)

    def begin_forward(self, keys: torch.Tensor, slots: torch.Tensor, *_: Any, **__: Any) -> None:
        super().begin_forward(torch.arange(len(keys)), keys, slots)

    def forward(self, q: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
        return super().forward(q, cache, causal=True, **options)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    *,
    causal: bool,
    sm_scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [tokens, heads, dim]; keys, values: [keys, kv_heads, dim]; mask: rows' [queries, keys] end
    to end. Returns the output and the logarithms of the sums of exponents, [tokens, heads]."""
    out, sums = torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
    group, used = q.shape[1] // keys.shape[1], 0
    bounds = zip(query_ends.tolist(), query_ends[1:].tolist(), strict=False)
    for (begin, end), first, last in zip(
        bounds, key_ends.tolist(), key_ends[1:].tolist(), strict=False
    ):
        if first == last:
            continue
        row_keys, row_values = (
            each[first:last].repeat_interleave(group, 1) for each in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), row_keys) * sm_scale
        if logits_soft_cap > 0:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        position = torch.arange(last - first - (end - begin), last - first)[:, None]
        key = torch.arange(last - first)[None]
        seen = key <= position if causal else torch.ones(end - begin, last - first).bool()
        if window_left >= 0:
            seen &= key >= position - window_left
        if mask is not None:
            count = seen.numel()
            seen = mask[used : used + count].view(seen.shape).bool()
            used += count
        row_values = row_values.where(seen.any(0)[:, None, None], 0.0)  # what is freed is NaN
        scores = scores.where(seen, -torch.inf)
        sums[begin:end] = scores.logsumexp(-1).T
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), row_values)
    return out.to(q.dtype), sums


def _merge(
    out: torch.Tensor, sums: torch.Tensor, other: torch.Tensor, other_sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.logaddexp(sums, other_sums)
    weights = ((each - total).exp()[..., None] for each in (sums, other_sums))
    merged = sum(w * o.float() for w, o in zip(weights, (out, other), strict=True))
    return merged.to(out.dtype), total

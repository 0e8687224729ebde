"""The tensors of one mix, shared by everyone who is measured on it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from sglang_tiered_kernels.pod_attention import PodShape

if TYPE_CHECKING:
    from pod_bench.mixes import Heads, Mix


@dataclass(frozen=True)
class Batch:
    """q: [tokens, q_heads, dim], the prompts' chunks, then the decode rows. k_cache, v_cache:
    [slots, kv_heads, dim], pages of ``shape.page_size`` slots in random order. kv_indptr:
    [rows + 1] int32. kv_indices: [kv tokens] int32, every row's slots from its first token on.
    pages: per row, its pages in order, int32."""

    mix: Mix
    shape: PodShape
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    pages: tuple[torch.Tensor, ...]

    @property
    def sm_scale(self) -> float:
        return float(self.shape.head_dim) ** -0.5

    @property
    def num_prefill_tokens(self) -> int:
        return self.mix.chunk * self.mix.prompts

    @property
    def lengths(self) -> list[int]:
        return [
            new + old for new, old in zip(self.mix.extend_lens, self.mix.prefix_lens, strict=True)
        ]

    def slots(self, row: int, begin: int, end: int) -> torch.Tensor:
        """Of tokens ``begin`` to ``end`` of a row."""
        start = list(accumulate(self.lengths, initial=0))[row]
        return self.kv_indices[start + begin : start + end]

    def empty_out(self) -> torch.Tensor:
        return torch.full_like(self.q, float("nan"))


def make_batch(
    mix: Mix,
    heads: Heads,
    *,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Batch:
    """Random content. Reproducible for one device and seed."""
    generator = torch.Generator(device).manual_seed(seed)
    lengths = [new + old for new, old in zip(mix.extend_lens, mix.prefix_lens, strict=True)]
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator, device=device)
    pages = order.to(torch.int32).split(counts)
    offsets = torch.arange(page_size, device=device, dtype=torch.int32)
    slots = [
        (own[:, None] * page_size + offsets).flatten()[:length]
        for own, length in zip(pages, lengths, strict=True)
    ]

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    num_slots = sum(counts) * page_size
    return Batch(
        mix=mix,
        shape=PodShape(heads.queries, heads.kv, heads.dim, page_size, dtype, dtype),
        q=normal(sum(mix.extend_lens), heads.queries, heads.dim),
        k_cache=normal(num_slots, heads.kv, heads.dim),
        v_cache=normal(num_slots, heads.kv, heads.dim),
        kv_indptr=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        kv_indices=torch.cat(slots),
        pages=tuple(pages),
    )

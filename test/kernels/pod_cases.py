"""Batches for the POD attention tests: scattered pages, and NaN wherever nothing may be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_tiered_kernels.pod_attention import (
    PodConfig,
    PodPlan,
    PodShape,
    make_plan,
    pod_attention,
    reference_pod_attention,
)

PADDING = 3
# Small tiles, so that a few tokens make many of them.
SMALL = PodConfig("small", block_m=32, block_n=32, block_n_decode=32, split_len=64)
# Of float64, relative to the largest output: p is rounded to the query's dtype before the second
# product, and the result once more (the interpreter truncates to bfloat16).
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def shape_of(
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    page_size: int = 1,
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype | None = None,
) -> PodShape:
    return PodShape(*heads, head_dim, page_size, dtype, kv_dtype or dtype)


@dataclass
class Case:
    """extend_lens, prefix_lens: per row. The tensors are those of ``pod_attention``; ``out`` is
    NaN. q and out have ``PADDING`` tokens beyond the batch's, NaN too."""

    shape: PodShape
    extend_lens: list[int]
    prefix_lens: list[int]
    window: int
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor

    def plan(self, config: PodConfig = SMALL, num_sms: int = 3) -> PodPlan:
        more: Any = {"num_sms": num_sms, "window": self.window, "config": config}
        return make_plan(
            self.extend_lens, self.prefix_lens, self.shape, device=self.q.device, **more
        )

    def to(self, device: str) -> Case:
        tensors = {name: each for name, each in vars(self).items() if torch.is_tensor(each)}
        return replace(self, **{name: each.to(device) for name, each in tensors.items()})

    def run(self, plan: PodPlan, **options: Any) -> torch.Tensor:
        self.out.fill_(math.nan)
        self.launch(plan, **options)
        return self.out[: plan.num_tokens]

    def launch(self, plan: PodPlan, **options: Any) -> None:
        options.setdefault("sm_scale", self.shape.head_dim**-0.5)
        tensors = (self.q, self.k_cache, self.v_cache, self.out, self.kv_indptr, self.kv_indices)
        pod_attention(*tensors, plan, **options)

    def expected(self, **options: Any) -> torch.Tensor:
        options = {"sm_scale": self.shape.head_dim**-0.5, "window": self.window, **options}
        tensors = (self.q, self.k_cache, self.v_cache, self.kv_indptr, self.kv_indices)
        return reference_pod_attention(*tensors, self.extend_lens, self.prefix_lens, **options)


def make_case(
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    shape: PodShape | None = None,
    *,
    window: int = -1,
    seed: int = 0,
) -> Case:
    """Pages in random order with as many dead ones between them. Slots that a row does not use, and
    those behind every query's window, hold NaN; the latter's indices point beyond the cache."""
    shape = shape or shape_of()
    generator = torch.Generator().manual_seed(seed)
    lengths = [e + p for e, p in zip(extend_lens, prefix_lens, strict=True)]
    pages = [-(-length // shape.page_size) for length in lengths]
    order = torch.randperm(2 * sum(pages) + 2, generator=generator)
    kv_heads = (shape.num_kv_heads, shape.head_dim)
    num_slots = len(order) * shape.page_size
    caches = [torch.full((num_slots, *kv_heads), math.nan) for _ in range(2)]
    indices, used = [], 0
    for length, prefix, count in zip(lengths, prefix_lens, pages, strict=True):
        own = order[used : used + count]
        used += count
        slots = own[:, None] * shape.page_size + torch.arange(shape.page_size)
        slots = slots.flatten()[:length]
        unseen = max(0, prefix - window) if window >= 0 else 0
        for cache in caches:
            cache[slots[unseen:]] = torch.randn(length - unseen, *kv_heads, generator=generator)
        slots[:unseen] = 10 * num_slots
        indices.append(slots)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tokens = sum(extend_lens)
    q = torch.randn(tokens + PADDING, shape.num_q_heads, shape.head_dim, generator=generator)
    q[tokens:] = math.nan
    return Case(
        shape,
        list(extend_lens),
        list(prefix_lens),
        window,
        q.to(shape.q_dtype),
        caches[0].to(shape.kv_dtype),
        caches[1].to(shape.kv_dtype),
        torch.full_like(q, math.nan).to(shape.q_dtype),
        starts.int(),
        torch.cat([*indices, torch.zeros(0, dtype=torch.int64)]),
    )


def sinks_of(shape: PodShape) -> torch.Tensor:
    return torch.linspace(-3, 3, shape.num_q_heads)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    atol = TOLERANCE[actual.dtype] * scale
    torch.testing.assert_close(actual.double(), expected, atol=atol, rtol=0)

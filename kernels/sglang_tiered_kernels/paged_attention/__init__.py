"""Attention over a paged KV cache: pure PyTorch, for CPUs and as the oracle of faster kernels."""

from __future__ import annotations

from sglang_tiered_kernels.paged_attention.reference import (
    DecodePlan,
    decode,
    extend,
    plan_decode,
)

__all__ = ["DecodePlan", "decode", "extend", "plan_decode"]

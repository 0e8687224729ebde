"""Fused prefill and decode attention over a paged KV cache (POD-Attention, arXiv 2410.18038)."""

from __future__ import annotations

from sglang_tiered_kernels.pod_attention.heuristics import CONFIGS, PodConfig
from sglang_tiered_kernels.pod_attention.interface import pod_attention, warm_up
from sglang_tiered_kernels.pod_attention.plan import PodPlan, is_decode_row, make_plan
from sglang_tiered_kernels.pod_attention.reference import reference_pod_attention
from sglang_tiered_kernels.pod_attention.shape import PodShape, Roles, Schedule, supports

__all__ = [
    "CONFIGS",
    "PodConfig",
    "PodPlan",
    "PodShape",
    "Roles",
    "Schedule",
    "is_decode_row",
    "make_plan",
    "pod_attention",
    "reference_pod_attention",
    "supports",
    "warm_up",
]

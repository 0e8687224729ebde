"""Short causal convolutions over sequences with a state each: pure PyTorch, for CPUs."""

from __future__ import annotations

from sglang_tiered_kernels.causal_conv.reference import convolve, convolve_step

__all__ = ["convolve", "convolve_step"]

"""Rotary position embeddings (RoPE, arXiv 2104.09864) of queries and keys in one launch."""

from __future__ import annotations

from sglang_tiered_kernels.rotary.triton_kernel import rotate

__all__ = ["rotate"]

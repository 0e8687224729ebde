"""Copies of KV pages between a paged pool and contiguous slabs."""

from __future__ import annotations

from sglang_tiered_kernels.page_copy.interface import PagedPool, SlabLayout, gather, scatter

__all__ = ["PagedPool", "SlabLayout", "gather", "scatter"]

"""Copies of KV pages between a paged pool and contiguous slabs."""

from __future__ import annotations

from sglang_tiered_kernels.page_copy.interface import Band, PagedPool, SlabLayout, gather, scatter

__all__ = ["Band", "PagedPool", "SlabLayout", "gather", "scatter"]

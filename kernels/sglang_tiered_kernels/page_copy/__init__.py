"""Copies of KV pages between paged pools, and between a pool and contiguous slabs."""

from __future__ import annotations

from sglang_tiered_kernels.page_copy.interface import (
    Band,
    PagedPool,
    copy_between,
    gather,
    scatter,
    warm_up,
)

__all__ = ["Band", "PagedPool", "copy_between", "gather", "scatter", "warm_up"]

"""Page copies by PyTorch's index operations: the path of CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def gather_pages(buffers: Sequence[torch.Tensor], pages: torch.Tensor, slab: torch.Tensor) -> None:
    """buffers: [pool pages, rows, bytes] each. pages: [n]. slab: [buffers, n, rows, bytes],
    contiguous. Raises IndexError for a page beyond the pool."""
    for buffer, target in zip(buffers, slab, strict=True):
        torch.index_select(buffer, 0, pages, out=target)


def scatter_pages(slab: torch.Tensor, pages: torch.Tensor, buffers: Sequence[torch.Tensor]) -> None:
    """Copy a slab to pages of the buffers: the inverse of ``gather_pages``. Raises IndexError for a
    page beyond the pool, after partial writes."""
    pages = pages.long()
    for source, buffer in zip(slab, buffers, strict=True):
        buffer.index_copy_(0, pages, source)

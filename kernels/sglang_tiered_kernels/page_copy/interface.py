"""Copies of KV pages between a paged pool and contiguous slabs, as bytes.

A pool is a list of buffers (keys and values of every layer) that share slot numbers; a slab holds
the same pages without gaps, ready to be sent or stored in one piece. On a GPU one launch copies all
buffers; a CPU takes PyTorch's index operations.
"""

from __future__ import annotations

import enum
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_tiered_kernels.page_copy import reference

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Band", "PagedPool", "SlabLayout", "gather", "scatter"]


class SlabLayout(enum.Enum):
    """The order of a slab's first two dimensions."""

    PAGE_FIRST = "page_first"  # [pages, buffers, page_bytes]: a page of all layers in one piece
    BUFFER_FIRST = "buffer_first"  # [buffers, pages, page_bytes]: a layer of all pages in one piece


@dataclass(frozen=True)
class Band:
    """Bytes [low, high) of each ``row_bytes`` of a page: some heads of every token."""

    row_bytes: int
    low: int
    high: int


class PagedPool:
    """The buffers of a paged KV cache. Borrows them; they must stay where they are.

    buffers: [slots, ...] tensors, contiguous, on one device, with equal bytes per slot; keys and
        values of every layer in the order the slab is to have. page_size: slots of a page, which
        divides the slots; 1 to copy token rows. band: what is copied of each page; all by default.
    Raises ValueError for buffers that differ or are not contiguous, a page size that does not
    divide them, or a band that is none of a page.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], page_size: int, band: Band | None = None
    ) -> None:
        if not buffers:
            raise ValueError("a pool of no buffers; give the keys and values of at least one layer")
        first = buffers[0]
        for place, buffer in enumerate(buffers):
            if not buffer.is_contiguous() or buffer.ndim < 2:
                raise ValueError(
                    f"buffer {place} with shape {list(buffer.shape)} and strides "
                    f"{list(buffer.stride())} is not [slots, ...] in one piece; pass it contiguous"
                )
            if (buffer.device, buffer.shape[0], buffer.nbytes) != (
                first.device,
                first.shape[0],
                first.nbytes,
            ):
                raise ValueError(
                    f"buffer {place} has {buffer.shape[0]} slots in {buffer.nbytes} bytes on "
                    f"{buffer.device} and buffer 0 {first.shape[0]} in {first.nbytes} on "
                    f"{first.device}; make a pool for each kind"
                )
        if page_size < 1 or first.shape[0] % page_size:
            raise ValueError(
                f"pages of {page_size} slots do not divide {first.shape[0]} slots; "
                "pass the page size of the pool's allocator"
            )
        page_bytes = page_size * first.nbytes // max(1, first.shape[0])
        band = Band(page_bytes, 0, page_bytes) if band is None else band
        if not 0 <= band.low < band.high <= band.row_bytes or page_bytes % band.row_bytes:
            raise ValueError(
                f"bytes {band.low} to {band.high} of rows of {band.row_bytes} are no part of "
                f"pages of {page_bytes} bytes; pass the bytes of a token and a range in them"
            )
        self.page_size = page_size
        self.num_pages = first.shape[0] // page_size
        self.band = band
        self.num_rows = page_bytes // band.row_bytes  # of a page
        # Bytes that are copied of a page.
        self.page_bytes = self.num_rows * (band.high - band.low)
        self.device = first.device
        # [pages, rows, bytes] uint8 views.
        self.buffers = [
            buffer.view(torch.uint8).view(self.num_pages, self.num_rows, band.row_bytes)[
                :, :, band.low : band.high
            ]
            for buffer in buffers
        ]
        # [buffers] int64, where each begins, for a kernel that reads them all.
        addresses = [buffer.data_ptr() + band.low for buffer in buffers]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        # Bytes that divide every row's address and length, up to the widest load.
        self.alignment = math.gcd(16, band.row_bytes, band.high - band.low, *addresses)

    def slab_shape(
        self, num_pages: int, layout: SlabLayout = SlabLayout.PAGE_FIRST
    ) -> tuple[int, int, int]:
        """The shape of a slab, uint8, for this many pages."""
        if layout is SlabLayout.PAGE_FIRST:
            return num_pages, len(self.buffers), self.page_bytes
        return len(self.buffers), num_pages, self.page_bytes


def gather(
    pool: PagedPool,
    pages: torch.Tensor,
    slab: torch.Tensor,
    layout: SlabLayout = SlabLayout.PAGE_FIRST,
) -> None:
    """Copy pages of the pool, in the order of ``pages``, to the slab.

    pages: [n] int32 or int64, page numbers (slot // page_size) on the pool's device, each below
    ``num_pages``; a GPU does not check that. slab: uint8, contiguous, of ``slab_shape``, and
    overwritten. In stream order; nothing waits.
    Raises ValueError for a slab or pages that do not fit.
    """
    _copy(pool, pages, slab, layout, to_slab=True)


def scatter(
    slab: torch.Tensor,
    pages: torch.Tensor,
    pool: PagedPool,
    layout: SlabLayout = SlabLayout.PAGE_FIRST,
) -> None:
    """Copy a slab to pages of the pool; the inverse of ``gather``, with the same arguments. Pages
    must be distinct, and no others are touched."""
    _copy(pool, pages, slab, layout, to_slab=False)


def _copy(
    pool: PagedPool, pages: torch.Tensor, slab: torch.Tensor, layout: SlabLayout, *, to_slab: bool
) -> None:
    if pages.ndim != 1 or pages.dtype not in {torch.int32, torch.int64}:
        raise ValueError(
            f"pages is {list(pages.shape)} {pages.dtype}; give one dimension of int32 or int64"
        )
    shape = pool.slab_shape(len(pages), layout)
    if slab.shape != shape or slab.dtype != torch.uint8 or not slab.is_contiguous():
        raise ValueError(
            f"the slab is {list(slab.shape)} {slab.dtype}; {len(pages)} pages need "
            f"{list(shape)} torch.uint8, contiguous"
        )
    if pages.device != pool.device or slab.device != pool.device:
        raise ValueError(
            f"pages on {pages.device} and a slab on {slab.device}; the pool is on {pool.device}"
        )
    if not len(pages):
        return
    if pool.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        by_buffer = slab.transpose(0, 1) if layout is SlabLayout.PAGE_FIRST else slab
        by_buffer = by_buffer.view(*by_buffer.shape[:2], pool.num_rows, -1)
        if to_slab:
            reference.gather_pages(pool.buffers, pages, by_buffer)
        else:
            reference.scatter_pages(by_buffer, pages, pool.buffers)
        return
    # A machine without Triton imports this package and gets the path above.
    from sglang_tiered_kernels.page_copy import triton_kernel  # noqa: PLC0415

    triton_kernel.copy_pages(
        pool.addresses,
        pages,
        slab,
        alignment=pool.alignment,
        num_rows=pool.num_rows,
        row_bytes=pool.band.high - pool.band.low,
        pitch_bytes=pool.band.row_bytes,
        page_first=layout is SlabLayout.PAGE_FIRST,
        to_slab=to_slab,
    )

"""Copies of KV pages between paged pools, and between a pool and contiguous slabs, as bytes.

A pool is a list of buffers (keys and values of every layer) that share slot numbers; a slab holds
the same pages without gaps, ready to be sent or stored in one piece. On a GPU one launch copies all
buffers; a CPU takes PyTorch's index operations.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    Rows = npt.NDArray[np.uint8]

# Copying row by row costs more than a gathered copy below this size, and less above it.
_LARGE_ROW_BYTES = 4096


@dataclass(frozen=True)
class Band:
    """Bytes [low, high) of each ``row_bytes`` of a page: some heads of every token."""

    row_bytes: int
    low: int
    high: int


class PagedPool:
    """The buffers of a paged KV cache. Borrows them; they must stay where they are.

    buffers: [pages, ...] tensors, contiguous, on one device, with equal bytes per page; keys and
        values of every layer in the order the slab is to have. band: what is copied of each page;
        all by default.
    Raises ValueError for buffers that differ or are not contiguous, or a band that is none of a
    page.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], band: Band | None = None) -> None:
        if not buffers:
            raise ValueError("a pool of no buffers; give the keys and values of at least one layer")
        first = buffers[0]
        for place, buffer in enumerate(buffers):
            if not buffer.is_contiguous() or buffer.ndim < 2:
                raise ValueError(
                    f"buffer {place} with shape {list(buffer.shape)} and strides "
                    f"{list(buffer.stride())} is not [pages, ...] in one piece; pass it contiguous"
                )
            if (buffer.device, buffer.shape[0], buffer.nbytes) != (
                first.device,
                first.shape[0],
                first.nbytes,
            ):
                raise ValueError(
                    f"buffer {place} has {buffer.shape[0]} pages in {buffer.nbytes} bytes on "
                    f"{buffer.device} and buffer 0 {first.shape[0]} in {first.nbytes} on "
                    f"{first.device}; make a pool for each kind"
                )
        page_bytes = first.nbytes // max(1, first.shape[0])
        band = Band(page_bytes, 0, page_bytes) if band is None else band
        if not 0 <= band.low < band.high <= band.row_bytes or page_bytes % band.row_bytes:
            raise ValueError(
                f"bytes {band.low} to {band.high} of rows of {band.row_bytes} are no part of "
                f"pages of {page_bytes} bytes; pass the bytes of a token and a range in them"
            )
        self.num_pages = first.shape[0]
        self.num_rows = page_bytes // band.row_bytes  # of a page
        self.row_bytes = band.high - band.low
        # Bytes that are copied of a page.
        self.page_bytes = self.num_rows * self.row_bytes
        self.device = first.device
        # [pages, rows, bytes] uint8 views.
        self.buffers = [
            buffer.view(torch.uint8).view(self.num_pages, self.num_rows, band.row_bytes)[
                :, :, band.low : band.high
            ]
            for buffer in buffers
        ]
        # [buffers] int64, where each begins, for a kernel that reads them all.
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self.row_pitch = band.row_bytes
        # Bytes that divide every row's address and length, up to the widest load.
        self.alignment = math.gcd(16, band.row_bytes, self.row_bytes, *addresses)

    def slab_shape(self, num_pages: int) -> tuple[int, int, int]:
        """The shape of a slab, uint8, for this many pages: a buffer's pages in one piece."""
        return len(self.buffers), num_pages, self.page_bytes


def gather(pool: PagedPool, pages: torch.Tensor, slab: torch.Tensor) -> None:
    """Copy pages of the pool, in the order of ``pages``, to the slab.

    pages: [n] int32 or int64, page numbers on the pool's device, each below ``num_pages``; a GPU
    does not check that, and a CPU raises IndexError. slab: uint8, contiguous, of ``slab_shape``,
    and overwritten. In stream order; nothing waits. Raises ValueError for a slab or pages that do
    not fit.
    """
    _copy(pool, pages, slab, to_slab=True)


def scatter(slab: torch.Tensor, pages: torch.Tensor, pool: PagedPool) -> None:
    """Copy a slab to pages of the pool; the inverse of ``gather``, with the same arguments. Pages
    must be distinct, and no others are touched."""
    _copy(pool, pages, slab, to_slab=False)


def _copy(pool: PagedPool, pages: torch.Tensor, slab: torch.Tensor, *, to_slab: bool) -> None:
    if pages.ndim != 1 or pages.dtype not in {torch.int32, torch.int64}:
        raise ValueError(
            f"pages is {list(pages.shape)} {pages.dtype}; give one dimension of int32 or int64"
        )
    shape = pool.slab_shape(len(pages))
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
    if not by_kernel(pool.device):
        by_row = slab.view(*slab.shape[:2], pool.num_rows, -1)
        for buffer, part in zip(pool.buffers, by_row, strict=True):
            if to_slab:
                torch.index_select(buffer, 0, pages, out=part)
            else:
                buffer.index_copy_(0, pages.long(), part)
        return
    _run(pool, pages, slab, to_slab=to_slab)


def warm_up(pool: PagedPool) -> None:
    """Compile what ``gather`` and ``scatter`` of this pool launch with int32 pages, so that no copy
    waits for a compiler. Touches no page. Takes a second the first time on a machine; nothing where
    copies need no kernel. A slab that is not a multiple of 16 bytes away from one is not foreseen.
    """
    if not by_kernel(pool.device) or os.environ.get("TRITON_INTERPRET") == "1":
        return
    pages = torch.empty(1, dtype=torch.int32, device=pool.device)
    slab = torch.empty(pool.slab_shape(1), dtype=torch.uint8, device=pool.device)
    for to_slab in (True, False):
        _run(pool, pages, slab, to_slab=to_slab, only_compile=True)


def _run(
    pool: PagedPool,
    pages: torch.Tensor,
    slab: torch.Tensor,
    *,
    to_slab: bool,
    only_compile: bool = False,
) -> None:
    # A machine without Triton imports this package, and copies without it.
    from sglang_tiered_kernels.page_copy import triton_kernel  # noqa: PLC0415

    row_pitch = pool.row_pitch
    paged = triton_kernel.Side(
        pool.addresses, pages, pool.num_rows * row_pitch, row_pitch, pool.alignment
    )
    contiguous = triton_kernel.Side(
        slab,
        None,
        page_pitch=pool.page_bytes,
        row_pitch=pool.row_bytes,
        alignment=math.gcd(16, slab.data_ptr(), pool.row_bytes),
        buffer_pitch=len(pages) * pool.page_bytes,
    )
    triton_kernel.copy_rows(
        *((paged, contiguous) if to_slab else (contiguous, paged)),
        num_pages=len(pages),
        num_buffers=len(pool.buffers),
        num_rows=pool.num_rows,
        row_bytes=pool.row_bytes,
        only_compile=only_compile,
    )


def copy_between(
    sources: Sequence[torch.Tensor],
    of: Sequence[int],
    targets: Sequence[torch.Tensor],
    to: Sequence[int],
    *,
    device: torch.device,
    max_blocks: int | None = None,
) -> None:
    """Copy pages ``of`` each source to pages ``to`` of its target, by one launch on ``device``.

    sources, targets: [pages, bytes] uint8, pages in one piece, on one side all of one shape and
    strides. Memory of the host that a GPU copies must be registered with CUDA. of, to: page
    numbers, as many of one as of the other, those of ``to`` distinct; a GPU does not check them.
    They are read before this returns. max_blocks: thread blocks of the launch at most, where
    something else than the device's memory limits the copy and the rest of the device is wanted.
    In stream order; nothing waits. Raises ValueError for views that differ.
    """
    kinds = {(len(views), *views[0].shape[1:], len(numbers)) for views, numbers in
             ((sources, of), (targets, to))}  # fmt: skip
    for views in (sources, targets):
        for view in views:
            if view.ndim != 2 or view.dtype != torch.uint8 or view.stride(1) != 1:
                raise ValueError(
                    f"a view of {view.dtype}, {list(view.shape)} with strides "
                    f"{list(view.stride())}; give [pages, bytes] of torch.uint8, pages in one piece"
                )
            if (view.shape, view.stride()) != (views[0].shape, views[0].stride()):
                raise ValueError(
                    f"views of {list(views[0].shape)} and {list(view.shape)} on one side; copy "
                    "each kind by itself"
                )
    if len(kinds) != 1:
        raise ValueError(
            f"(views, bytes of a page, pages) are {sorted(kinds)} on the two sides; give as many "
            "of one as of the other"
        )
    if not len(of):
        return
    if not by_kernel(device):
        for source, target in zip(sources, targets, strict=True):
            _copy_rows(target.numpy(), to, source.numpy(), of)
        return
    from sglang_tiered_kernels.page_copy import triton_kernel  # noqa: PLC0415

    addresses = [view.data_ptr() for view in (*sources, *targets)]
    # One copy to the device: pinned, since nothing may wait for it.
    table = torch.tensor(
        [*addresses, *of, *to], dtype=torch.int64, pin_memory=device.type == "cuda"
    ).to(device, non_blocking=True)
    num_buffers, num_pages, page_bytes = len(sources), len(of), sources[0].shape[1]
    ends = 0, num_buffers, 2 * num_buffers, 2 * num_buffers + num_pages, len(table)
    parts = [table[begin:end] for begin, end in pairwise(ends)]
    sides = [
        triton_kernel.Side(memory, pages, pitch, page_bytes, math.gcd(16, pitch, *addresses))
        for memory, pages, pitch in (
            (parts[0], parts[2], sources[0].stride(0)),
            (parts[1], parts[3], targets[0].stride(0)),
        )
    ]
    triton_kernel.copy_rows(
        *sides,
        num_pages=num_pages,
        num_buffers=num_buffers,
        num_rows=1,
        row_bytes=page_bytes,
        max_blocks=max_blocks,
    )


def _copy_rows(target: Rows, to: Sequence[int], source: Rows, of: Sequence[int]) -> None:
    """Assign ``target[to] = source[of]`` on the calling thread.

    PyTorch divides such a copy among the threads of a forward pass, and waiting for them takes
    several times as long as the copy. 12 MB took 10 ms in a server on two cores, where one thread
    alone takes 1.4 to 2.7 ms.
    """
    if source.shape[1] >= _LARGE_ROW_BYTES:
        for to_row, of_row in zip(to, of, strict=True):
            target[to_row] = source[of_row]
    else:
        target[to] = source[of]


def by_kernel(device: torch.device) -> bool:
    return device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"

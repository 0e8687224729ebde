"""One launch that copies pages of all buffers of a pool to a slab, or back."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

__all__ = ["copy_pages", "page_copy_kernel"]

# Bytes of a thread block: each of its 128 threads has four loads of 16 bytes in flight.
_BLOCK_BYTES = 8192
# Bytes of an element, and Triton's and PyTorch's names for it.
_ELEMENTS = {
    8: (tl.int64, torch.int64),
    4: (tl.int32, torch.int32),
    2: (tl.int16, torch.int16),
    1: (tl.int8, torch.int8),
}


@triton.jit(
    do_not_specialize=["num_pages", "num_buffers", "num_rows"],
    do_not_specialize_on_alignment=["pages"],
)
def page_copy_kernel(
    addresses,  # [buffers] int64
    pages,  # [num_pages]
    slab,  # of ELEMENT
    num_pages,
    num_buffers,
    num_rows,  # of a page
    row_elements,
    pitch_elements,  # from a row of the pool to the next
    TO_SLAB: tl.constexpr,
    PAGE_FIRST: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,  # addresses are multiples of 16 bytes
    BLOCK: tl.constexpr,
):
    """Grid [pages * rows * blocks of a row, buffers]: neighbours read one page from end to end."""
    blocks = tl.cdiv(row_elements, BLOCK)
    line = (tl.program_id(0) // blocks).to(tl.int64)
    buffer = tl.program_id(1).to(tl.int64)
    place = line // num_rows
    offsets = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    live = offsets < row_elements
    row = tl.load(pages + place).to(tl.int64) * num_rows + line % num_rows
    pool = tl.load(addresses + buffer).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        pool = tl.multiple_of(pool, 16)
    pool_at = pool + row * pitch_elements + offsets
    if PAGE_FIRST:
        line = (place * num_buffers + buffer) * num_rows + line % num_rows
    else:
        line += buffer * num_pages * num_rows
    slab_at = slab + line * row_elements + offsets
    if TO_SLAB:
        tl.store(slab_at, tl.load(pool_at, mask=live), mask=live)
    else:
        tl.store(pool_at, tl.load(slab_at, mask=live), mask=live)


def copy_pages(
    addresses: torch.Tensor,
    pages: torch.Tensor,
    slab: torch.Tensor,
    *,
    alignment: int,
    num_rows: int,
    row_bytes: int,
    pitch_bytes: int,
    page_first: bool,
    to_slab: bool,
) -> None:
    """addresses: [buffers] int64 on the device. pages: [n], n above 0. slab: uint8, contiguous.
    Of each page ``num_rows`` rows of ``row_bytes``, ``pitch_bytes`` apart. alignment: bytes, a
    power of two up to 16 that divides the addresses, ``row_bytes`` and ``pitch_bytes``."""
    alignment = math.gcd(alignment, slab.data_ptr(), slab.storage_offset())
    width = min(alignment, 8)
    element, dtype = _ELEMENTS[width]
    row_elements = row_bytes // width
    # No larger than a row, so that small rows do not leave threads idle.
    block = min(_BLOCK_BYTES // width, triton.next_power_of_2(row_elements))
    grid = (len(pages) * num_rows * triton.cdiv(row_elements, block), len(addresses))
    page_copy_kernel[grid](
        addresses,
        pages,
        slab.view(dtype),
        len(pages),
        len(addresses),
        num_rows,
        row_elements,
        pitch_bytes // width,
        TO_SLAB=to_slab,
        PAGE_FIRST=page_first,
        ELEMENT=element,
        ALIGNED=alignment == 16,
        BLOCK=block,
        num_warps=4,
    )

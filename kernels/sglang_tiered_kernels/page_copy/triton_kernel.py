"""One launch that copies pages of all buffers between two places."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Bytes of a step: each of a block's 128 threads has four loads of 16 bytes in flight.
_STEP_BYTES = 8192
# Bytes of an element, and Triton's and PyTorch's names for it.
_ELEMENTS = {
    8: (tl.int64, torch.int64),
    4: (tl.int32, torch.int32),
    2: (tl.int16, torch.int16),
    1: (tl.int8, torch.int8),
}


@dataclass(frozen=True)
class Side:
    """Where pages lie. memory: [buffers] int64 addresses on the device where ``pages`` names the
    pages, [n] int32 or int64, there too; without ``pages`` the uint8 memory itself, which holds
    page after page. Pitches are in bytes, from one page, buffer or row of a page to the next;
    ``buffer_pitch`` is read only where there are no addresses. alignment: bytes, a power of two up
    to 16 that divides all addresses and pitches."""

    memory: torch.Tensor
    pages: torch.Tensor | None
    page_pitch: int
    row_pitch: int
    alignment: int
    buffer_pitch: int = 0


@triton.jit
def _row(
    memory,
    pages,
    pitches,  # of pages, rows and buffers, in elements
    place,
    row,
    buffer,
    PAGED: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The first element of a row of a page."""
    page_pitch, row_pitch, buffer_pitch = pitches
    if PAGED:
        start = tl.load(memory + buffer).to(tl.pointer_type(ELEMENT))
        start += tl.load(pages + place).to(tl.int64) * page_pitch + row * row_pitch
    else:
        start = memory + (buffer * buffer_pitch + place * page_pitch + row * row_pitch)
    return tl.multiple_of(start, 16) if ALIGNED else start


# Nothing that changes from call to call is specialised on, so a warm server never compiles. The
# length of a row is a pool's own.
@triton.jit(
    do_not_specialize=[
        *("num_pages", "num_buffers", "num_rows"),
        *("source_page_pitch", "source_row_pitch", "source_buffer_pitch"),
        *("target_page_pitch", "target_row_pitch", "target_buffer_pitch"),
    ],
    do_not_specialize_on_alignment=["source", "of", "target", "to"],
)
def page_copy_kernel(
    source,
    of,  # [num_pages], or anything where the source is not paged
    target,
    to,
    num_pages,
    num_buffers,
    num_rows,  # of a page
    row_elements,
    source_page_pitch,
    source_row_pitch,
    source_buffer_pitch,
    target_page_pitch,
    target_row_pitch,
    target_buffer_pitch,
    SOURCE_PAGED: tl.constexpr,
    TARGET_PAGED: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,  # every row begins at a multiple of 16 bytes
    BLOCK: tl.constexpr,
):
    """Grid [blocks], which share the steps in turn: neighbours read one page from end to end."""
    steps = tl.cdiv(row_elements, BLOCK)
    per_buffer = num_pages * num_rows * steps
    for item in range(tl.program_id(0), per_buffer * num_buffers, tl.num_programs(0)):
        buffer = (item // per_buffer).to(tl.int64)
        line = item % per_buffer // steps
        place = (line // num_rows).to(tl.int64)
        row = (line % num_rows).to(tl.int64)
        offsets = item % steps * BLOCK + tl.arange(0, BLOCK)
        live = offsets < row_elements
        source_row = _row(
            source, of, (source_page_pitch, source_row_pitch, source_buffer_pitch),
            place, row, buffer, SOURCE_PAGED, ELEMENT, ALIGNED,
        )  # fmt: skip
        target_row = _row(
            target, to, (target_page_pitch, target_row_pitch, target_buffer_pitch),
            place, row, buffer, TARGET_PAGED, ELEMENT, ALIGNED,
        )  # fmt: skip
        tl.store(target_row + offsets, tl.load(source_row + offsets, mask=live), mask=live)


def copy_rows(
    source: Side,
    target: Side,
    *,
    num_pages: int,
    num_buffers: int,
    num_rows: int,
    row_bytes: int,
    max_blocks: int | None = None,
    only_compile: bool = False,
) -> None:
    """Of each page ``num_rows`` rows of ``row_bytes``. max_blocks: thread blocks that share the
    work; by default one a step, which is the whole device. only_compile: launch nothing."""
    alignment = math.gcd(16, source.alignment, target.alignment, row_bytes)
    width = min(alignment, 8)
    element, dtype = _ELEMENTS[width]
    row_elements = row_bytes // width
    # No larger than a row, so that small rows do not leave threads idle.
    block = min(_STEP_BYTES // width, triton.next_power_of_2(row_elements))
    steps = num_buffers * num_pages * num_rows * triton.cdiv(row_elements, block)
    blocks = steps if max_blocks is None else min(steps, max_blocks)
    memories = [
        (side.memory, side.pages) if side.pages is not None else (side.memory.view(dtype),) * 2
        for side in (source, target)
    ]
    pitches = [
        pitch // width
        for side in (source, target)
        for pitch in (side.page_pitch, side.row_pitch, side.buffer_pitch)
    ]
    page_copy_kernel.run(
        *memories[0],
        *memories[1],
        num_pages,
        num_buffers,
        num_rows,
        row_elements,
        *pitches,
        SOURCE_PAGED=source.pages is not None,
        TARGET_PAGED=target.pages is not None,
        ELEMENT=element,
        ALIGNED=alignment == 16,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=True,  # said, since the default is about to change
        grid=(blocks,),
        warmup=only_compile,
    )

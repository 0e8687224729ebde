"""Cuts a chunk of pages into slabs: contiguous payloads of about a mebibyte, one per message.

A frame of 1 MiB costs libzmq the least time per byte; smaller ones cost more CPU, larger ones more
page faults. A slab holds at least 128 tokens of each of its buffers, or a mebibyte of one, so that
small pages do not become small copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MIN_SLAB_TOKENS", "TARGET_SLAB_BYTES", "SlabSpec", "cut_slabs"]

TARGET_SLAB_BYTES = 1 << 20
MIN_SLAB_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SlabSpec:
    """Pages [start, start + num_pages) of the chunk, of pairs [first_pair, + num_pairs)."""

    first_pair: int
    num_pairs: int
    start: int
    num_pages: int
    num_bytes: int


def cut_slabs(
    num_pages: int,
    page_bytes: Sequence[int],
    page_size: int,
    target_bytes: int = TARGET_SLAB_BYTES,
) -> Iterator[SlabSpec]:
    """Slabs that cover every page of every pair once. ``page_bytes``: of each pair."""
    if not num_pages or not page_bytes:
        return
    tokens = -(-MIN_SLAB_TOKENS // page_size)
    run = min(num_pages, max(1, min(tokens, target_bytes // max(page_bytes))))
    whole_page = sum(page_bytes)
    if run * whole_page <= target_bytes:  # all buffers fit: lengthen the run instead
        run = min(num_pages, max(run, target_bytes // whole_page))
    for start in range(0, num_pages, run):
        pages = min(run, num_pages - start)
        first = 0
        while first < len(page_bytes):
            end, size = first + 1, pages * page_bytes[first]
            while end < len(page_bytes) and size + pages * page_bytes[end] <= target_bytes:
                size += pages * page_bytes[end]
                end += 1
            yield SlabSpec(first, end - first, start, pages, size)
            first = end

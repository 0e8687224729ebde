"""Keeps the memory that a forward pass frees in the process, on a machine without a GPU.

A prefill allocates and frees megabytes per layer. glibc returns freed blocks to the kernel once
they pass thresholds that it adjusts by itself, depending on what else the process has freed. One
server kept its memory, and the next, with the same model, took 14,000 page faults (40 ms of a
prefill of 1,536 tokens) per request. With the thresholds set, it took 40.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

# Parameters of mallopt(3).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

KEPT_BYTES = 256 << 20  # free memory at the end of the heap that stays with the process
MAX_HEAP_BLOCK_BYTES = 32 << 20  # glibc's own upper bound; larger blocks are mapped one by one


def keep_freed_memory() -> bool:
    """Set the thresholds for this process. Returns whether its C library has them."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    is_mapped_late: int = mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES)
    is_kept: int = mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    return bool(is_mapped_late and is_kept)

"""SGLang's host pages as the engine sees them: 32-byte keys, and views of the pool's memory."""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import PoolName

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from sglang_tiered.storage.base import Page

__all__ = ["engine_keys", "page_segments", "pool_label"]


def pool_label(name: Any) -> str:
    return str(getattr(name, "value", name))


def engine_keys(pool: PoolName, hashes: Sequence[str]) -> list[bytes]:
    """Engine keys of SGLang's page hashes: the KV pool's are the hashes themselves, another
    pool's are derived from them, so that one log holds all pools of a page."""
    digests = [bytes.fromhex(text) for text in hashes]
    if pool == PoolName.KV:
        return digests
    label = pool_label(pool).encode()
    return [hashlib.sha256(label + b"\0" + digest).digest() for digest in digests]


def page_segments(pool: Any, host_indices: torch.Tensor, num_pages: int) -> tuple[Page, ...]:
    """Views of the host pool's memory, one tuple of segments per page; nothing is copied.

    Valid as long as the pool is: SGLang frees pools only after ``close``.
    """
    pointers, sizes = pool.get_page_buffer_meta(host_indices)
    assert len(pointers) % num_pages == 0, (len(pointers), num_pages)
    per_page = len(pointers) // num_pages
    segments = [
        memoryview((ctypes.c_char * size).from_address(pointer)).cast("B")
        for pointer, size in zip(pointers, sizes, strict=True)
    ]
    return tuple(
        tuple(segments[page * per_page : (page + 1) * per_page]) for page in range(num_pages)
    )

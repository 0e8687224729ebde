"""Host pools as SGLang's storage sees them, without an SGLang around them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

PAGE_SIZE = 4


@dataclass
class Pool:
    """K and V halves, pages first."""

    buffer: torch.Tensor  # [2, pages, bytes] uint8
    page_size: int = PAGE_SIZE
    dtype: torch.dtype = torch.uint8

    @property
    def logical_size(self) -> int:
        return self.buffer.shape[1] * self.page_size

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = (indices[:: self.page_size] // self.page_size).tolist()
        pointers = [self.buffer[half, page].data_ptr() for page in pages for half in range(2)]
        return pointers, [self.buffer.shape[2]] * len(pointers)


def make_pool(seed: int | None, page_bytes: int = 3000, num_pages: int = 16) -> Pool:
    """Random bytes; zeros without a seed. ``page_bytes`` are of each half."""
    shape = (2, num_pages, page_bytes)
    if seed is None:
        return Pool(torch.zeros(shape, dtype=torch.uint8))
    generator = torch.Generator().manual_seed(seed)
    return Pool(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))


def hashes(*names: str) -> list[str]:
    """A page hash for each name."""
    return [hashlib.sha256(name.encode()).hexdigest() for name in names]


def slots(*pages: int) -> torch.Tensor:
    """Token slots of whole pages. [pages * PAGE_SIZE] int64"""
    return torch.cat([torch.arange(p * PAGE_SIZE, (p + 1) * PAGE_SIZE) for p in pages])


def storage_config(**changes: Any) -> HiCacheStorageConfig:
    """Of a server of one rank."""
    settings: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "m",
    }
    return HiCacheStorageConfig(**{**settings, **changes})

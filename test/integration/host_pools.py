"""Host pools as SGLang's storage sees them, without an SGLang around them; and SGLang's own KV
pools on a CPU, of a device and of the host, without a server."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE_SIZE = 4
PAGE, PAGES = 16, 8
LAYOUT = "page_first_direct"
SHAPE: dict[str, Any] = {"page_size": PAGE, "device": "cpu", "enable_memory_saver": False}


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


def heads_pools(num_layers: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Of a model with attention by heads; that of the host has room for twice as much."""
    device = MHATokenToKVPool(
        PAGE * PAGES, dtype=dtype, head_num=2, head_dim=32, layer_num=num_layers, **SHAPE
    )
    (info,) = device.get_device_pool_infos()
    return device, MHATokenToKVPoolHost(info.buffer_info, 2.0, 0, PAGE, LAYOUT, **extent(device))


def latent_pools(num_layers: int) -> tuple[Any, Any]:
    """Of a model with latent attention."""
    device = MLATokenToKVPool(
        PAGE * PAGES,
        dtype=torch.bfloat16,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        layer_num=num_layers,
        **SHAPE,
    )
    (info,) = device.get_device_pool_infos()
    more = {**extent(device), "target_layer_num": num_layers}
    return device, MLATokenToKVPoolHost(info.buffer_info, 2.0, 0, PAGE, LAYOUT, **more)


def extent(device: Any) -> dict[str, int]:
    """What a host pool is told of the pool of its device."""
    end = device.layer_num - 1
    return {"device_capacity_tokens": device.size, "start_layer": 0, "end_layer": end}

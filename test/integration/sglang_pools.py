"""SGLang's own KV pools on a CPU, of a device and of the host, without a server."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE, PAGES = 16, 8
LAYOUT = "page_first_direct"
SHAPE: dict[str, Any] = {"page_size": PAGE, "device": "cpu", "enable_memory_saver": False}


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

"""What a page codec needs to know of a host pool: number format, and the axes of its segments."""

from __future__ import annotations

from typing import Any

from sglang_tiered.storage.codecs import PageLayout
from sglang_tiered.storage.codecs.base import ITEM_BYTES

__all__ = ["page_layout"]


def page_layout(pool: Any) -> PageLayout:
    """Of the pages of a KV host pool. Pools that are neither keys and values per head nor one
    latent vector per token come out as unknown, which a lossy codec refuses."""
    dtype = str(pool.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        return PageLayout.unknown()
    shape: dict[str, Any] = {
        "dtype": dtype,
        "num_layers": int(getattr(pool, "layer_num", 0)),
        "page_size": int(pool.page_size),
    }
    order = str(getattr(pool, "layout", ""))
    try:
        if getattr(pool, "kv_cache_dim", None) is not None:
            return PageLayout.latent(**shape, dim=int(pool.kv_cache_dim), order=order)
        if getattr(pool, "head_num", None) is not None:
            return PageLayout.kv(
                **shape,
                num_heads=int(pool.head_num),
                head_dim=int(pool.head_dim),
                v_head_dim=int(getattr(pool, "v_head_dim", None) or pool.head_dim),
                order=order,
            )
    except ValueError:  # an order of axes that nobody described
        pass
    return PageLayout.unknown(dtype)

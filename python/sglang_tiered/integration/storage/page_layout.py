"""The layout of SGLang's host pages, for codecs that must know what the bytes mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.mha import (
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sglang_tiered.codecs import LOSSY_CODEC_NAMES, PageLayout
from sglang_tiered.codecs.base import ITEM_BYTES
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.storage.host_pages import page_segments, pool_label

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_codec", "page_layout"]


def page_layout(pool: Any) -> PageLayout:
    """Return how a page of ``pool`` lies in memory. It is unknown unless the pool is exactly one of
    SGLang's plain KV or latent pools, whose pages have the length that the layout gives."""
    dtype = str(pool.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        dtype = "uint8"
    layout = _known_layout(pool, dtype)
    if layout is None or layout.page_bytes != _page_bytes(pool):
        return PageLayout.unknown(dtype)
    return layout


def check_codec(name: str, pools: Mapping[PoolName, Any]) -> None:
    """Raise ``ConfigError`` for a lossy codec that could take a page of another pool for one of the
    KV pool's. Both have the same length then, and the engine knows pages by their keys only."""
    if name not in LOSSY_CODEC_NAMES:
        return
    page_bytes = _page_bytes(pools[PoolName.KV])
    for other, pool in pools.items():
        if other != PoolName.KV and _page_bytes(pool) == page_bytes:
            raise ConfigError(
                f"the codec {name} cannot be used with this model: pages of its "
                f"{pool_label(other)} pool are as long as those of the KV pool; use zstd or none."
            )


def _known_layout(pool: Any, dtype: str) -> PageLayout | None:
    try:
        if type(pool) in (MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost):
            return PageLayout.kv(
                dtype=dtype,
                num_layers=pool.layer_num,
                page_size=pool.page_size,
                num_heads=pool.head_num,
                head_dim=pool.head_dim,
                v_head_dim=getattr(pool, "v_head_dim", None),
                order=pool.layout,
            )
        if type(pool) is MLATokenToKVPoolHost:
            return PageLayout.latent(
                dtype=dtype,
                num_layers=pool.layer_num,
                page_size=pool.page_size,
                dim=pool.kv_cache_dim,
                order=pool.layout,
            )
    except ValueError:  # an order of axes that is not known
        return None
    return None


def _page_bytes(pool: Any) -> int:
    page_size = getattr(pool, "logical_page_size", pool.page_size)
    (page,) = page_segments(pool, torch.arange(page_size), 1)
    return sum(segment.nbytes for segment in page)

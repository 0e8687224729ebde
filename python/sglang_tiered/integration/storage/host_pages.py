"""SGLang's host pages as the engine sees them: 32-byte keys, views of the pool's memory, where
pages were seen there last, and for codecs what the bytes mean."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.mha import (
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sglang_tiered.codecs import PageLayout
from sglang_tiered.codecs.base import ITEM_BYTES
from sglang_tiered.errors import ConfigError
from sglang_tiered.storage.region.notes import PageSize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sglang_tiered.storage.base import Page


def page_layout(pool: Any) -> PageLayout:
    """Return how a page of ``pool`` lies in memory. It is unknown unless the pool is exactly one of
    SGLang's plain KV or latent pools, whose pages have the length that the layout gives."""
    dtype = str(pool.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        dtype = "uint8"
    layout = _known_layout(pool, dtype)
    if layout is None or layout.page_bytes != page_bytes(pool):
        return PageLayout.unknown(dtype)
    return layout


def check_codec(name: str, pools: Mapping[PoolName, Any]) -> None:
    """Raise ``ConfigError`` where a lossy codec could take a page of another pool for one of the KV
    pool's. Both have the same length then, and the engine knows pages by their keys only."""
    num_bytes = page_bytes(pools[PoolName.KV])
    for other, pool in pools.items():
        if other != PoolName.KV and page_bytes(pool) == num_bytes:
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


def pool_label(name: Any) -> str:
    return str(getattr(name, "value", name))


def check(pools: Mapping[PoolName, Any]) -> int:
    """Return the bytes of the largest page. Raises ``ConfigError`` for a pool that cannot say where
    its pages lie: each of its stores would fail in the background, and no prefix would ever be
    found whole. And for one whose pages SGLang moves, perhaps under a read."""
    largest = 0
    for name, pool in pools.items():
        if getattr(pool, "shared_allocation_domain", None) is not None:
            raise ConfigError(
                f"the NVMe tier cannot store the {pool_label(name)} pool, whose pages SGLang moves "
                "in memory; start with --tier-mode host."
            )
        try:
            largest = max(largest, page_bytes(pool))
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"the NVMe tier cannot store this model's {pool_label(name)} pool "
                f"({str(error).rstrip('.')}); start with --tier-mode host."
            ) from error
    return largest


def page_bytes(pool: Any) -> int:
    """Return the payload bytes of a page of a host pool."""
    page_size = getattr(pool, "logical_page_size", pool.page_size)
    page = page_segments(pool, torch.arange(page_size), 1)[0]
    return sum(segment.nbytes for segment in page)


def kv_page_size(pools: Mapping[PoolName, Any]) -> PageSize:
    """Return what tells the KV pool's pages in a tier, and how many tokens one holds."""
    kv = pools[PoolName.KV]
    nbytes = page_bytes(kv)
    sizes = [page_bytes(pool) for pool in pools.values()]
    num_tokens = int(getattr(kv, "logical_page_size", kv.page_size))
    others = tuple(sorted({*sizes} - {nbytes}))
    return PageSize(num_tokens, nbytes, sizes.count(nbytes), others)


def engine_keys(pool: PoolName | str, hashes: Sequence[str]) -> list[bytes]:
    """Return the engine keys of SGLang's page hashes. The KV pool's are the hashes themselves,
    another pool's are derived from them, so that one log holds all pools of a page."""
    return derive_keys(pool, [bytes.fromhex(text) for text in hashes])


def derive_keys(pool: PoolName | str, kv_keys: list[bytes]) -> list[bytes]:
    """Return the engine keys of a pool's pages, given those of the KV pool's."""
    if pool == PoolName.KV:
        return kv_keys
    label = pool_label(pool).encode() + b"\0"
    return [hashlib.sha256(label + key).digest() for key in kv_keys]


def page_segments(pool: Any, host_indices: torch.Tensor, num_pages: int) -> tuple[Page, ...]:
    """Return views of the host pool's memory, one tuple of segments per page; nothing is copied.

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


class SeenPages:
    """Where pages of ``pool`` that the tiers hold were last seen in host memory. Any thread.

    Who copies pages for the bucket or other servers looks here before it reads them. All here is a
    hint: SGLang frees and reuses host pages as it likes, and tells nobody, so that none of this
    costs its scheduler anything. Whoever takes a page from there verifies its copy
    (``RegionReader``).
    """

    def __init__(self, pool: Any, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._lock = threading.Lock()  # a leaf
        self._firsts: dict[bytes, int] = {}  # the first slot of each page, by key
        self._keys: dict[int, bytes] = {}  # by that slot, also of keys that were noted elsewhere

    def note(
        self, keys: Sequence[bytes], host_indices: torch.Tensor, are_held: Sequence[bool]
    ) -> None:
        """Note where those pages lie of which the tiers hold the same bytes. There may be slots of
        more pages than keys."""
        firsts = host_indices[:: self._page_size].tolist()
        with self._lock:
            for key, first, is_held in zip(keys, firsts, are_held, strict=False):
                if is_held:
                    self._drop(first)
                    self._firsts[key] = first
                    self._keys[first] = key

    def _drop(self, first: int) -> None:
        before = self._keys.pop(first, None)
        if before is not None and self._firsts.get(before) == first:
            del self._firsts[before]

    def knows(self, keys: Sequence[bytes]) -> bool:
        """See ``OwnersMemory.knows``."""
        with self._lock:
            return all(key in self._firsts for key in keys)

    def find(self, keys: Sequence[bytes]) -> Sequence[Page] | None:
        """See ``OwnersMemory.find``."""
        with self._lock:
            firsts = [self._firsts[key] for key in keys if key in self._firsts]
        if len(firsts) < len(keys):
            return None
        slots = torch.tensor(firsts)[:, None] + torch.arange(self._page_size)
        return page_segments(self._pool, slots.flatten(), len(keys))

    def forget(self, keys: Sequence[bytes]) -> None:
        """See ``OwnersMemory.forget``."""
        with self._lock:
            for key in keys:
                if key in self._firsts:
                    self._drop(self._firsts[key])

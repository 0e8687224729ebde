"""``ZeroCopyStorage``: SGLang's storage interface without the copying calls.

They are abstract upstream, so they must exist; with ``interface_v1`` they are never called.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

__all__ = ["ZeroCopyStorage"]


class ZeroCopyStorage(HiCacheStorage):  # type: ignore[misc]
    """Answers the copying calls: every load misses, and nothing is stored."""

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return False

"""``SeenPages``: where KV pages that the tiers hold were last seen in host memory.

Who copies pages for the bucket or other servers looks here before it reads them. All here is a
hint: SGLang frees and reuses host pages as it likes, and tells nobody, so that none of this costs
its scheduler anything. Whoever takes a page from there verifies its copy (``RegionReader``).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from sglang_tiered.integration.storage.host_pages import page_segments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.base import Page

__all__ = ["SeenPages"]


class SeenPages:
    """Knows the key that was noted last of each page of ``pool``. Any thread."""

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

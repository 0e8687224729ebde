"""Pages of host memory as the launcher has SGLang's host pool: private, huge where the kernel has
such pages, already touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_tiered.storage.region.device import aligned_buffer
from storage_bench.figures import DifferentBytesError

if TYPE_CHECKING:
    from sglang_tiered.storage.base import Page


class HostPages:
    """``num_pages`` pages in one mapping; filled with noise when a seed is given."""

    def __init__(self, num_pages: int, page_bytes: int, seed: int | None = None) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        view = aligned_buffer(num_pages * page_bytes)
        self._rows = np.frombuffer(view, dtype=np.uint8).reshape(num_pages, page_bytes)
        self.poison()
        if seed is not None:
            source = np.random.default_rng(seed)
            for row in self._rows:
                row[:] = np.frombuffer(source.bytes(page_bytes), dtype=np.uint8)
        self.pages: tuple[Page, ...] = tuple(
            (view[start : start + page_bytes],)
            for start in range(0, num_pages * page_bytes, page_bytes)
        )
        self.tensors = [torch.from_numpy(row) for row in self._rows]  # each [page_bytes] uint8

    def poison(self) -> None:
        """Overwrite all pages, so that none is right by what was there before."""
        self._rows.fill(0xA5)

    def check_equal(self, first: int, other: HostPages, other_first: int, num_pages: int) -> None:
        """Raises ``DifferentBytesError`` unless that many pages hold the same bytes."""
        for number in range(num_pages):
            mine, theirs = self._rows[first + number], other._rows[other_first + number]
            if not np.array_equal(mine, theirs):
                raise DifferentBytesError(f"page {first + number} differs from what was stored")

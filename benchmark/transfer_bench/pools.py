"""The pages that are handed over: eight layers of an 8B Llama's KV, both sides alike."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from sglang_tiered.transfer.memory import Buffer, HostMemory, Memories
from sglang_tiered.transfer.messages import KVLayout

PAGE_SIZE = 64  # tokens
TOKEN_BYTES = 8 * 128 * 2  # 8 KV heads of 128 dimensions in bfloat16
PAGE_BYTES = PAGE_SIZE * TOKEN_BYTES


@dataclass(frozen=True)
class Shape:
    """``num_buffers`` K and V buffers of ``num_pages``; a prompt has half of the pages."""

    num_layers: int
    num_pages: int
    page_size: int = PAGE_SIZE

    @property
    def page_bytes(self) -> int:
        return self.page_size * TOKEN_BYTES

    @property
    def prompt_pages(self) -> int:
        return self.num_pages // 2

    @property
    def prompt_bytes(self) -> int:
        return self.prompt_pages * self.page_bytes * 2 * self.num_layers


class Pool:
    """One side's buffers, filled or empty, and what ``transfer`` knows of them."""

    def __init__(self, shape: Shape, *, filled: bool) -> None:
        size = (2 * shape.num_layers, shape.num_pages, shape.page_bytes)
        source = np.random.default_rng(1)
        self.shape = shape
        self.array: Any = np.zeros(size, np.uint8)
        if filled:
            self.array[:] = source.integers(0, 256, size, dtype=np.uint8)
        self.aux: Any = np.zeros((1, 4, 64), np.uint8)
        self.memories = Memories(_memory(self.array), [], _memory(self.aux))
        self.layout = KVLayout(
            shape.page_size,
            "bfloat16",
            [shape.page_bytes] * 2 * shape.num_layers,
            [*range(shape.num_layers)] * 2,
            0,
            1,
            8,
            [],
            [64],
        )

    def digest(self, pages: Any) -> int:
        """Of the pages' bytes, in order."""
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(self.array[:, pages]).data)


def prompt_pages(shape: Shape, seed: int) -> Any:
    """Which pages a prompt has: scattered, as in a pool that has been used for a while."""
    order = np.random.default_rng(seed).permutation(shape.num_pages)
    return order[: shape.prompt_pages].astype(np.int32)


def cpu_seconds() -> float:
    """Of this process, all threads, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _memory(array: Any) -> HostMemory:
    return HostMemory([Buffer(part.ctypes.data, part.nbytes, part[0].nbytes) for part in array])

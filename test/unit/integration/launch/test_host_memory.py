"""Host memory of pages so small that a disk reads it in hundreds of pieces."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.storage.mmap.mmap_allocator import alloc_mmap

from sglang_tiered.integration.launch import start
from sglang_tiered.storage.region.device import aligned_buffer

NUM_BYTES = 8 << 20
THREADS = "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS"


def flags_at(address: int) -> list[str]:
    """Those of the mapping that has this address, as ``proc(5)`` lists them under ``smaps``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ")[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping at {address:x}")


def test_host_pool_is_of_small_shared_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS, "")
    monkeypatch.delenv(THREADS)  # and it goes again afterwards
    small = alloc_mmap((NUM_BYTES,), torch.uint8)
    assert "sh" in flags_at(small.data_ptr()), "SGLang changed its default: leave it to it"
    start._use_huge_pages()
    pool = alloc_mmap((NUM_BYTES,), torch.uint8)
    flags = flags_at(pool.data_ptr())
    assert "sh" not in flags and "hg" in flags


def test_staging_is_of_small_shared_pages() -> None:
    memory = aligned_buffer(NUM_BYTES)
    flags = flags_at(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    assert "sh" not in flags and "hg" in flags

"""Device pools do what host pools do; on CPU tensors, which take the same path but for streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_tiered.integration.disaggregation.kv_pools import DeviceMemory
from sglang_tiered.transfer.memory import Buffer, HostMemory, TokenSlice

PAGES = np.array([7, 0, 3], np.int32)


@pytest.fixture
def pool() -> Any:
    """[buffer, page, bytes]: pages of four tokens of 24 bytes."""
    return np.random.default_rng(1).integers(0, 256, (2, 8, 96), dtype=np.uint8)


def memories(pool: Any) -> tuple[HostMemory, DeviceMemory]:
    buffers = [Buffer(part.ctypes.data, part.nbytes, 96) for part in pool]
    return HostMemory(buffers), DeviceMemory(buffers, "cpu")


@pytest.mark.parametrize("part", [None, TokenSlice(24, 8, 16)], ids=["whole", "some_heads"])
def test_gather_equals_host_memory(pool: Any, part: TokenSlice | None) -> None:
    host, device = memories(pool)
    size = 3 * (96 if part is None else 4 * 8)
    for buffer in range(2):
        expected, got = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        host.gather(buffer, PAGES, part, expected)
        device.gather(buffer, PAGES, part, got)
        assert expected.any() and np.array_equal(got, expected)


@pytest.mark.parametrize("part", [None, TokenSlice(24, 8, 16)], ids=["whole", "some_heads"])
def test_scatter_writes_only_the_named_pages(pool: Any, part: TokenSlice | None) -> None:
    other = pool.copy()
    size = 3 * (96 if part is None else 4 * 8)
    data = np.random.default_rng(2).integers(0, 256, size, dtype=np.uint8)
    memories(pool)[0].scatter(1, PAGES, part, data)
    device = memories(other)[1]
    device.scatter(1, PAGES, part, data)
    device.flush()
    assert np.array_equal(other, pool)


def test_other_processes_are_not_offered_device_memory(pool: Any) -> None:
    assert not memories(pool)[1].is_host

"""Device pools do what host pools do: on CPU tensors, by PyTorch and in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from interpreted import interpreted

from sglang_tiered.integration.disaggregation.device_memory import DeviceMemory
from sglang_tiered.transfer.memory import Buffer, HostMemory, SlabPiece, TokenSlice

PAGES = np.array([7, 0, 3], np.int32)
HEADS = TokenSlice(24, 8, 16)
KINDS = {
    "one_buffer": [SlabPiece(1, 96)],
    "all_buffers": [SlabPiece(index, 96) for index in range(4)],
    "not_in_order": [SlabPiece(3, 96), SlabPiece(0, 96)],
    "some_heads": [SlabPiece(index, 32, HEADS) for index in range(4)],
    "of_two_sizes": [SlabPiece(0, 96), SlabPiece(4, 40), SlabPiece(5, 40), SlabPiece(1, 96)],
}
NAMED = pytest.mark.parametrize("name", KINDS)


def pool() -> list[Any]:
    """Four buffers [page, bytes] with pages of four tokens of 24 bytes, two with pages of 40."""
    source = np.random.default_rng(1)
    sizes = [96] * 4 + [40] * 2
    return [source.integers(0, 256, (8, size), dtype=np.uint8) for size in sizes]


def memories(arrays: list[Any]) -> tuple[HostMemory, DeviceMemory]:
    buffers = [Buffer(part.ctypes.data, part.nbytes, part.shape[1]) for part in arrays]
    return HostMemory(buffers), DeviceMemory(buffers, "cpu")


def slab_of(pieces: list[SlabPiece]) -> Any:
    size = sum(piece.page_bytes for piece in pieces) * len(PAGES)
    return np.random.default_rng(2).integers(0, 256, size, dtype=np.uint8)


def check(name: str) -> None:
    """Pages are gathered as from host memory, and scattered to those that are named alone."""
    pieces, (host, device) = KINDS[name], memories(arrays := pool())
    expected, got = slab_of(pieces), slab_of(pieces)
    host.begin_gather(pieces, PAGES, expected)()
    device.begin_gather(pieces, device.place(PAGES), got)()
    assert not np.array_equal(expected, slab_of(pieces)) and np.array_equal(got, expected)
    host.scatter_slab(pieces, PAGES, slab_of(pieces))
    memories(others := pool())[1].scatter_slab(pieces, PAGES, slab_of(pieces))
    for array, other, before in zip(arrays, others, pool(), strict=True):
        assert np.array_equal(array, other)
        assert np.array_equal(other[[1, 2, 4, 5, 6]], before[[1, 2, 4, 5, 6]])


@NAMED
def test_pages_move_as_in_host_memory(name: str) -> None:
    check(name)


@NAMED
@interpreted
def test_kernels_move_pages_as_host_memory(name: str) -> None:
    check(name)


def test_next_slab_leaves_the_last_alone() -> None:
    """Two slabs of device memory take turns, and a third reuses the first."""
    host, device = memories(pool())
    placed = device.place(PAGES)
    begun = []
    for index in range(4):
        out = np.zeros(96, np.uint8)
        begun.append((out, device.begin_gather([SlabPiece(index, 96)], placed[1:2], out)))
    for index, (out, wait) in enumerate(begun):
        wait()
        expected = np.zeros(96, np.uint8)
        host.gather(index, PAGES[1:2], None, expected)
        assert np.array_equal(out, expected)


def test_thread_is_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cpu, "set_device", chosen.append)
    device = memories(pool())[1]
    device.enter_thread()
    assert chosen == [torch.device("cpu")]
    assert not device.is_host, "other processes would be offered it"

"""Page copies: bytes arrive where they belong and nothing else moves."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from compiler_requests import compiler_requests
from interpreted import interpreted

from sglang_tiered_kernels.page_copy import (
    Band,
    PagedPool,
    copy_between,
    gather,
    interface,
    scatter,
    warm_up,
)

NUM_SLOTS = 48
# For one page of ``pool_of_pages``.
SLAB = torch.zeros(3, 1, 512, dtype=torch.uint8)


def buffers_of(
    dtype: torch.dtype = torch.bfloat16, row: tuple[int, ...] = (2, 8), count: int = 3
) -> list[torch.Tensor]:
    """Random bytes, so that NaN patterns must survive too."""
    generator = torch.Generator().manual_seed(0)
    width = torch.Size(row).numel() * dtype.itemsize
    return [
        torch.randint(0, 256, (NUM_SLOTS, width), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(NUM_SLOTS, *row)
        for _ in range(count)
    ]


def pool_of_pages() -> PagedPool:
    return PagedPool([buffer.view(-1, 512 // 2) for buffer in buffers_of()])


def pages_of(pool: PagedPool, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randperm(pool.num_pages, generator=generator)[: pool.num_pages // 2 + 1].to(dtype)


def check_copies(
    dtype: torch.dtype,
    row: tuple[int, ...],
    page_size: int,
    index_dtype: torch.dtype = torch.int64,
    shift: int = 0,
    band: Band | None = None,
) -> None:
    """Out to a slab and into another pool, against plain indexing. shift: bytes by which the slab
    misses alignment."""
    buffers = [buffer.view(-1, page_size, *row) for buffer in buffers_of(dtype, row)]
    pool = PagedPool(buffers, band)
    pages = pages_of(pool, index_dtype)
    shape = pool.slab_shape(len(pages))
    memory = torch.full((torch.Size(shape).numel() + shift + 5,), 0xA5, dtype=torch.uint8)
    slab = memory[shift:-5].view(shape)
    gather(pool, pages, slab)

    raw = [b.view(torch.uint8).flatten(1) for b in buffers]
    of_page = torch.ones(raw[0].shape[1], dtype=torch.bool)
    if band is not None:
        of_page.view(-1, band.row_bytes)[:, : band.low] = False
        of_page.view(-1, band.row_bytes)[:, band.high :] = False
    expected = torch.stack([buffer[pages.long()][:, of_page] for buffer in raw])
    assert torch.equal(slab, expected)
    assert (memory[:shift] == 0xA5).all(), "bytes before the slab were written"
    assert (memory[-5:] == 0xA5).all(), "bytes after the slab were written"

    others = [torch.full_like(b.view(torch.uint8), 0x5A).view(dtype) for b in buffers]
    scatter(slab, pages, PagedPool(others, band))
    untouched = torch.ones(NUM_SLOTS // page_size, dtype=torch.bool)
    untouched[pages.long()] = False
    for source, other in zip(raw, others, strict=True):
        written = other.view(torch.uint8).view(len(untouched), -1)
        named = written[pages.long()]
        assert torch.equal(named[:, of_page], source[pages.long()][:, of_page])
        assert (named[:, ~of_page] == 0x5A).all(), "bytes beside the band were written"
        assert (written[untouched] == 0x5A).all(), "a page that was not named was written"


def kind(dtype: torch.dtype, row: tuple[int, ...], page_size: int, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "row": row, "page_size": page_size, **more}


CASES = {
    "bf16 pages": kind(torch.bfloat16, (2, 8), 16),
    "fp8 token rows": kind(torch.float8_e4m3fn, (2, 64), 1),
    "more than a block": kind(torch.float32, (4, 40), 16),
    "rows of 7 bytes": kind(torch.uint8, (7,), 3),
    "int32 pages": kind(torch.bfloat16, (8,), 4, index_dtype=torch.int32),
    "some heads of a token": kind(torch.bfloat16, (4, 8), 4, band=Band(64, 16, 48)),
    "some bytes of a token": kind(torch.uint8, (15,), 3, band=Band(15, 2, 9)),
    "a slab off by 4": kind(torch.bfloat16, (8,), 4, shift=4),
    "a slab off by 1": kind(torch.bfloat16, (8,), 4, shift=1),
}


@pytest.mark.parametrize("name", CASES)
@interpreted
def test_the_kernel_copies_bytes_and_only_those(name: str) -> None:
    check_copies(**CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_a_cpu_copies_bytes_and_only_those(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    check_copies(**CASES[name])


def check_between(max_blocks: int | None, page_bytes: int = 520) -> None:
    """Layer-first buffers to pages of all layers, and one layer of those back."""
    generator = torch.Generator().manual_seed(2)
    layers = [
        torch.randint(0, 256, (9, page_bytes), dtype=torch.uint8, generator=generator)
        for _ in range(3)
    ]
    host = torch.full((7, 3, page_bytes), 0xA5, dtype=torch.uint8)
    of, to, device = [8, 0, 3, 5], [1, 6, 0, 2], torch.device("cpu")
    views = [host[:, layer] for layer in range(3)]
    copy_between(layers, of, views, to, device=device, max_blocks=max_blocks)
    for view, layer in zip(views, layers, strict=True):
        assert torch.equal(view[to], layer[of])
    assert (host[[3, 4, 5]] == 0xA5).all(), "a page that was not named was written"
    back = torch.full_like(layers[1], 0x5A)
    copy_between(views[1:2], to, [back], of, device=device, max_blocks=max_blocks)
    assert torch.equal(back[of], layers[1][of])
    assert (back[[1, 2, 4, 6, 7]] == 0x5A).all(), "a page that was not named was written"


@pytest.mark.parametrize("max_blocks", [None, 5])
@interpreted
def test_the_kernel_copies_pages_between_any_places(max_blocks: int | None) -> None:
    check_between(max_blocks)
    check_between(max_blocks, page_bytes=9001)


def test_a_cpu_copies_pages_between_any_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    check_between(None)


def test_views_that_differ_are_not_copied() -> None:
    one, two = torch.zeros(4, 6, dtype=torch.uint8), torch.ones(4, 8, dtype=torch.uint8)
    for sources, targets, to, message in (
        ([one], [two], [0], "on the two sides"),
        ([one], [one], [0, 1], "on the two sides"),
        ([one, two], [one, two], [0], "views of .* on one side"),
        ([one.float()], [one], [0], "a view of torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            copy_between(sources, [0], targets, to, device=torch.device("cpu"))
    assert not one.any()


BESIDE = "no part of pages of 48 bytes"


@pytest.mark.parametrize(
    ("buffers", "band", "message"),
    [
        ([torch.zeros(4, 6).T], None, r"buffer 0 with shape \[6, 4\] and strides \[1, 6\]"),
        ([torch.zeros(4, 6), torch.zeros(4, 5)], None, "buffer 1 has 4 pages in 80 bytes"),
        ([torch.zeros(4, 6), torch.zeros(6, 4)], None, "buffer 1 has 6 pages in 96 bytes"),
        ([torch.zeros(2, 12)], Band(20, 0, 4), BESIDE),
        ([torch.zeros(2, 12)], Band(24, 8, 8), BESIDE),
        ([torch.zeros(2, 12)], Band(24, 8, 25), BESIDE),
        ([torch.zeros(2, 12)], Band(24, -1, 8), BESIDE),
    ],
)
def test_buffers_that_are_no_pool_are_refused(buffers: Any, band: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedPool(buffers, band)


@pytest.mark.parametrize(
    ("pages", "slab", "message"),
    [
        ([[0]], SLAB, r"pages is \[1, 1\] torch.int64"),
        ([0, 0], SLAB, r"2 pages need \[3, 2, 512\]"),
        ([0.0], SLAB, "torch.float32; give one dimension"),
        ([0], SLAB.float(), "1 pages need"),
        ([0], SLAB.transpose(0, 1), r"1 pages need \[3, 1, 512\]"),
        ([0], SLAB.repeat(1, 1, 2)[..., ::2], "uint8, contiguous"),
        ([0], SLAB.to("meta"), "a slab on meta"),
        ([3], SLAB, "out of bounds|out of range"),
    ],
)
def test_slab_that_does_not_fit_is_refused(
    pages: Any, slab: torch.Tensor, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises((ValueError, IndexError), match=message):
        gather(pool_of_pages(), torch.tensor(pages), slab)
    with pytest.raises((ValueError, IndexError), match=message):
        scatter(slab, torch.tensor(pages), pool_of_pages())


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="no compiler there")
@pytest.mark.parametrize("band", [None, Band(256, 3, 8)])
def test_no_copy_waits_for_a_compiler_once_warm(
    band: Band | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = compiler_requests(monkeypatch)
    monkeypatch.setattr(interface, "by_kernel", lambda device: True)
    pool = PagedPool([b.view(-1, 16, 128) for b in buffers_of(torch.bfloat16, (128,))], band)
    warm_up(pool)
    warm = {request["key"] for request in requests}
    assert len(warm) == 2, "one for each direction"
    requests.clear()
    for pages in ([0], [2, 0], [1, 0, 2], list(range(3)) * 16):
        numbers = torch.tensor(pages, dtype=torch.int32)
        slab = torch.zeros(pool.slab_shape(len(pages)), dtype=torch.uint8)
        gather(pool, numbers, slab)
        scatter(slab, numbers, pool)
    assert {request["key"] for request in requests} == warm


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_copies_registered_host_memory() -> None:
    layers = [torch.randint(0, 256, (64, 131072), dtype=torch.uint8).cuda() for _ in range(4)]
    host = torch.zeros(64, 4, 131072, dtype=torch.uint8).pin_memory()
    views, device = [host[:, layer] for layer in range(4)], layers[0].device
    of, to = torch.randperm(64)[:40].tolist(), torch.randperm(64)[:40].tolist()
    copy_between(layers, of, views, to, device=device, max_blocks=32)
    restored = [torch.zeros_like(layer) for layer in layers]
    for layer in range(4):
        copy_between(views[layer : layer + 1], to, restored[layer : layer + 1], of, device=device)
    torch.cuda.synchronize()
    for before, view, after in zip(layers, views, restored, strict=True):
        assert torch.equal(view[to], before.cpu()[of])
        assert torch.equal(after[of], before[of])

"""Host transfers of the reference platform against plain indexing, MHA and MLA shapes."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

from sglang_tiered.integration.cpu import platform as cpu_platform

PAGE, LAYERS, NUM_PAGES = 4, 3, 6


def token_indices(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(p * PAGE, (p + 1) * PAGE) for p in pages])


def make_layers(width: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUM_PAGES * PAGE, *width, generator=generator) for _ in range(LAYERS)]


@pytest.mark.parametrize(
    ("halves", "device_width", "host_width"),
    [(2, (2, 8), (2, 8)), (1, (1, 24), (1, 24)), (1, (1, 24), (24,)), (2, (2, 128), (2, 128))],
    ids=["mha", "mla", "mla-host-without-head-axis", "rows-of-a-memory-page"],
)
def test_device_to_host_and_back_keeps_every_byte(
    halves: int, device_width: tuple[int, ...], host_width: tuple[int, ...]
) -> None:
    device = [layer for half in range(halves) for layer in make_layers(device_width, half)]
    original = [layer.clone() for layer in device]
    host = [torch.full((NUM_PAGES, LAYERS, PAGE, *host_width), 7.0) for _ in range(halves)]
    source, target = [4, 0, 3], [1, 5, 2]

    cpu_platform.transfer_kv_all_layer_direct_lf_pf(
        src_ptrs=device,
        dst_ptrs=host,
        src_indices=token_indices(source),
        dst_indices=token_indices(target),
        page_size=PAGE,
    )
    for half in range(halves):
        for layer in range(LAYERS):
            for from_page, to_page in zip(source, target, strict=True):
                pages = original[half * LAYERS + layer].view(NUM_PAGES, PAGE, -1)
                assert torch.equal(host[half][to_page, layer].view(PAGE, -1), pages[from_page])
    untouched = [page for page in range(NUM_PAGES) if page not in target]
    assert all((host[half][untouched] == 7.0).all() for half in range(halves))

    restored = [torch.zeros_like(layer) for layer in device]
    for layer in range(LAYERS):
        cpu_platform.transfer_kv_per_layer_direct_pf_lf(
            src_ptrs=host,
            dst_ptrs=[restored[half * LAYERS + layer] for half in range(halves)],
            src_indices=token_indices(target),
            dst_indices=token_indices(source),
            layer_id=layer,
            page_size=PAGE,
        )
    kept = token_indices(source)
    for before, after in zip(original, restored, strict=True):
        assert torch.equal(after[kept], before[kept])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_types_that_numpy_lacks_are_copied_too(dtype: torch.dtype) -> None:
    device = [layer.to(dtype) for half in range(2) for layer in make_layers((2, 8), half)]
    host = [torch.zeros(NUM_PAGES, LAYERS, PAGE, 2, 8, dtype=dtype) for _ in range(2)]
    cpu_platform.transfer_kv_all_layer_direct_lf_pf(
        device, host, token_indices([4]), token_indices([1]), page_size=PAGE
    )
    assert torch.equal(
        host[1][1, 2].view(torch.uint8), device[5][4 * PAGE : 5 * PAGE].view(torch.uint8)
    )


def test_unpacked_layer_is_refused_instead_of_lost() -> None:
    device = [torch.zeros(NUM_PAGES * PAGE, 2, 16)[:, :, :8] for _ in range(2 * LAYERS)]
    host = [torch.ones(NUM_PAGES, LAYERS, PAGE, 2, 8) for _ in range(2)]
    with pytest.raises(RuntimeError):
        cpu_platform.transfer_kv_per_layer_direct_pf_lf(
            host, device[:2], token_indices([4]), token_indices([1]), 0, page_size=PAGE
        )


@pytest.mark.parametrize("is_to_host", [True, False], ids=["to host", "to device"])
def test_slots_across_pages_are_refused(
    is_to_host: bool,
) -> None:
    """An allocator of tokens hands out the slots from 1 on, the one before takes what padding
    writes: no page of the pool."""
    size = NUM_PAGES * PAGE
    allocator = TokenToKVPoolAllocator(size - 1, torch.float32, "cpu", None, need_sort=False)
    unaligned = allocator.alloc(PAGE)
    device = [layer for half in range(2) for layer in make_layers((2, 8), half)]
    host = [torch.full((NUM_PAGES, LAYERS, PAGE, 2, 8), 7.0) for _ in range(2)]
    before = [tensor.clone() for tensor in (*device, *host)]
    with pytest.raises(ValueError, match=r"whole pages of 4 slots .* not of 1, 2, 3, 4"):
        if is_to_host:
            cpu_platform.transfer_kv_all_layer_direct_lf_pf(
                device, host, unaligned, token_indices([2]), page_size=PAGE
            )
        else:
            cpu_platform.transfer_kv_per_layer_direct_pf_lf(
                host, device[::LAYERS], token_indices([2]), unaligned, 0, page_size=PAGE
            )
    assert all(map(torch.equal, before, (*device, *host)))


@pytest.mark.parametrize("slots", [[4, 5, 6], [4, 5, 7, 6], [4, 5, 8, 9]])
def test_partial_or_reordered_page_is_refused(slots: list[int]) -> None:
    device = [layer for half in range(2) for layer in make_layers((2, 8), half)]
    host = [torch.zeros(NUM_PAGES, LAYERS, PAGE, 2, 8) for _ in range(2)]
    with pytest.raises(ValueError, match="whole pages of 4 slots"):
        cpu_platform.transfer_kv_all_layer_direct_lf_pf(
            device, host, torch.tensor(slots), token_indices([2]), page_size=PAGE
        )


def test_layer_first_copy_moves_tokens() -> None:
    source, target = make_layers((2, 8), 0), make_layers((2, 8), 1)
    cpu_platform.transfer_kv_direct(
        source, target, torch.tensor([5, 1]), torch.tensor([0, 9]), page_size=PAGE
    )
    for before, after in zip(source, target, strict=True):
        assert torch.equal(after[0], before[5]) and torch.equal(after[9], before[1])


def test_host_pools_patched_twice_are_never_pinned() -> None:
    class Pool:
        def __init__(self, size: int, pin_memory: bool) -> None:
            self.size, self.pinned = size, pin_memory

    cpu_platform._never_pin(Pool)
    patched = Pool.__init__
    cpu_platform._never_pin(Pool)
    assert Pool.__init__ is patched
    assert Pool(3, True).pinned is False and Pool(size=3, pin_memory=True).size == 3


@pytest.mark.parametrize(
    ("num_ranks", "cores", "expected"),
    [
        (2, {0, 1}, "0|1"),
        (2, {4, 1, 7, 2}, "1,4|2,7"),
        (3, {5}, "5|5|5"),
        (4, {0, 1}, "0|1|0|1"),
    ],
)
def test_every_rank_gets_a_core(num_ranks: int, cores: set[int], expected: str) -> None:
    assert cpu_platform.cores_per_rank(num_ranks, cores) == expected

"""Host copies of the platforms without ``sgl_kernel`` against plain indexing."""

from __future__ import annotations

import pytest
import torch

from sglang_tiered.integration.platforms import host_copies

PAGE, LAYERS, NUM_PAGES = 4, 3, 24


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
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([4, 0, 3], [1, 5, 2]),
        ([4, 5, 6, 1], [7, 8, 9, 0]),
        (list(range(20)), list(reversed(range(20)))),  # more than is staged at a time
        (list(range(2, 22)), list(range(20))),
    ],
    ids=["scattered", "a stretch", "reversed", "one stretch"],
)
def test_pages_come_back_where_they_were(
    halves: int,
    device_width: tuple[int, ...],
    host_width: tuple[int, ...],
    source: list[int],
    target: list[int],
) -> None:
    device = [layer for half in range(halves) for layer in make_layers(device_width, half)]
    host = [torch.full((NUM_PAGES, LAYERS, PAGE, *host_width), 7.0) for _ in range(halves)]
    there, back = token_indices(source), token_indices(target)
    host_copies.transfer_kv_all_layer_direct_lf_pf(device, host, there, back, page_size=PAGE)
    for half in range(halves):
        for layer in range(LAYERS):
            pages = device[half * LAYERS + layer].view(NUM_PAGES, PAGE, -1)
            assert torch.equal(host[half][target, layer].flatten(2), pages[source])
    untouched = [page for page in range(NUM_PAGES) if page not in target]
    assert all((half[untouched] == 7.0).all() for half in host)
    restored = [torch.full_like(layer, 7.0) for layer in device]
    for layer in range(LAYERS):
        host_copies.transfer_kv_per_layer_direct_pf_lf(
            host, restored[layer::LAYERS], back, there, layer, page_size=PAGE
        )
    kept = torch.zeros(NUM_PAGES * PAGE, dtype=torch.bool)
    kept[there] = True
    for before, after in zip(device, restored, strict=True):
        assert torch.equal(after[kept], before[kept])
        assert (after[~kept] == 7.0).all()


def test_unpacked_layer_is_refused_instead_of_lost() -> None:
    device = [torch.zeros(NUM_PAGES * PAGE, 2, 16)[:, :, :8] for _ in range(2 * LAYERS)]
    host = [torch.ones(NUM_PAGES, LAYERS, PAGE, 2, 8) for _ in range(2)]
    with pytest.raises(RuntimeError):
        host_copies.transfer_kv_per_layer_direct_pf_lf(
            host, device[:2], token_indices([4]), token_indices([1]), 0, page_size=PAGE
        )


@pytest.mark.parametrize("is_to_host", [True, False], ids=["to host", "to device"])
@pytest.mark.parametrize("slots", [[1, 2, 3, 4], [4, 5, 6], [4, 5, 7, 6], [4, 5, 8, 9]])
def test_slots_across_pages_are_refused(is_to_host: bool, slots: list[int]) -> None:
    """An allocator of tokens hands out the slots from 1 on."""
    given, page = torch.tensor(slots), token_indices([2])
    device = [layer for half in range(2) for layer in make_layers((2, 8), half)]
    host = [torch.full((NUM_PAGES, LAYERS, PAGE, 2, 8), 7.0) for _ in range(2)]
    before = [tensor.clone() for tensor in (*device, *host)]
    with pytest.raises(ValueError, match="whole pages of 4 slots"):
        if is_to_host:
            host_copies.transfer_kv_all_layer_direct_lf_pf(device, host, given, page, PAGE)
        else:
            host_copies.transfer_kv_per_layer_direct_pf_lf(
                host, device[::LAYERS], page, given, 0, PAGE
            )
    assert all(map(torch.equal, before, (*device, *host)))


@pytest.mark.parametrize("is_inference", [False, True])
def test_indices_written_again_copy_other_pages(is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        source, target = make_layers((2, 8), 0), make_layers((2, 8), 1)
        expected = [layer.clone() for layer in target]
        taken, given = token_indices([5, 3]), token_indices([0, 9])
        host_copies.transfer_kv_direct(source, target, taken, given, PAGE)
        taken.copy_(token_indices([6, 1]))
        given.copy_(token_indices([7, 2]))
        host_copies.transfer_kv_direct(source, target, taken, given, PAGE)
        for before, wanted, after in zip(source, expected, target, strict=True):
            wanted[token_indices([0, 9, 7, 2])] = before[token_indices([5, 3, 6, 1])]
            assert torch.equal(after, wanted)

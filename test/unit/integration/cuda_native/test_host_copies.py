"""Host copies without ``sgl_kernel`` against plain indexing, on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_tiered.integration.cuda_native import host_copies

PAGE, LAYERS, NUM_PAGES = 4, 3, 24


def slots(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def layers_of(width: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUM_PAGES * PAGE, *width, generator=generator) for _ in range(LAYERS)]


@pytest.mark.parametrize("halves", [1, 2], ids=["mla", "mha"])
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
def test_pages_come_back_where_they_were(halves: int, source: list[int], target: list[int]) -> None:
    device = [layer for half in range(halves) for layer in layers_of((2, 8), half)]
    host = [torch.full((NUM_PAGES, LAYERS, PAGE, 2, 8), 7.0) for _ in range(halves)]
    host_copies.transfer_kv_all_layer_direct_lf_pf(
        src_ptrs=device,
        dst_ptrs=host,
        src_indices=slots(source),
        dst_indices=slots(target),
        page_size=PAGE,
    )
    for half in range(halves):
        for layer in range(LAYERS):
            pages = device[half * LAYERS + layer].view(NUM_PAGES, PAGE, 2, 8)
            assert torch.equal(host[half][target, layer], pages[source])
    untouched = [page for page in range(NUM_PAGES) if page not in target]
    assert all((half[untouched] == 7.0).all() for half in host)

    restored = [torch.full_like(layer, 7.0) for layer in device]
    for layer in range(LAYERS):
        host_copies.transfer_kv_per_layer_direct_pf_lf(
            src_ptrs=host,
            dst_ptrs=restored[layer::LAYERS],
            src_indices=slots(target),
            dst_indices=slots(source),
            layer_id=layer,
            page_size=PAGE,
        )
    kept = torch.zeros(NUM_PAGES * PAGE, dtype=torch.bool)
    kept[slots(source)] = True
    for before, after in zip(device, restored, strict=True):
        assert torch.equal(after[kept], before[kept])
        assert (after[~kept] == 7.0).all()


def test_layer_first_copy_moves_whole_pages() -> None:
    source, target = layers_of((2, 8), 0), layers_of((2, 8), 1)
    expected = [layer.clone() for layer in target]
    host_copies.transfer_kv_direct(source, target, slots([5, 6, 1]), slots([0, 1, 9]), PAGE)
    for before, wanted, after in zip(source, expected, target, strict=True):
        wanted[slots([0, 1, 9])] = before[slots([5, 6, 1])]
        assert torch.equal(after, wanted)


def test_slots_across_pages_are_refused() -> None:
    device, host = layers_of((2, 8), 0), [torch.zeros(NUM_PAGES, LAYERS, PAGE, 2, 8)]
    with pytest.raises(ValueError, match="whole pages of 4 slots"):
        host_copies.transfer_kv_all_layer_direct_lf_pf(
            device, host, torch.arange(1, 5), slots([2]), page_size=PAGE
        )
    assert (host[0] == 0).all()


def test_copies_of_all_layers_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    original = host_copies.copy_between

    def counting(sources: list[torch.Tensor], *given: Any, **options: Any) -> None:
        launches.append(len(sources))
        original(sources, *given, **options)

    monkeypatch.setattr(host_copies, "copy_between", counting)
    device = [layer for half in range(2) for layer in layers_of((2, 8), half)]
    host = [torch.zeros(NUM_PAGES, LAYERS, PAGE, 2, 8) for _ in range(2)]
    taken, given = slots([3, 4, 9]), slots([0, 7, 2])
    host_copies.transfer_kv_all_layer_direct_lf_pf(device, host, taken, given, PAGE)
    host_copies.transfer_kv_per_layer_direct_pf_lf(host, device[1::LAYERS], given, taken, 1, PAGE)
    host_copies.transfer_kv_direct(device, [d.clone() for d in device], taken, given, PAGE)
    assert launches == [2 * LAYERS, 2, 2 * LAYERS]


def test_indices_written_again_copy_other_pages() -> None:
    source, target = layers_of((2, 8), 0), layers_of((2, 8), 1)
    indices = slots([5])
    host_copies.transfer_kv_direct(source, target, indices, indices, PAGE)
    indices.copy_(slots([6]))
    host_copies.transfer_kv_direct(source, target, indices, indices, PAGE)
    copied = slots([5, 6])
    assert all(torch.equal(t[copied], s[copied]) for s, t in zip(source, target, strict=True))


def test_indices_of_inference_mode_are_copied_too() -> None:
    with torch.inference_mode():
        source, target, indices = layers_of((2, 8), 0), layers_of((2, 8), 1), slots([5])
        host_copies.transfer_kv_direct(source, target, indices, indices, PAGE)
        indices.copy_(slots([6]))
        host_copies.transfer_kv_direct(source, target, indices, indices, PAGE)
        copied = slots([5, 6])
        assert all(torch.equal(t[copied], s[copied]) for s, t in zip(source, target, strict=True))

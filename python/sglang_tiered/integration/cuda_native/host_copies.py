"""Copies between a CUDA device's pools and host pools, in PyTorch, without ``sgl_kernel``.

They have SGLang's names and signatures (``sgl_kernel.kvcacheio``), and run on the current stream of
the thread that calls; nothing waits for them, and SGLang's events say when they are done. Host
memory is registered with CUDA by SGLang's pools. Indices are on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_tiered.integration.cpu.platform import page_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer_direct_pf_lf",
]

STAGED_PAGES = 16
"""Pages gathered on the device at a time, all layers of one half: 64 MiB for an 8B model."""


def transfer_kv_direct(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy whole pages between two layer-first pools, layer by layer. Each layer: [tokens, ...]."""
    src_pages, dst_pages = page_ids(src_indices, page_size), page_ids(dst_indices, page_size)
    for source, target in zip(src_layers, dst_layers, strict=True):
        _copy_rows(_paged(target, page_size), dst_pages, _paged(source, page_size), src_pages)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy device (layer first) to host (page first), every layer.

    ``src_ptrs``: the layers of each half in turn (MHA: K layers, then V layers; MLA: the layers),
    each [tokens, ...]. ``dst_ptrs``: one host buffer per half, [pages, layers, page_size, ...].
    Gathered on the device first, since a copy over the bus costs more to begin than a page of one
    layer takes to move.
    """
    num_layers = len(src_ptrs) // len(dst_ptrs)
    src_pages, dst_pages = page_ids(src_indices, page_size), page_ids(dst_indices, page_size)
    for begin in range(0, len(src_pages), STAGED_PAGES):
        end = begin + STAGED_PAGES
        chosen = torch.tensor(src_pages[begin:end]).to(src_ptrs[0].device, non_blocking=True)
        for half, target in enumerate(dst_ptrs):
            layers = src_ptrs[half * num_layers : (half + 1) * num_layers]
            staged = torch.stack(  # [staged pages, layers, elements]
                [_paged(layer, page_size).index_select(0, chosen) for layer in layers], dim=1
            )
            pages = target.view(target.shape[0], num_layers, -1)
            _copy_rows(pages, dst_pages[begin:end], staged, list(range(len(staged))))


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy host (page first) to device (layer first), one layer; the halves as above."""
    src_pages, dst_pages = page_ids(src_indices, page_size), page_ids(dst_indices, page_size)
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        pages = source.view(source.shape[0], source.shape[1], -1)[:, layer_id]
        _copy_rows(_paged(target, page_size), dst_pages, pages, src_pages)


def _paged(layer: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return [pages, elements] of [tokens, ...]. Raises where that would need a copy."""
    return layer.view(layer.shape[0] // page_size, -1)


def _copy_rows(target: torch.Tensor, to: list[int], source: torch.Tensor, of: list[int]) -> None:
    """Assign ``target[to] = source[of]``, in one copy for rows that follow each other in both."""
    is_packed = target[0].numel() == target.stride(0) and source[0].numel() == source.stride(0)
    for first, start, count in _stretches(to, of, merge=is_packed):
        rows = source[start : start + count]
        target[first : first + count].copy_(rows, non_blocking=True)


def _stretches(to: list[int], of: list[int], *, merge: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (first row of the target, first row of the source, rows)."""
    begin = 0
    for at in range(1, len(to) + 1):
        follows = merge and at < len(to) and (to[at], of[at]) == (to[at - 1] + 1, of[at - 1] + 1)
        if not follows:
            yield to[begin], of[begin], at - begin
            begin = at

"""Copies between a device's pools and host pools, without ``sgl_kernel``.

They have SGLang's names and signatures (``sgl_kernel.kvcacheio``). Indices are on the CPU, and are
read before a call returns. On a CPU the calling thread has copied by then.

On CUDA each call is a launch on the current stream of its thread; nothing waits for it, and
SGLang's events say when it is done. SGLang's pools register host memory with CUDA, so the kernel
reads and writes that memory by its address, over the bus.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from sglang_tiered_kernels.page_copy import copy_between

if TYPE_CHECKING:
    from collections.abc import Sequence

THREAD_BLOCKS = 32
"""Of a launch on CUDA. Each has 8 KiB under way, all together several times what a bus holds; the
rest of the device goes on computing. Not measured yet."""


def transfer_kv_direct(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy whole pages between two layer-first pools, every layer. Each layer: [tokens, ...]."""
    sources = [_paged(layer, page_size) for layer in src_layers]
    targets = [_paged(layer, page_size) for layer in dst_layers]
    _copy(sources, src_indices, targets, dst_indices, page_size)


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
    """
    num_layers = len(src_ptrs) // len(dst_ptrs)
    sources = [_paged(layer, page_size) for layer in src_ptrs]
    targets = [_layer(half, layer) for half in dst_ptrs for layer in range(num_layers)]
    _copy(sources, src_indices, targets, dst_indices, page_size)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy host (page first) to device (layer first), one layer; the halves as above."""
    sources = [_layer(half, layer_id) for half in src_ptrs]
    targets = [_paged(layer, page_size) for layer in dst_ptrs]
    _copy(sources, src_indices, targets, dst_indices, page_size)


FUNCTIONS = (
    transfer_kv_direct,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_per_layer_direct_pf_lf,
)


def _copy(
    sources: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    targets: Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    source, target = sources[0].device, targets[0].device
    copy_between(
        sources,
        _numbers.of("source", src_indices, page_size),
        targets,
        _numbers.of("target", dst_indices, page_size),
        device=target if source.type == "cpu" else source,
        max_blocks=THREAD_BLOCKS,
    )


def page_ids(token_indices: torch.Tensor, page_size: int) -> list[int]:
    """Return the page numbers of token indices. token_indices: [pages * page_size] int64.

    Raises ``ValueError`` if they are not whole pages: other rows would be copied.
    """
    slots = token_indices.numpy()
    first = slots[::page_size]
    whole = (first[:, None] + range(page_size)).reshape(-1)
    if len(slots) % page_size or (first % page_size).any() or (slots != whole).any():
        raise ValueError(
            f"copies are of whole pages of {page_size} slots that begin at a multiple of it, not "
            f"of {', '.join(map(str, slots[: 2 * page_size]))}; allocate pages "
            "(PagedTokenToKVPoolAllocator)."
        )
    ids: list[int] = (first // page_size).tolist()
    return ids


class _PageNumbers(threading.local):
    """Page numbers of the indices that a thread saw last. SGLang hands the same tensors over for
    every layer, and looking at each of their slots takes longer than a launch."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[torch.Tensor, tuple[int, int], list[int]]] = {}

    def of(self, side: str, indices: torch.Tensor, page_size: int) -> list[int]:
        """``page_ids``. side: source or target."""
        if indices.is_inference():  # whose writes nothing counts
            return page_ids(indices, page_size)
        version = indices._version, page_size  # noqa: SLF001 - another if it was written again
        seen = self._seen.get(side)
        if seen is None or seen[0] is not indices or seen[1] != version:
            seen = self._seen[side] = (indices, version, page_ids(indices, page_size))
        return seen[2]


_numbers = _PageNumbers()


def _paged(layer: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return [pages, bytes] of [tokens, ...]. Raises where that would need a copy."""
    return layer.view(layer.shape[0] // page_size, -1).view(torch.uint8)


def _layer(half: torch.Tensor, layer: int) -> torch.Tensor:
    """Return [pages, bytes] of one layer of [pages, layers, page_size, ...]."""
    return half.view(half.shape[0], half.shape[1], -1).view(torch.uint8)[:, layer]

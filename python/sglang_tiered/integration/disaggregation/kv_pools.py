"""SGLang's KV pools, as ``transfer`` wants them: their layout, and access to their pages.

Pools in device memory are gathered there and staged through pinned host memory, with plain torch
operations on a stream of their own, one buffer at a time, each waited for. Written without a CUDA
device; the tests run it on CPU tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.arg_groups.model_override_base import model_config_of

from sglang_tiered.codecs.dtypes import FLOAT_DTYPES
from sglang_tiered.errors import TransferError
from sglang_tiered.transfer.memory import Buffer, HostMemory, Memories, PagedMemory
from sglang_tiered.transfer.messages import KVLayout, StateLayout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from sglang_tiered.transfer.memory import Bytes, Pages, TokenSlice

__all__ = ["DeviceMemory", "at_rank", "host_memory_of", "layout_of", "memories_of"]

DRAFT_LAYERS = 1 << 20
"""Added to the layer numbers of a draft model's KV, which begin at 0 as the target's do."""


def layout_of(args: Any, server_args: Any, is_mla: bool | None, codec: str) -> KVLayout:
    """The layout that SGLang's ``KVArgs`` describe, without the rank (see ``at_rank``)."""
    heads = 0 if is_mla else int(getattr(args, "total_kv_head_num", 0) or 0)
    return KVLayout(
        args.page_size,
        args.kv_cache_dtype_str,
        list(args.kv_item_lens),
        _layer_ids(args, is_mla=bool(is_mla)),
        0,
        1,
        heads,
        [
            StateLayout(str(getattr(kind, "value", kind)), list(row_bytes))
            for kind, row_bytes in zip(args.state_types, args.state_item_lens, strict=True)
        ],
        list(args.aux_item_lens),
        "" if codec == "none" else _element(args, server_args),
        codec,
    )


def _element(args: Any, server_args: Any) -> str:
    """The element format of a page, as ``KVLayout`` names it. Empty for formats that no lossy codec
    takes, and beside a draft model, whose part of the pool may have another format."""
    name = str(args.kv_cache_dtype_str)
    if name == "auto":
        name = str(model_config_of(server_args).dtype).removeprefix("torch.")
    name = {"bf16": "bfloat16"}.get(name, name)
    return name if name in FLOAT_DTYPES and not args.num_draft_entries else ""


def at_rank(layout: KVLayout, tp_rank: int, tp_size: int) -> KVLayout:
    """The layout with a tensor-parallel rank filled in."""
    return msgspec.structs.replace(layout, tp_rank=tp_rank, tp_size=tp_size)


def memories_of(args: Any, device: str) -> Memories:
    """The pools by address, on ``device`` (``cpu`` or one of CUDA). SGLang keeps them for the life
    of the process. Metadata is always in host memory."""

    def memory(addresses: list[int], sizes: list[int], page_bytes: list[int]) -> PagedMemory:
        buffers = _buffers(addresses, sizes, page_bytes)
        return HostMemory(buffers) if device == "cpu" else DeviceMemory(buffers, device)

    return Memories(
        memory(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens),
        [
            memory(*parts)
            for parts in zip(
                args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True
            )
        ],
        HostMemory(_buffers(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)),
    )


def host_memory_of(args: Any) -> PagedMemory | None:
    """The host tier's pool, if SGLang lets decode receive into it."""
    if not args.host_kv_data_ptrs:
        return None
    return HostMemory(
        _buffers(args.host_kv_data_ptrs, args.host_kv_data_lens, args.host_kv_item_lens)
    )


def _buffers(addresses: list[int], sizes: list[int], page_bytes: list[int]) -> list[Buffer]:
    return [
        Buffer(int(address), int(size), int(page))
        for address, size, page in zip(addresses, sizes, page_bytes, strict=True)
    ]


def _layer_ids(args: Any, *, is_mla: bool) -> list[int]:
    """A layer number per buffer: SGLang's own if it gives them, else counted from the rank's first
    layer in SGLang's order (all K, then all V; one buffer per layer for latent attention)."""
    num_buffers, num_draft = len(args.kv_data_ptrs), int(args.num_draft_entries or 0)
    if args.kv_layer_ids:
        return list(args.kv_layer_ids)
    num_target = num_buffers - num_draft
    first = int(getattr(args, "prefill_start_layer", 0) or 0)
    per_layer = 1 if is_mla or args.mla_compression_ratios is not None else 2
    if num_target % per_layer:
        raise TransferError(
            f"this model's pool has {num_target} KV buffers, which are not one K and one V per "
            "layer; its disaggregation over zmq is not supported."
        )
    layers = range(first, first + num_target // per_layer)
    return [*layers] * per_layer + [DRAFT_LAYERS + index for index in range(num_draft)]


class _Pointer:
    """Device memory by address, in the form that torch takes without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class DeviceMemory:
    """``PagedMemory`` over buffers of one device; ``cpu`` for tests. The caller keeps the pool
    alive."""

    is_host = False

    def __init__(self, buffers: Sequence[Buffer], device: str) -> None:
        self.buffers = tuple(buffers)
        self._device = torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        self._stream: Any = (
            torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            if self._is_cuda
            else None
        )
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._views = [self._view(buffer) for buffer in self.buffers]

    def gather(self, buffer: int, pages: Pages, part: TokenSlice | None, out: Bytes) -> None:
        """Copy pages out of the pool. SGLang has computed them: it sends them only then."""
        with self._on_stream():
            rows = self._rows(buffer, part)[self._index(pages)].reshape(-1)
            staged = self._staged(out.nbytes)
            staged.copy_(rows, non_blocking=True)
            self.flush()
        out[:] = staged.numpy()

    def scatter(self, buffer: int, pages: Pages, part: TokenSlice | None, data: Bytes) -> None:
        """Copy pages into the pool. Waits until they are there, so ``data`` may be used again."""
        with self._on_stream():
            staged = self._staged(data.nbytes)
            staged.numpy()[:] = data
            rows = self._rows(buffer, part)
            values = staged.to(self._device, non_blocking=True)
            rows[self._index(pages)] = values.reshape(len(pages), *rows.shape[1:])
            self.flush()

    def flush(self) -> None:
        """Returns when all that was scattered may be read, on any stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _view(self, buffer: Buffer) -> torch.Tensor:
        num_rows = buffer.num_bytes // buffer.page_bytes
        size = num_rows * buffer.page_bytes
        if self._is_cuda:
            flat = torch.as_tensor(_Pointer(buffer.address, size), device=self._device)
        else:
            memory: Any = (ctypes.c_ubyte * size).from_address(buffer.address)
            flat = torch.frombuffer(memory, dtype=torch.uint8)
        return flat.reshape(num_rows, buffer.page_bytes)

    def _rows(self, buffer: int, part: TokenSlice | None) -> torch.Tensor:
        view = self._views[buffer]
        if part is None:
            return view
        return view.reshape(len(view), -1, part.token_bytes)[:, :, part.low : part.high]

    def _index(self, pages: Pages) -> torch.Tensor:
        return torch.from_numpy(pages).to(self._device, torch.int64)

    def _staged(self, num_bytes: int) -> torch.Tensor:
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        return self._staging[:num_bytes]

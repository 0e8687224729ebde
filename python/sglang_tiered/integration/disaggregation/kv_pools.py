"""SGLang's KV pools, as ``transfer`` wants them: their layout, and access to their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.runtime_context import get_device

from sglang_tiered.codecs import LOSSY_CODEC_NAMES, NO_CODEC
from sglang_tiered.codecs.base import FLOAT_DTYPES
from sglang_tiered.errors import TransferError
from sglang_tiered.integration.disaggregation.device_memory import DeviceMemory
from sglang_tiered.transfer.memory import Buffer, HostMemory, Memories, TokenSlice
from sglang_tiered.transfer.messages import KVLayout, StateLayout

if TYPE_CHECKING:
    from sglang_tiered.transfer.memory import PagedMemory


DRAFT_LAYERS = 1 << 20
"""Added to the layer numbers of a draft model's KV, which begin at 0 as the target's do."""


def layout_of(manager: Any, codec: str) -> KVLayout:
    """The layout that the ``KVArgs`` of SGLang's manager describe, at its tensor-parallel rank.
    Raises ``TransferError`` for a codec that does not know its elements."""
    args, server_args, is_mla = manager.kv_args, manager.server_args, manager.is_mla_backend
    element = "" if codec == NO_CODEC else _element(args, server_args)
    if codec in LOSSY_CODEC_NAMES and not element:
        raise TransferError(
            f"--transfer-codec {codec} cannot be used with a KV cache of "
            f"{args.kv_cache_dtype_str}, which is not one of floats of 2 or 4 bytes; drop it."
        )
    heads = 0 if is_mla else int(getattr(args, "total_kv_head_num", 0) or 0)
    return KVLayout(
        args.page_size,
        args.kv_cache_dtype_str,
        list(args.kv_item_lens),
        _layer_ids(args, is_mla=bool(is_mla)),
        manager.attn_tp_rank,
        manager.attn_tp_size,
        heads,
        [
            StateLayout(str(getattr(kind, "value", kind)), list(row_bytes))
            for kind, row_bytes in zip(args.state_types, args.state_item_lens, strict=True)
        ],
        list(args.aux_item_lens),
        element,
        codec,
    )


def format_of(args: Any, server_args: Any) -> str:
    """The number format of an element of KV, by one name however it was asked for."""
    name = str(args.kv_cache_dtype_str)
    if name == "auto":
        name = str(model_config_of(server_args).dtype).removeprefix("torch.")
    return {"bf16": "bfloat16"}.get(name, name)


def _element(args: Any, server_args: Any) -> str:
    """The element format of a page, as ``KVLayout`` names it. Empty for formats that no lossy codec
    takes, and beside a draft model, whose part of the pool may have another format."""
    name = format_of(args, server_args)
    return name if name in FLOAT_DTYPES and not args.num_draft_entries else ""


def memories_of(args: Any, device: str) -> Memories:
    """The pools by address, on ``device`` (``cpu`` or one of CUDA). SGLang keeps them for the life
    of the process. Metadata is always in host memory."""

    def memory(buffers: list[Buffer], shares: list[TokenSlice]) -> PagedMemory:
        return HostMemory(buffers) if device == "cpu" else DeviceMemory(buffers, device, shares)

    states = zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    return Memories(
        memory(_buffers(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens), _shares(args)),
        [memory(_buffers(*parts), []) for parts in states],
        HostMemory(_buffers(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)),
    )


def _shares(args: Any) -> list[TokenSlice]:
    """A half of the rank's heads, a quarter, and so on down to one: what is sent of each token
    where the other side has more ranks. Empty where a token is not made of heads."""
    shares: list[TokenSlice] = []
    heads = int(getattr(args, "kv_head_num", 0) or 0)
    for page_bytes in sorted(set(args.kv_item_lens)):
        token_bytes, rest = divmod(page_bytes, args.page_size)
        parts = heads
        while parts > 1 and parts % 2 == 0 and not rest:
            parts //= 2
            shares.append(TokenSlice(token_bytes, 0, token_bytes * parts // heads))
    return shares


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
    layer in SGLang's order. That order is all K, then all V, and one buffer per layer for latent
    attention."""
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


def device_of(args: Any) -> str:
    """The device of a rank's pools: ``cpu``, or one of CUDA."""
    device = str(get_device().device)
    return device if device == "cpu" else f"{device}:{args.gpu_id}"


def copied(indices: Any) -> Any:
    """A copy as int32, since SGLang reuses its index buffers. None stays None."""
    return None if indices is None else np.array(indices, np.int32)

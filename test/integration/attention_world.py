"""SGLang's real pools, request table and layers around an attention backend, without a server.

For the tests of attention backends, here and in ``test/unit/integration``.
"""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns about kernels a CPU does not have
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import (
        MHATokenToKVPool,
        MLATokenToKVPool,
        ReqToTokenPool,
    )
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

HEADS, KV_HEADS, DIM, SLOTS = 6, 2, 16, 1024


class World:
    """A request table and one KV pool, with slots dealt at random. Sequences own rows 1, 2, ...;
    unowned slots hold NaN."""

    def __init__(self, pool: Any, encoders: list[int] | None = None) -> None:
        self.pool = pool
        self.table = ReqToTokenPool(
            size=8, max_context_len=512, device="cpu", enable_memory_saver=False
        )
        self.runner: Any = SimpleNamespace(
            device="cpu",
            req_to_token_pool=self.table,
            token_to_kv_pool=pool,
            use_mla_backend=isinstance(pool, MLATokenToKVPool),
        )
        self.free = (torch.randperm(SLOTS - 1) + 1).tolist()
        self.lengths: list[int] = []
        self.encoders = encoders or []

    def forward_batch(self, mode: ForwardMode, steps: list[int]) -> ForwardBatch:
        """Lengthen sequence ``i`` by ``steps[i]``, creating those that do not exist yet."""
        before = self.lengths + [0] * (len(steps) - len(self.lengths))
        after = [length + step for length, step in zip(before, steps, strict=True)]
        written = []
        for i, (low, high) in enumerate(zip(before, after, strict=True)):
            shift = self.encoders[i] if self.encoders else 0
            first = shift + low if low else 0  # the encoder's slots come with the first tokens
            slots = torch.tensor([self.free.pop() for _ in range(shift + high - first)])
            self.table.req_to_token[i + 1, first : shift + high] = slots.int()
            written.append(slots[len(slots) - steps[i] :])
        self.lengths = after
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(steps),
            input_ids=torch.zeros(sum(steps), dtype=torch.int64),
            req_pool_indices=torch.arange(1, len(steps) + 1),
            seq_lens=torch.tensor(after),
            out_cache_loc=torch.cat(written).long(),
            seq_lens_sum=sum(after),
        )
        if mode.is_extend():
            batch.extend_seq_lens = torch.tensor(steps, dtype=torch.int32)
            batch.extend_prefix_lens = torch.tensor(before, dtype=torch.int32)
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = list(steps), before
        if self.encoders:
            batch.encoder_lens = torch.tensor(self.encoders)
        return batch


def mha_pool(dtype: torch.dtype = torch.float32, layers: int = 1) -> MHATokenToKVPool:
    pool = MHATokenToKVPool(
        size=SLOTS,
        page_size=1,
        dtype=dtype,
        head_num=KV_HEADS,
        head_dim=DIM,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        if dtype.itemsize > 1:
            buffer.fill_(math.nan)
    return pool


def radix_layer(**options: Any) -> RadixAttention:
    return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, options.pop("layer_id", 0), **options)


def qkv(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(tokens, HEADS * DIM, dtype=dtype),
        torch.randn(tokens, KV_HEADS, DIM, dtype=dtype),
        torch.randn(tokens, KV_HEADS, DIM, dtype=dtype),
    )


def run(backend: Any, batch: ForwardBatch, layer: RadixAttention, *tensors: Any, **kw: Any) -> Any:
    backend.init_forward_metadata(batch)
    return backend.forward(*tensors, layer, batch, **kw)

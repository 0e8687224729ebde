"""SGLang's real pools, request table and layers around an attention backend, without a server.

For the tests of attention backends, here and in ``test/unit/integration``.
"""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns about kernels a CPU does not have
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEADS, KV_HEADS, DIM = 6, 2, 16
SLOTS, SWA_SLOTS = 1024, 512


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


def mla_pool(rank: int, rope: int) -> MLATokenToKVPool:
    pool = MLATokenToKVPool(
        size=SLOTS,
        page_size=1,
        dtype=torch.float32,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    pool.kv_buffer[0].fill_(math.nan)
    return pool


def swa_pool(window_layer: int, dtype: torch.dtype = torch.float32) -> SWAKVPool:
    """Of two layers, one of which has a window; its pool is NaN but for what is written."""
    pool = SWAKVPool(
        size=SLOTS,
        size_swa=SWA_SLOTS,
        page_size=1,
        dtype=dtype,
        head_num=KV_HEADS,
        head_dim=DIM,
        swa_attention_layer_ids=[window_layer],
        full_attention_layer_ids=[1 - window_layer],
        device="cpu",
    )
    pool.swa_kv_pool.k_buffer[0].fill_(math.nan)
    pool.swa_kv_pool.v_buffer[0].fill_(math.nan)
    pool.register_mapping(torch.zeros(SLOTS + 1, dtype=torch.int64))
    return pool


def forget(world: World, window: int) -> None:
    """As SGLang frees what no later query sees: such slots lead to slot 0, which is NaN."""
    for i, length in enumerate(world.lengths):
        behind = world.table.req_to_token[i + 1, : max(0, length - window)]
        world.pool.full_to_swa_index_mapping[behind.long()] = 0


def window_steps(
    make: Callable[[World], Any],
    make_plain: Callable[[World], Any],
    steps: list[tuple[ForwardMode, list[int]]],
    window: int,
) -> Iterator[Any]:
    """Compare each step of a model, whose second layer has a window with a pool of its own, with
    the same over one plain pool; what no later query sees is freed. Yields ``make``'s backend."""
    plain_world, world = World(mha_pool(layers=2)), World(swa_pool(1))
    plain, ours = make_plain(plain_world), make(world)
    layers = [radix_layer(layer_id=0), radix_layer(layer_id=1, sliding_window_size=window)]
    free = (torch.randperm(SWA_SLOTS - 1) + 1).tolist()
    for mode, lengths in steps:
        batch = world.forward_batch(mode, lengths)
        written = torch.tensor([free.pop() for _ in range(sum(lengths))])
        world.pool.full_to_swa_index_mapping[batch.out_cache_loc] = written
        plain_batch = plain_world.forward_batch(mode, lengths)
        ours.init_forward_metadata(batch)
        plain.init_forward_metadata(plain_batch)
        tensors = qkv(sum(lengths))
        for layer in layers:
            found = ours.forward(*tensors, layer, batch)
            expected = plain.forward(*tensors, layer, plain_batch)
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)
        yield ours
        forget(world, window)


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

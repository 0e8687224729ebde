"""The ``reference`` attention backend on SGLang's real pools and layers, without a server."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from attention_world import (
    DIM,
    HEADS,
    KV_HEADS,
    World,
    mha_pool,
    mla_pool,
    qkv,
    radix_layer,
    run,
    window_steps,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_parallel

    from sglang_tiered.integration.attention.reference import ReferenceAttnBackend

STEPS = [
    (ForwardMode.EXTEND, [40, 1, 90]),
    (ForwardMode.EXTEND, [28, 3, 1]),
    (ForwardMode.DECODE, [1, 1, 1]),
    (ForwardMode.MIXED, [1, 1, 17]),
    (ForwardMode.DECODE, [1, 1, 1]),
]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    # Tensors this small lose to the hand-over between threads, most of all on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def equals_native(
    world: World,
    layer: RadixAttention,
    steps: list[tuple[ForwardMode, list[int]]],
    tensors_of: Callable[[int], tuple[torch.Tensor, ...]] = qkv,
    tolerance: float = 2e-6,
) -> None:
    native, ours = TorchNativeAttnBackend(world.runner), ReferenceAttnBackend(world.runner)
    for mode, lengths in steps:
        batch, tensors = world.forward_batch(mode, lengths), tensors_of(sum(lengths))
        actual = run(ours, batch, layer, *tensors)
        expected = run(native, batch, layer, *tensors)
        assert not actual.isnan().any()
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [-1, 20], ids=["full", "window"])
def test_every_step_of_a_batch_equals_torch_native(dtype: torch.dtype, window: int) -> None:
    layer = radix_layer(sliding_window_size=window)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    equals_native(World(mha_pool(dtype)), layer, STEPS, partial(qkv, dtype=dtype), tolerance)


def test_an_fp8_pool_equals_torch_native() -> None:
    equals_native(World(mha_pool(torch.float8_e4m3fn)), radix_layer(), STEPS[:3])


def test_layer_without_own_keys_does_not_write() -> None:
    world = World(mha_pool())
    layer = radix_layer()
    ours = ReferenceAttnBackend(world.runner)
    batch = world.forward_batch(ForwardMode.EXTEND, [9])
    query, key, value = qkv(9)
    first = run(ours, batch, layer, query, key, value)
    written = world.pool.k_buffer[0].clone()
    assert torch.equal(ours.forward(query, None, None, layer, batch), first)
    ours.forward(query, key + 1, value, layer, batch, save_kv_cache=False)
    # As SGLang's hybrid linear-attention backend calls the one it wraps.
    ours.forward_extend(query, key + 1, value, layer, batch, False)
    assert torch.equal(world.pool.k_buffer[0].nan_to_num(), written.nan_to_num())


def test_soft_cap_and_sinks_reach_the_scores() -> None:
    world = World(mha_pool())
    ours = ReferenceAttnBackend(world.runner)
    batch = world.forward_batch(ForwardMode.EXTEND, [1])
    query, key, value = qkv(1)
    alone = value.repeat_interleave(HEADS // KV_HEADS, dim=1).flatten(1)
    # One key: its weight is 1 whatever the cap, and exp(s) / (exp(s) + exp(sink)) with a sink.
    capped = radix_layer(logit_cap=0.5)
    torch.testing.assert_close(run(ours, batch, capped, query, key, value), alone)
    sinks = torch.linspace(-1, 1, HEADS)
    scores = (query.view(HEADS, DIM) * key[0].repeat_interleave(3, dim=0)).sum(-1) * DIM**-0.5
    capped_scores = 0.5 * torch.tanh(scores / 0.5)
    weights = torch.sigmoid(capped_scores - sinks).repeat_interleave(DIM)
    torch.testing.assert_close(
        run(ours, batch, capped, query, key, value, sinks=sinks), alone * weights
    )
    step = world.forward_batch(ForwardMode.DECODE, [1])
    plain = run(ours, step, radix_layer(), *qkv(1))
    assert not torch.allclose(plain, run(ours, step, capped, *qkv(1), sinks=sinks))


def test_sliding_layers_read_their_pool_at_translated_slots() -> None:
    """Compared where torch_native is right."""

    def ours(world: World) -> ReferenceAttnBackend:
        return ReferenceAttnBackend(world.runner)

    def native(world: World) -> TorchNativeAttnBackend:
        return TorchNativeAttnBackend(world.runner)

    assert len(list(window_steps(ours, native, STEPS, window=12))) == len(STEPS)


def test_absorbed_mla_reads_values_from_latent_keys() -> None:
    rank, rope = 32, 8
    layer = RadixAttention(HEADS, rank + rope, 0.2, 1, 0, v_head_dim=rank)

    def tensors_of(tokens: int) -> tuple[torch.Tensor, ...]:
        """``forward_mla`` passes the query in three dimensions and the latent's head as value."""
        latent = torch.randn(tokens, 1, rank + rope)
        return torch.randn(tokens, HEADS, rank + rope), latent, latent[..., :rank]

    with get_parallel().override(dcp_enabled=False):
        equals_native(World(mla_pool(rank, rope)), layer, STEPS, tensors_of)


def test_cross_and_self_attention_read_separate_slots() -> None:
    world = World(mha_pool(layers=2), encoders=[20, 0, 33])
    cross = radix_layer(layer_id=0, is_cross_attention=True)
    layer = radix_layer(layer_id=1)
    native, ours = TorchNativeAttnBackend(world.runner), ReferenceAttnBackend(world.runner)
    for mode, steps in [(ForwardMode.EXTEND, [40, 5, 50]), (ForwardMode.DECODE, [1, 1, 1])]:
        batch = world.forward_batch(mode, steps)
        query, key, value = qkv(sum(steps))
        encoder_key = encoder_value = None
        if mode.is_extend():
            slots = [world.table.req_to_token[i + 1, :n] for i, n in enumerate(world.encoders)]
            batch.encoder_out_cache_loc = torch.cat(slots).long()
            encoder_key, encoder_value = (torch.randn(53, KV_HEADS, DIM) for _ in range(2))
        ours.init_forward_metadata(batch)
        native.init_forward_metadata(batch)
        for one, k, v in ((cross, encoder_key, encoder_value), (layer, key, value)):
            actual = ours.forward(query, k, v, one, batch)
            expected = native.forward(query, k, v, one, batch)
            # Without an encoder torch_native divides zero by zero.
            torch.testing.assert_close(actual, expected.nan_to_num(), atol=2e-6, rtol=2e-6)


def test_an_encoder_only_layer_sees_later_tokens() -> None:
    layer = radix_layer(attn_type=AttentionType.ENCODER_ONLY)
    equals_native(World(mha_pool()), layer, [(ForwardMode.EXTEND, [30, 1, 7])])


def test_unsupported_attention_is_refused() -> None:
    world = World(mha_pool())
    ours = ReferenceAttnBackend(world.runner)
    batch = world.forward_batch(ForwardMode.EXTEND, [4])
    grok = radix_layer()
    grok.xai_temperature_len = 1024
    with pytest.raises(NotImplementedError, match="temperature"):
        run(ours, batch, grok, *qkv(4))
    with pytest.raises(NotImplementedError, match="capping"):
        run(ours, batch, radix_layer(logit_cap=1.0, logit_capping_method="sigmoid"), *qkv(4))
    verify = world.forward_batch(ForwardMode.TARGET_VERIFY, [4])
    verify.extend_seq_lens = None
    with pytest.raises(NotImplementedError, match="TARGET_VERIFY"):
        ours.init_forward_metadata(verify)

"""The ``pod`` attention backend: what it takes, what it leaves, and that both come to the same."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import flash_kernels
import pytest
import torch
from attention_world import (
    DIM,
    HEADS,
    World,
    mha_pool,
    mla_pool,
    qkv,
    radix_layer,
    run,
    window_steps,
)

from sglang_tiered.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    from sglang_tiered.integration.attention import pod_flags, pod_flashinfer
    from sglang_tiered.integration.attention.pod import PodStatistics, why_not
    from sglang_tiered.integration.attention.reference import (
        ReferenceAttnBackend,
        ReferencePodAttnBackend,
    )


# Prefill, then a chunk with two rows decoding, then all decode, then one more mixed batch.
STEPS = [
    (ForwardMode.EXTEND, [40, 9, 90]),
    (ForwardMode.EXTEND, [28, 1, 1]),
    (ForwardMode.DECODE, [1, 1, 1]),
    (ForwardMode.MIXED, [1, 17, 1]),
]
MIXED_STEPS = (1, 3)
DECODE_ROWS = 4
TOLERANCE = {"atol": 2e-6, "rtol": 2e-6}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ReferencePodAttnBackend, "statistics", PodStatistics())
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def runner(world: World, page_size: int = 1) -> Any:
    world.runner.page_size = page_size
    return world.runner


def both(world: World) -> tuple[ReferencePodAttnBackend, ReferenceAttnBackend]:
    return ReferencePodAttnBackend(runner(world)), ReferenceAttnBackend(world.runner)


@pytest.mark.parametrize(
    ("options", "extras", "reason"),
    [
        ({"sliding_window_size": 12, "logit_cap": 30.0}, {"score_mod": None}, None),
        ({"is_cross_attention": True}, {}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, {}, "encoder_only attention"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, {}, "decoder_bidirectional attention"),
        ({"v_head_dim": 8}, {}, "keys and values of different sizes"),
        ({"logit_cap": 1.0, "logit_capping_method": "sigmoid"}, {}, "sigmoid logit cap"),
        ({}, {"score_mod": object()}, "score_mod"),
        ({}, {"aux_tensors": None, "idx_q": 1}, "idx_q"),
        ({"xai_temperature_len": 1024}, {}, "attention temperature"),
    ],
)
def test_layer_with_other_scores_goes_to_the_parent(
    options: dict[str, Any], extras: dict[str, Any], reason: str | None
) -> None:
    of_grok = {name: options[name] for name in options if name.startswith("xai")}
    layer = radix_layer(**{name: options[name] for name in options if name not in of_grok})
    vars(layer).update(of_grok)
    assert why_not(layer, extras) == reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [-1, 20], ids=["full", "window"])
def test_every_step_equals_the_reference(dtype: torch.dtype, window: int) -> None:
    world = World(mha_pool(dtype))
    pod, reference = both(world)
    layer = radix_layer(sliding_window_size=window)
    tolerance = TOLERANCE if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    for i, (mode, steps) in enumerate(STEPS):
        batch = world.forward_batch(mode, steps)
        batch.spec_info = EagleDraftInput() if mode is ForwardMode.MIXED else None  # are mixed too
        tensors = qkv(sum(steps), dtype)
        before = pod.statistics.layers
        actual = run(pod, batch, layer, *tensors)
        assert pod.statistics.layers - before == (i in MIXED_STEPS)
        torch.testing.assert_close(actual, run(reference, batch, layer, *tensors), **tolerance)
    assert pod.statistics.state()["decode_rows"] == DECODE_ROWS


def mixed_world(pool: Any | None = None) -> tuple[World, Any, Any, Any]:
    """A world whose next batch has a prefill row and two decode rows, and both backends."""
    world = World(pool or mha_pool())
    batch = world.forward_batch(ForwardMode.EXTEND, [40, 9, 30])
    ReferenceAttnBackend(world.runner).init_forward_metadata(batch)
    run(ReferenceAttnBackend(world.runner), batch, radix_layer(), *qkv(79))
    return world, world.forward_batch(ForwardMode.EXTEND, [28, 1, 1]), *both(world)


def test_new_keys_enter_the_pool_before_reads() -> None:
    world, batch, pod, _ = mixed_world()
    query, key, value = qkv(30)
    run(pod, batch, radix_layer(), query, key, value)
    assert torch.equal(world.pool.k_buffer[0][batch.out_cache_loc], key)
    assert torch.equal(world.pool.v_buffer[0][batch.out_cache_loc], value)
    # As a model does whose rotary kernel has written them already.
    world.pool.k_buffer[0][batch.out_cache_loc] += 1
    written = world.pool.k_buffer[0].clone()
    pod.forward_extend(query, key, value, radix_layer(), batch, False)
    assert torch.equal(world.pool.k_buffer[0].nan_to_num(), written.nan_to_num())


def test_soft_cap_and_sinks_reach_the_kernels() -> None:
    _, batch, pod, reference = mixed_world()
    layer = radix_layer(logit_cap=0.5)
    tensors, sinks = qkv(30), torch.linspace(-1, 1, HEADS)
    actual = run(pod, batch, layer, *tensors, sinks=sinks)
    assert pod.statistics.layers == 1
    torch.testing.assert_close(actual, run(reference, batch, layer, *tensors, sinks=sinks))
    assert not torch.allclose(actual, run(pod, batch, radix_layer(), *tensors))


def test_unsupported_arguments_go_to_the_parent_and_count() -> None:
    _, batch, pod, reference = mixed_world()
    layer = radix_layer(attn_type=AttentionType.ENCODER_ONLY)
    tensors = qkv(30)
    expected = run(reference, batch, layer, *tensors)
    assert torch.equal(run(pod, batch, layer, *tensors), expected)
    query, key, value = qkv(30)
    first = run(pod, batch, radix_layer(), query, key, value)
    shared = pod.forward(query, None, None, radix_layer(), batch)
    torch.testing.assert_close(shared, first, **TOLERANCE)
    assert pod.statistics.left == Counter(["encoder_only attention", "keys of another layer"])
    assert pod.statistics.layers == 1


def test_plan_never_attends_more_tokens_than_planned() -> None:
    _, batch, pod, _ = mixed_world()
    pod.init_forward_metadata(batch)
    plan = pod._plan(pod._forward, torch.zeros(32, HEADS * DIM), qkv(32)[1], radix_layer(), {})
    assert plan == "other tokens than planned"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("forward_mode", ForwardMode.TARGET_VERIFY),
        ("forward_mode", ForwardMode.DLLM_EXTEND),
        ("forward_mode", ForwardMode.SPLIT_PREFILL),
        ("extend_prefix_lens_cpu", None),  # lengths on the device are not awaited
        ("extend_seq_lens_cpu", None),
    ],
)
def test_batch_with_its_own_mask_is_not_taken(field: str, value: Any) -> None:
    _, batch, pod, _ = mixed_world()
    setattr(batch, field, value)
    pod.init_forward_metadata(batch)
    assert pod._forward is None


def test_latent_attention_is_the_parents() -> None:
    world = World(mla_pool(32, 8))
    pod, _ = both(world)
    world.forward_batch(ForwardMode.EXTEND, [9, 9])
    pod.init_forward_metadata(world.forward_batch(ForwardMode.EXTEND, [9, 1]))
    assert pod._forward is None


def test_a_plan_does_not_outlive_its_forward() -> None:
    world, batch, pod, _ = mixed_world()
    pod.init_forward_metadata(batch)
    assert pod._forward is not None
    pod.init_forward_metadata_out_graph(batch)  # a captured forward follows
    assert pod._forward is None
    pod.init_forward_metadata(batch)
    pod.init_forward_metadata(world.forward_batch(ForwardMode.DECODE, [1, 1, 1]))
    assert pod._forward is None


def test_window_never_reads_its_freed_keys() -> None:
    def ours(world: World) -> ReferencePodAttnBackend:
        # With pages, since a window's slots must not be taken to follow them.
        return ReferencePodAttnBackend(runner(world, page_size=4))

    for pod in window_steps(ours, lambda world: ReferenceAttnBackend(world.runner), STEPS, 12):
        if pod._forward is not None:
            sizes = {window: shape.page_size for shape, window in pod._forward.plans}
            assert sizes == {-1: 4, 12: 1}
    assert pod.statistics.layers == 2 * len(MIXED_STEPS)


POD = {"attention_backend": "pod"}
MIXED = {**POD, "enable_mixed_chunk": True}


@pytest.mark.parametrize(
    ("explicit", "sentence"),
    [
        ({"decode_attention_backend": "pod"}, "would never see a mixed batch.* its default;"),
        ({**POD, "prefill_attention_backend": "fa3"}, "never see a mixed batch.*here fa3;"),
        ({**POD, "enable_deterministic_inference": True}, "--enable-deterministic-inference; drop"),
        ({"prefill_attention_backend": "pod", "speculative_algorithm": "EAGLE"}, "-backend triton"),
        ({**MIXED, "chunked_prefill_size": 100}, "100 has no whole page of 64 left .*at least 128"),
        ({**MIXED, "chunked_prefill_size": 128}, None),
        ({**POD, "decode_attention_backend": "fa3"}, None),
    ],
)
def test_flags_that_void_the_backend_are_refused(
    explicit: dict[str, Any], sentence: str | None
) -> None:
    with pytest.raises(ConfigError, match=sentence) if sentence else nullcontext():
        pod_flags.check_arguments(explicit, page_size=64)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_flash_mixes_no_deterministic_batches(is_deterministic: bool) -> None:
    no = ("use_mla", "is_encoder_decoder", "has_local_attention", "is_prefill_aware_swa")
    no += ("kv_cache_is_mxfp8", "fa_skip_kv_cache")
    with flash_kernels.installed():
        from sglang_tiered.integration.attention.pod_flash import FlashPodAttnBackend
    made = FlashPodAttnBackend.__new__(FlashPodAttnBackend)
    vars(made).update(dict.fromkeys(no, False), attn_cp_size=1, _kv_shard_pool=None)
    flags = {"enable_deterministic_inference": is_deterministic}
    with get_context().override_server_args(**flags):
        assert made.serves is not is_deterministic


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"enable_deterministic": True},
        {"enable_mis": True},
        {"is_dllm_model": True},
        {"prefill_uses_dequant_workspace": True},
        {"dispatch_reason": pod_flashinfer.WrapperDispatch.CROSS_ATTENTION},
        {"_swa_kv_pool": object()},
    ],
    ids=lambda setting: next(iter(setting), "plain"),
)
def test_flashinfer_keeps_batches_with_other_masks(setting: dict[str, Any]) -> None:
    made = pod_flashinfer.FlashInferPodAttnBackend.__new__(pod_flashinfer.FlashInferPodAttnBackend)
    no = ("enable_deterministic", "enable_mis", "is_dllm_model", "prefill_uses_dequant_workspace")
    vars(made).update(dict.fromkeys(no, False), dispatch_reason=None, _swa_kv_pool=None)
    vars(made).update(token_to_kv_pool=object(), **setting)
    with get_parallel().override(attn_cp_size=1):
        assert made.serves is not bool(setting)
    # All of them: SGLang compares them with each other once a test of this process has set some.
    apart = dict.fromkeys(("attn_tp_size", "attn_dp_size", "moe_ep_size", "moe_dp_size"), 1)
    with get_parallel().override(tp_size=2, attn_cp_size=2, moe_tp_size=2, **apart):
        assert not made.serves

"""SGLang's Triton attention backend, and the pod backend on top of it, without a server or a GPU.

For a process in Triton's interpreter: the kernels of both then run on CPU tensors, so the
backend that serves CUDA is compared with the one it extends, on SGLang's own pools and metadata.
"""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns about kernels a CPU does not have
    import sglang.srt.server_args  # noqa: F401 - its import warns too
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import flash_kernels
    from attention_world import (
        DIM,
        HEADS,
        KV_HEADS,
        SWA_SLOTS,
        World,
        forget,
        mha_pool,
        qkv,
        radix_layer,
        run,
        swa_pool,
    )
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_context, get_parallel
    from transformers import LlamaConfig

    from sglang_tiered.integration.attention.pod import PodStatistics
    from sglang_tiered.integration.attention.pod_triton import TritonPodAttnBackend

# Prefill, a chunk with two rows decoding, decodes alone, one more mixed batch.
STEPS = [
    (ForwardMode.EXTEND, [40, 9, 30]),
    (ForwardMode.EXTEND, [28, 1, 1]),
    (ForwardMode.DECODE, [1, 1, 1]),
    (ForwardMode.EXTEND, [1, 17, 1]),
]
MIXED_STEPS = (1, 3)


def compare(
    *,
    dtype: torch.dtype = torch.float16,
    window: int = -1,
    own_window_pool: bool = False,
    logit_cap: float = 0.0,
    sinks: bool = False,
    scales: tuple[float, float] | None = None,
    parent: str = "triton",
    paged: bool = False,
    left: bool = False,
) -> None:
    """Run every step through both backends; raise AssertionError where they differ, where a mixed
    step did not go through the POD kernels, or where another one did. dtype: the pool's.
    paged: FlashInfer reads new keys in the pool, as for multimodal models. left: no plan can be
    made, so the parent computes what was prepared for the kernels."""
    torch.manual_seed(0)
    pool = swa_pool(0, torch.float16) if own_window_pool else mha_pool(dtype)
    world = World(pool)
    _complete(world, window, paged)
    layer = radix_layer(sliding_window_size=window, logit_cap=logit_cap)
    if scales is not None:
        layer.k_scale, layer.v_scale = (torch.tensor(scale) for scale in scales)
        layer.k_scale_float, layer.v_scale_float = scales
    options = {"sinks": torch.linspace(-1, 1, HEADS)} if sinks else {}
    free = (torch.randperm(SWA_SLOTS - 1) + 1).tolist()
    with _server_context():
        stock, pod = _backends(parent, world.runner)
        pod.statistics = PodStatistics()
        if left:
            pod._plan = lambda *_: "no plan"
        for backend in (stock, pod):
            backend.device_core_count = backend._num_cores = 4  # of a GPU; it decides splits only
        for i, (mode, steps) in enumerate(STEPS):
            batch = world.forward_batch(mode, steps)
            batch.seq_lens_cpu = batch.seq_lens.clone()
            if own_window_pool:
                written = torch.tensor([free.pop() for _ in range(sum(steps))])
                pool.full_to_swa_index_mapping[batch.out_cache_loc] = written
            world.runner.kv_index_translator.bind_own_plan(batch)
            tensors = qkv(sum(steps), torch.float16)
            before = pod.statistics.layers
            # Ours first: what it does not write itself is not there yet.
            # With copies, since with scales SGLang divides keys and values in place.
            actual = run(pod, batch, layer, *(each.clone() for each in tensors), **options)
            expected = run(stock, batch, layer, *tensors, **options)
            taken = i in MIXED_STEPS and not left
            assert pod.statistics.layers - before == taken, (i, pod.statistics)
            if dtype.itemsize == 1 and not paged:
                # Stock reads a chunk's own keys and values as the model gave them, and rounds its
                # queries; we read everything as it was stored.
                assert (actual - expected).norm() < 0.1 * expected.norm(), i
            else:
                torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)
            if own_window_pool:
                forget(world, window)
    assert pod.statistics.left == ({"no plan": len(MIXED_STEPS)} if left else {})


def _backends(parent: str, runner: Any) -> tuple[Any, Any]:
    if parent == "triton":
        return TritonAttnBackend(runner), TritonPodAttnBackend(runner)
    if parent == "flashinfer":
        stock = flash_kernels.install_flashinfer()
        from sglang_tiered.integration.attention.pod_flashinfer import FlashInferPodAttnBackend

        return stock(runner), FlashInferPodAttnBackend(runner)
    with flash_kernels.installed():
        from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

        from sglang_tiered.integration.attention.pod_flash import FlashPodAttnBackend

        return FlashAttentionBackend(runner), FlashPodAttnBackend(runner)


def _complete(world: World, window: int, paged: bool) -> None:
    """What SGLang's backends want to know of a model runner."""
    world.runner.__dict__.update(
        page_size=1,
        gpu_id=0,
        is_draft_worker=False,
        sliding_window_size=window if window >= 0 else None,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: world.pool),
        prefill_attention_backend_str="pod",
        decode_attention_backend_str="pod",
        server_args=SimpleNamespace(dllm_algorithm=None),
        dtype=torch.float16,
        decode_num_tokens_per_req=lambda: 1,
        spec_algorithm=SimpleNamespace(is_dspark=lambda: False),
        kv_cache_dtype=world.pool.dtype,
        kv_cache_dtype_str="float16",
        model_config=SimpleNamespace(
            attention_arch=AttentionArch.MHA,
            is_encoder_decoder=False,
            context_len=512,
            is_local_attention_model=False,
            head_dim=DIM,
            v_head_dim=DIM,
            swa_v_head_dim=DIM,
            get_max_num_attention_heads=lambda: HEADS,
            get_num_kv_heads=lambda ranks, dcp=1: KV_HEADS,
            num_attention_heads=HEADS,
            is_multimodal=paged,
            hf_config=LlamaConfig(architectures=["LlamaForCausalLM"]),
            linear_attn_registry_result=None,
            hf_text_config=SimpleNamespace(num_attention_heads=HEADS),
        ),
        kv_index_translator=KVIndexTranslator(
            req_to_token=world.table.req_to_token,
            token_to_kv_pool_allocator=None,
            token_to_kv_pool=world.pool,
            page_size=1,
            device="cpu",
        ),
    )


@contextlib.contextmanager
def _server_context() -> Any:
    with (
        get_context().override_server_args(model_path="none", device="cpu"),
        get_parallel().override(attn_dcp_rank=0),
    ):
        yield

"""Makes ``--attention-backend pod`` and ``reference`` known to SGLang, and the backend ``pod`` of a
runner's device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.attention import reference
from sglang_tiered.integration.attention.pod import NAME, PodAttention, compile_kernels
from sglang_tiered.integration.compat import check_signatures
from sglang_tiered_kernels.pod_attention import PodShape, supports

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


logger = logging.getLogger(__name__)

_FLASH, _FLASHINFER, _TRITON, _REFERENCE = "fa3", "flashinfer", "triton", "reference"
_PARENTS = {
    _FLASH: "SGLang's FlashAttention 3",
    _FLASHINFER: "SGLang's FlashInfer backend",
    _TRITON: "SGLang's Triton backend",
    _REFERENCE: "the reference backend",
}


def register() -> None:
    """Make both names known to SGLang in this process. Idempotent."""
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    for name, create in ((reference.NAME, reference.create), (NAME, _create)):
        if name not in ATTENTION_BACKEND_CHOICES:
            add_attention_backend_choices([name])
        register_attention_backend(name)(create)


def _create(runner: ModelRunner) -> Any:
    """Return the backend for this runner's device. Raises ``ConfigError`` for a model with cross
    attention, which SGLang's Triton backend refuses with an assertion."""
    from sglang.srt.runtime_context import get_schedule

    PodAttention.statistics.serving = True
    on_cpu = torch.device(runner.device).type == "cpu"
    parent = _REFERENCE if on_cpu else _parent_of(runner)
    logger.info(_startup_line(runner, parent))
    if not get_schedule().enable_mixed_chunk:
        logger.warning(
            "attention backend pod: pass --enable-mixed-chunk; without it prefill and decode rows "
            "hardly ever meet in one batch, and this backend changes next to nothing."
        )
    if on_cpu:
        if runner.use_mla_backend:
            reference.always_absorb(NAME)
        return reference.ReferencePodAttnBackend(runner)
    make = {_FLASH: _over_flash, _FLASHINFER: _over_flashinfer, _TRITON: _over_triton}[parent]
    backend = make(runner)
    if backend.serves:
        kinds = compile_kernels(backend, runner.model, runner.dtype)
        logger.info("attention backend pod: kernels for %d kinds of layers are compiled.", kinds)
    return backend


def _parent_of(runner: ModelRunner) -> str:
    """The backend below, by its name. It is SGLang's own choice for this device, if that is
    FlashAttention 3 or FlashInfer and serves the runner, else its Triton backend."""
    from sglang.srt.arg_groups.model_override_base import get_default_attn_backend
    from sglang.srt.runtime_context import get_parallel, get_server_args, get_spec

    # Each has its own class for latent attention, and wants streams and audits for drafts.
    if runner.use_mla_backend or get_spec().speculative_algorithm is not None:
        return _TRITON
    chosen = get_default_attn_backend(get_server_args(), False, runner.model_config)
    serves = {
        _FLASH: runner.kv_cache_dtype != torch.float8_e5m2,
        _FLASHINFER: get_parallel().attn_dcp_size == 1,
    }
    return str(chosen) if serves.get(chosen, False) else _TRITON


def _over_flash(runner: ModelRunner) -> Any:
    from sglang_tiered.integration.attention.pod_flash import SIGNATURES, FlashPodAttnBackend

    check_signatures(SIGNATURES)
    return FlashPodAttnBackend(runner)


def _over_flashinfer(runner: ModelRunner) -> Any:
    from sglang_tiered.integration.attention.pod_flashinfer import (
        SIGNATURES,
        FlashInferPodAttnBackend,
    )

    check_signatures(SIGNATURES)
    return FlashInferPodAttnBackend(runner, init_new_workspace=runner.init_new_workspace)


def _over_triton(runner: ModelRunner) -> Any:
    from sglang_tiered.integration.attention.pod_triton import SIGNATURES, TritonPodAttnBackend

    check_signatures(SIGNATURES)
    if runner.model_config.is_encoder_decoder:
        raise ConfigError(
            "--attention-backend pod has no cross attention, since SGLang's Triton backend below "
            "it has none; pass --attention-backend flashinfer."
        )
    return TritonPodAttnBackend(runner)


def _startup_line(runner: ModelRunner, parent: str) -> str:
    from sglang.srt.runtime_context import get_parallel

    model, ranks = runner.model_config, get_parallel().attn_tp_size
    shape = PodShape(
        num_q_heads=model.get_num_attention_heads(ranks),
        num_kv_heads=model.get_num_kv_heads(ranks),
        head_dim=model.head_dim,
        page_size=runner.page_size,
        q_dtype=runner.dtype,
        kv_dtype=runner.kv_cache_dtype,
    )
    below, reason = _PARENTS[parent], supports(shape, runner.device)
    if runner.use_mla_backend:
        reason = "latent attention has kernels of its own"
    elif model.is_encoder_decoder:
        reason = "an encoder's keys come before its own"
    if reason is not None:
        return f"attention backend pod leaves this model to {below}: {reason}."
    kernels = "the PyTorch form of the POD" if parent == _REFERENCE else "the POD"
    words = (
        f"{shape.num_q_heads} query heads on {shape.num_kv_heads}, head size {shape.head_dim}, "
        f"{shape.q_dtype} on {shape.kv_dtype}, pages of {shape.page_size}"
    ).replace("torch.", "")
    return (
        f"attention backend pod: extends with decode rows, mixed batches above all, go through "
        f"{kernels} kernels ({words}), everything else through {below}."
    )

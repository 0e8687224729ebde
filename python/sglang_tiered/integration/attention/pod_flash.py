"""The ``pod`` backend on Hopper: SGLang's FlashAttention 3, with mixed batches in one launch.

SGLang serves Hopper by FlashAttention 3 unless told otherwise, and nothing but mixed batches is
worth leaving it for. Importing this needs ``sgl_kernel``. No GPU has run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils import get_device_core_count

from sglang_tiered.integration.attention import pod_device

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

__all__ = ["SIGNATURES", "FlashPodAttnBackend"]

_BACKEND = "sglang.srt.layers.attention.flashattention_backend:FlashAttentionBackend"

SIGNATURES: dict[str, tuple[str, ...]] = {
    **pod_device.SIGNATURES,
    f"{_BACKEND}.init_forward_metadata": ("self", "forward_batch"),
    f"{_BACKEND}.init_forward_metadata_out_graph": ("self", "forward_batch", "in_capture"),
    f"{_BACKEND}.forward_extend": (
        *("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "q_rope", "k_rope"),
        *("sinks", "q_descale", "k_descale", "v_descale", "score_mod", "aux_tensors", "rel_bias"),
        *("rel_bias_event", "return_lse"),
    ),
}
"""What this class calls or overrides; checked when the backend is made."""


class FlashPodAttnBackend(pod_device.DevicePod, FlashAttentionBackend):  # type: ignore[misc]
    """One per model runner. The parent's page table is no list of slots, so both are made."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self._num_cores = int(get_device_core_count(model_runner.gpu_id))

    @property
    def serves(self) -> bool:
        """Not latent attention, which has kernels of its own; not where a rank holds a share of the
        keys or of the queries; not local attention, and not what has no keys in the pool; not
        deterministic inference, since the batch decides how a mixed launch splits its keys."""
        return not (
            get_exec().deterministic.enable_deterministic_inference
            or self.use_mla
            or self.is_encoder_decoder
            or self.attn_cp_size > 1
            or self.has_local_attention
            or self.is_prefill_aware_swa
            or self.kv_cache_is_mxfp8
            or self.fa_skip_kv_cache
            or self._kv_shard_pool is not None
        )

    def _has_window_pool(self) -> bool:
        return bool(self.use_sliding_window_kv_pool)

    def _save_kv(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        assert k is not None
        assert v is not None
        location = KVWriteLoc.for_batch(
            forward_batch, swa_loc=self.forward_metadata.swa_out_cache_loc
        )
        if layer.k_scale is None:
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
            return
        # With scales the pool divides in place, and the model may still use its tensors.
        self.token_to_kv_pool.set_kv_buffer(
            layer, location, k.clone(), v.clone(), layer.k_scale, layer.v_scale
        )

    def _num_sms(self) -> int:
        return self._num_cores

"""The ``pod`` backend on Hopper: SGLang's FlashAttention 3, with mixed batches in one launch.

SGLang serves Hopper by FlashAttention 3 unless told otherwise, and nothing but mixed batches is
worth leaving it for. Importing this needs ``sgl_kernel``. No GPU has run it.
"""

from __future__ import annotations

from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.runtime_context import get_exec

from sglang_tiered.integration.attention.pod import DEVICE_SIGNATURES, DevicePod

_BACKEND = "sglang.srt.layers.attention.flashattention_backend:FlashAttentionBackend"

SIGNATURES: dict[str, tuple[str, ...]] = {
    **DEVICE_SIGNATURES,
    f"{_BACKEND}.init_forward_metadata": ("self", "forward_batch"),
    f"{_BACKEND}.init_forward_metadata_out_graph": ("self", "forward_batch", "in_capture"),
    f"{_BACKEND}.forward_extend": (
        *("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "q_rope", "k_rope"),
        *("sinks", "q_descale", "k_descale", "v_descale", "score_mod", "aux_tensors", "rel_bias"),
        *("rel_bias_event", "return_lse"),
    ),
}
"""What this class calls or overrides; checked when the backend is made."""


class FlashPodAttnBackend(DevicePod, FlashAttentionBackend):  # type: ignore[misc]
    """One per model runner. The parent's page table is no list of slots, so both are made."""

    @property
    def serves(self) -> bool:
        """Not latent attention, which has kernels of its own. Not where a rank holds a share of the
        keys or of the queries. Not local attention, and not what has no keys in the pool. Not
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

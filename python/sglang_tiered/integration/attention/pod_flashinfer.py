"""The ``pod`` backend where SGLang takes FlashInfer, on A100, L40 and others.

Mixed batches go through our kernels, not through FlashInfer's batch POD kernel, which the benchmark
measures beside them. No GPU has run it.
"""

from __future__ import annotations

from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, WrapperDispatch
from sglang.srt.runtime_context import get_parallel

from sglang_tiered.integration.attention.pod import DEVICE_SIGNATURES, DevicePod

_BACKEND = "sglang.srt.layers.attention.flashinfer_backend:FlashInferAttnBackend"

SIGNATURES: dict[str, tuple[str, ...]] = {
    **DEVICE_SIGNATURES,
    f"{_BACKEND}.__init__": (
        *("self", "model_runner", "skip_prefill", "kv_indptr_buf", "kv_last_page_len_buf"),
        "init_new_workspace",
    ),
    f"{_BACKEND}.init_forward_metadata": ("self", "forward_batch"),
    f"{_BACKEND}.init_forward_metadata_out_graph": ("self", "forward_batch", "in_capture"),
    f"{_BACKEND}.forward_extend": (
        *("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
}
"""What this class calls or overrides; checked when the backend is made."""


class FlashInferPodAttnBackend(DevicePod, FlashInferAttnBackend):  # type: ignore[misc]
    """One per model runner. The parent plans its wrappers for every forward; slots are made beside
    them, since its own end at the prefix and, with a window, begin late."""

    @property
    def serves(self) -> bool:
        """Not deterministic inference, since the batch decides how a mixed launch splits its keys.
        Not what has a mask of its own (several items, diffusion), and not behind an encoder, whose
        keys come first. Not where a rank holds a share of the queries, nor 4-bit caches, nor
        windows in another pool than the runner's."""
        return not (
            self.enable_deterministic
            or self.enable_mis
            or self.is_dllm_model
            or self.dispatch_reason is WrapperDispatch.CROSS_ATTENTION
            or get_parallel().attn_cp_size > 1
            or self.prefill_uses_dequant_workspace
            or self._swa_kv_pool not in {None, self.token_to_kv_pool}
        )

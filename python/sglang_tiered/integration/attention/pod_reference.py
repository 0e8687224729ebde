"""The ``pod`` backend on a CPU: the ``reference`` backend, with mixed batches through the PyTorch
form of the POD kernels. It runs the same plans, slots and dispatch as on CUDA, on SGLang's real
scheduler. It exists for tests, not for speed.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_tiered.integration.attention.pod import PodAttention, PodForward
from sglang_tiered.integration.attention.reference import ReferenceAttnBackend

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

__all__ = ["ReferencePodAttnBackend"]

# A plan splits long rows by this number; a CPU has none, and small plans should split too.
_PRETENDED_SMS = 8


class ReferencePodAttnBackend(PodAttention, ReferenceAttnBackend):
    """One per model runner; borrows its pools and request table."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self.page_size = int(getattr(model_runner, "page_size", 1) or 1)
        self._use_mla = bool(model_runner.use_mla_backend)

    def _takes(self, forward_batch: ForwardBatch) -> bool:
        return not self._use_mla and super()._takes(forward_batch)

    def _pod_forward(self, forward_batch: ForwardBatch) -> PodForward:
        own = self._rows.own
        ends = [0, *accumulate(map(len, own))]
        slots = torch.cat(own)
        sliding = slots
        if self._has_window_pool():
            assert isinstance(self.token_to_kv_pool, SWAKVPool)
            sliding = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
        return PodForward(
            forward_batch.extend_seq_lens_cpu,
            forward_batch.extend_prefix_lens_cpu,
            torch.tensor(ends, dtype=torch.int32),
            slots,
            sliding,
        )

    def _save_kv(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        self._save(k, v, layer, forward_batch, save_kv_cache=True)

    def _kv_scales(self, layer: RadixAttention) -> tuple[float, float]:
        return 1.0, 1.0  # the parent stores and reads without scales

    def _has_window_pool(self) -> bool:
        return bool(self.use_sliding_window_kv_pool)

    def _num_sms(self) -> int:
        return _PRETENDED_SMS

"""The ``pod`` backend on CUDA: SGLang's Triton backend, with mixed batches in one launch.

Everything but ``forward_extend`` of a mixed batch is inherited: decode and its CUDA graphs,
prefills without decode rows, verification, latent attention. Under SGLang's default prefill graphs
(BREAKABLE) attention runs between the captured pieces on live metadata, so plans and slots of each
forward are used as they are. The parent runs a fully captured prefill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool

from sglang_tiered.integration.attention.pod import DEVICE_SIGNATURES, DevicePod

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_tiered.integration.attention.pod import PodForward


_BACKEND = "sglang.srt.layers.attention.triton_backend:TritonAttnBackend"

# The methods that this class calls or overrides; checked when the backend is made, since the
# launcher and the detokenizer need not import it.
SIGNATURES: dict[str, tuple[str, ...]] = {
    **DEVICE_SIGNATURES,
    f"{_BACKEND}.init_forward_metadata": ("self", "forward_batch"),
    f"{_BACKEND}.init_forward_metadata_out_graph": ("self", "forward_batch", "in_capture"),
    f"{_BACKEND}.forward_extend": (
        "self",
        "q",
        "k",
        "v",
        "layer",
        "forward_batch",
        "save_kv_cache",
        "sinks",
        "score_mod",
        "aux_tensors",
    ),
    f"{_BACKEND}._set_kv_buffer": (
        "self",
        "forward_batch",
        "layer",
        "loc_info",
        "k",
        "v",
        "k_scale",
        "v_scale",
    ),
    f"{_BACKEND}._fill_kv_indptr_and_indices": (
        "self",
        "plan",
        "bs",
        "seq_lens",
        "req_pool_indices",
        "kv_indices",
        "kv_indptr",
    ),
}


class TritonPodAttnBackend(DevicePod, TritonAttnBackend):  # type: ignore[misc]
    """One per model runner. A forward's slots are gathered once: what the parent gathers is a part
    of them, which it gets when a layer is left to it."""

    _is_gathered_here = False
    _wanted: torch.Tensor | None = None  # the parent's slots of a forward's prefixes, if not filled

    @property
    def serves(self) -> bool:
        """True if the kernels may take batches. Latent attention has kernels of its own; with
        context parallelism of decode a rank holds only a share of the keys; deterministic inference
        forbids splits that depend on the batch."""
        return not (self.use_mla or self.dcp_size > 1 or self.enable_deterministic)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._wanted = None
        self._is_gathered_here = self._takes(forward_batch)
        try:
            super().init_forward_metadata(forward_batch)
        finally:
            self._is_gathered_here = False

    def _fill_kv_indptr_and_indices(  # noqa: PLR0917 - SGLang's signature
        self,
        plan: KVLocPlan,
        bs: int,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self._is_gathered_here:
            filled: torch.Tensor = super()._fill_kv_indptr_and_indices(
                plan, bs, seq_lens, req_pool_indices, kv_indices, kv_indptr
            )
            return filled
        ends: torch.Tensor = self.kv_indptr[: bs + 1] if kv_indptr is None else kv_indptr
        ends[1:] = torch.cumsum(seq_lens, dim=0)
        self._wanted = kv_indices
        return ends

    def _complete_parent(self, forward: PodForward) -> None:
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return
        ends = self.forward_metadata.kv_indptr  # [rows + 1], of prefixes alone
        shift = forward.indptr[:-1] - ends[:-1]
        own = torch.arange(len(wanted), device=wanted.device)
        places = own + torch.repeat_interleave(shift, ends.diff(), output_size=len(wanted))
        wanted.copy_(forward.slots[places])

    def _has_window_pool(self) -> bool:
        return self.window_kv_indptr is not None and isinstance(
            self.token_to_kv_pool, BaseSWAKVPool
        )

    def _write(
        self, forward_batch: ForwardBatch, layer: RadixAttention, *location_kv_and_scales: Any
    ) -> None:
        self._set_kv_buffer(forward_batch, layer, *location_kv_and_scales)

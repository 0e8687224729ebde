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
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_tiered.integration.attention.pod import PodAttention, PodForward

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

__all__ = ["SIGNATURES", "TritonPodAttnBackend"]

_BACKEND = "sglang.srt.layers.attention.triton_backend:TritonAttnBackend"

# The methods that this class calls or overrides; checked when the backend is made, since the
# launcher and the detokenizer need not import it.
SIGNATURES: dict[str, tuple[str, ...]] = {
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
    "sglang.srt.mem_cache.memory_pool:KVWriteLoc.for_batch": ("forward_batch", "swa_loc"),
    "sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.pack_read_stream": (
        "self",
        "plan",
        "req_pool_indices",
        "seq_lens",
        "indptr",
        "out",
        "kind",
        "token_mapping",
    ),
}


class TritonPodAttnBackend(PodAttention, TritonAttnBackend):  # type: ignore[misc]
    """One per model runner; borrows its pools, request table and index translator."""

    @property
    def serves(self) -> bool:
        """True if the kernels may take batches. Latent attention has kernels of its own; with
        context parallelism of decode a rank holds only a share of the keys; deterministic inference
        forbids splits that depend on the batch."""
        return not (self.use_mla or self.dcp_size > 1 or self.enable_deterministic)

    def _takes(self, forward_batch: ForwardBatch) -> bool:
        return self.serves and super()._takes(forward_batch)

    def _has_window_pool(self) -> bool:
        return self.window_kv_indptr is not None and isinstance(
            self.token_to_kv_pool, BaseSWAKVPool
        )

    def _pod_forward(self, forward_batch: ForwardBatch) -> PodForward:
        extend_lens = forward_batch.extend_seq_lens_cpu
        prefix_lens = forward_batch.extend_prefix_lens_cpu
        rows = len(extend_lens)
        num_keys = sum(extend_lens) + sum(prefix_lens)
        indptr = torch.zeros(rows + 1, dtype=torch.int32, device=self.device)
        indptr[1:] = torch.cumsum(forward_batch.seq_lens[:rows], dim=0)
        slots = self._read_slots(forward_batch, indptr, num_keys)
        sliding = slots
        if self._has_window_pool():
            sliding = self._read_slots(forward_batch, indptr, num_keys, sliding=True)
        return PodForward(extend_lens, prefix_lens, indptr, slots, sliding)

    def _read_slots(
        self,
        forward_batch: ForwardBatch,
        indptr: torch.Tensor,
        num_keys: int,
        *,
        sliding: bool = False,
    ) -> torch.Tensor:
        """Return the slots of every row's whole sequence, end to end: [num_keys] int32 or int64."""
        translator, pool = self.kv_index_translator, self.token_to_kv_pool
        # Half the size of SGLang's int64, since every tile of every layer reads them.
        slots = torch.empty(num_keys, dtype=torch.int32, device=self.device)
        options: dict[str, Any] = {}
        if sliding:
            options["kind"] = translator.window_kv_kind
            if isinstance(pool, SWAKVPool):
                options["token_mapping"] = pool.full_to_swa_index_mapping
        translated = translator.pack_read_stream(
            forward_batch.kv_loc_plan,
            req_pool_indices=forward_batch.req_pool_indices,
            seq_lens=forward_batch.seq_lens[: len(indptr) - 1],
            indptr=indptr,
            out=slots,
            **options,
        )
        if sliding and not translated:
            slots = pool.translate_loc_from_full_to_swa(slots)
        return slots

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
            self._set_kv_buffer(forward_batch, layer, location, k, v)
            return
        # With scales the pool divides in place, and the model may still use its tensors.
        self._set_kv_buffer(
            forward_batch, layer, location, k.clone(), v.clone(), layer.k_scale, layer.v_scale
        )

    def _kv_scales(self, layer: RadixAttention) -> tuple[float, float]:
        if layer.k_scale is None or layer.v_scale is None:
            return 1.0, 1.0
        return layer.k_scale_float, layer.v_scale_float

    def _num_sms(self) -> int:
        return int(self.device_core_count)

"""What the ``pod`` backends of CUDA share, whichever of SGLang's backends is below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.utils import get_device_core_count

from sglang_tiered.integration.attention.pod import PodAttention, PodForward

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


SIGNATURES: dict[str, tuple[str, ...]] = {
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
"""Of SGLang, checked when a backend is made."""


class DevicePod(PodAttention):
    """Borrows the parent's pools, request table and index translator."""

    kv_index_translator: Any
    forward_metadata: Any
    use_sliding_window_kv_pool: bool

    def __init__(self, model_runner: ModelRunner, **options: Any) -> None:
        super().__init__(model_runner, **options)  # type: ignore[call-arg]
        self.device = model_runner.device  # FlashInfer's parent keeps none
        self._num_cores = int(get_device_core_count(model_runner.gpu_id))

    @property
    def serves(self) -> bool:
        """True if the kernels may take batches."""
        raise NotImplementedError

    def _takes(self, forward_batch: ForwardBatch) -> bool:
        return self.serves and super()._takes(forward_batch)

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

    def _kv_scales(self, layer: RadixAttention) -> tuple[float, float]:
        if layer.k_scale is None or layer.v_scale is None:
            return 1.0, 1.0
        return layer.k_scale_float, layer.v_scale_float

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
            self._write(forward_batch, layer, location, k, v)
            return
        # With scales the pool divides in place, and the model may still use its tensors.
        self._write(
            forward_batch, layer, location, k.clone(), v.clone(), layer.k_scale, layer.v_scale
        )

    def _write(
        self, forward_batch: ForwardBatch, layer: RadixAttention, *location_kv_and_scales: Any
    ) -> None:
        self.token_to_kv_pool.set_kv_buffer(layer, *location_kv_and_scales)

    def _has_window_pool(self) -> bool:
        return bool(self.use_sliding_window_kv_pool)

    def _num_sms(self) -> int:
        return self._num_cores

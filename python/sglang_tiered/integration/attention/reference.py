"""SGLang attention backend ``reference``: plain PyTorch that computes only the new queries.

SGLang's ``torch_native`` pads an extend with the prefix's queries and attends from all of them, so
on a CPU a prefix-cache hit saves little of the attention it should save. It also reads a
sliding-window pool at untranslated slots and knows neither a soft cap nor sinks. This backend keeps
its construction and its KV writes and replaces the rest with ``sglang_tiered_kernels``.

Refused, rather than computed wrongly: speculative verification (needs a tree mask), ``return_lse``
and sparse-index arguments (not parameters here), Grok's attention temperature.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_tiered.integration.attention.pod import PodAttention, PodForward
from sglang_tiered_kernels.paged_attention import DecodePlan, decode, extend, plan_decode

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


NAME = "reference"


# A plan splits long rows by this number; a CPU has none, and small plans should split too.
_PRETENDED_SMS = 8


@dataclass
class _ForwardRows:
    """The cache rows of one forward's sequences, read from ``req_to_token`` once for all layers.

    own, encoder: per sequence [length] int64 slots of the full pool; ``encoder`` is empty without
    cross attention. query_lens: new tokens per sequence, None for a decode. sliding: ``own`` in
    the sliding-window pool, once a layer of that pool has asked. plans: by source and window.
    """

    own: list[torch.Tensor]
    encoder: list[torch.Tensor]
    query_lens: list[int] | None
    sliding: list[torch.Tensor] | None = None
    plans: dict[tuple[str, int | None], DecodePlan] = field(default_factory=dict)


class ReferenceAttnBackend(TorchNativeAttnBackend):  # type: ignore[misc]
    """One per model runner. Borrows the runner's pools; owns the rows of the current forward.

    Models with multi-head latent attention call it in the absorbed form: one KV head, keys of
    ``kv_lora_rank + rope`` and values that are their leading ``kv_lora_rank``.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self._rows = _ForwardRows([], [], None)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        query_lens = None
        if not forward_batch.forward_mode.is_decode_or_idle():
            if forward_batch.extend_seq_lens is None:
                raise NotImplementedError(
                    f"attention backend {NAME!r} has no {forward_batch.forward_mode.name} mode"
                )
            query_lens = forward_batch.extend_seq_lens.tolist()
        requests = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        # A cross-attending request keeps its encoder's slots before its own.
        encoder_lengths = [0] * len(lengths)
        if forward_batch.encoder_lens is not None:
            encoder_lengths = forward_batch.encoder_lens.tolist()
        table = self.req_to_token_pool.req_to_token
        own, encoder = [], []
        for request, split, length in zip(requests, encoder_lengths, lengths, strict=True):
            encoder.append(table[request, :split].long())
            own.append(table[request, split : split + length].long())
        self._rows = _ForwardRows(own, encoder, query_lens)

    def forward_extend(  # noqa: PLR0917 - wrapping backends pass save_kv_cache by position
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from the new tokens, whose k and v are copied into the pool first.

        q: [tokens, heads * qk_dim] or [tokens, heads, qk_dim]; k, v: [tokens, kv_heads, dim], or
        None for a layer that reads another's. sinks: [heads] or None. Returns
        [tokens, heads * v_dim]."""
        self._save(k, v, layer, forward_batch, save_kv_cache)
        _, rows = self._source(layer)
        query_lens = self._rows.query_lens
        assert query_lens is not None
        out = extend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            rows,
            query_lens,
            causal=not (layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY),
            sliding_window=_window(layer),
            sinks=sinks,
            **_score_options(layer),
        )
        return out.flatten(1)

    def forward_decode(  # noqa: PLR0917 - wrapping backends pass save_kv_cache by position
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend as ``forward_extend`` does, with one token per sequence."""
        self._save(k, v, layer, forward_batch, save_kv_cache)
        source, rows = self._source(layer)
        window = _window(layer)
        plan = self._rows.plans.get((source, window))
        if plan is None:
            plan = plan_decode(rows, sliding_window=window)
            self._rows.plans[source, window] = plan
        out = decode(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            plan,
            sinks=sinks,
            **_score_options(layer),
        )
        return out.flatten(1)

    def _save(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> None:
        if save_kv_cache and k is not None and v is not None:
            location = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)

    def _source(self, layer: RadixAttention) -> tuple[str, list[torch.Tensor]]:
        """Return the slots that ``layer`` reads: their key in ``plans``, and the rows per
        sequence."""
        rows = self._rows
        if layer.is_cross_attention:
            return "encoder", rows.encoder
        pool = self.token_to_kv_pool
        if not (self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]):
            return "own", rows.own
        if rows.sliding is None:
            rows.sliding = [pool.translate_loc_from_full_to_swa(r) for r in rows.own]
        return "sliding", rows.sliding


def _window(layer: RadixAttention) -> int | None:
    """Return the layer's window, None where it has none (SGLang: -1 or None)."""
    window = layer.sliding_window_size
    if layer.is_cross_attention or window is None or window < 0:
        return None
    return int(window)


def _score_options(layer: RadixAttention) -> dict[str, float]:
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise NotImplementedError(f"logit capping method {layer.logit_capping_method!r}")
    if layer.xai_temperature_len > 0:
        raise NotImplementedError("attention temperature (xai_temperature_len)")
    return {"scale": layer.scaling, "logit_cap": layer.logit_cap}


def create(runner: ModelRunner) -> ReferenceAttnBackend:
    """Return the backend of a runner."""
    if runner.use_mla_backend:
        always_absorb(NAME)
    return ReferenceAttnBackend(runner)


def always_absorb(name: str) -> None:
    """Send every MLA forward of the backend ``name`` through the absorbed form.

    For an unknown backend DeepSeek's dispatcher borrows Triton's choice. That choice expands K and
    V for a prefill without prefix, and expects the backend to attend to those instead of the latent
    cache.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    def absorbed(attention: Any, forward_batch: Any) -> Any:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register(name, absorbed)


class ReferencePodAttnBackend(PodAttention, ReferenceAttnBackend):
    """The ``pod`` backend on a CPU, with mixed batches through the PyTorch form of the POD kernels.
    It runs the same plans, slots and dispatch as on CUDA, on SGLang's real scheduler; for tests,
    not for speed. One per model runner; borrows its pools and request table."""

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

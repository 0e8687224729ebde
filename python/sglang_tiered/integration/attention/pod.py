"""SGLang attention backend ``pod``: prefill and decode rows of a mixed batch in one launch.

With ``--enable-mixed-chunk`` SGLang puts the running requests' next tokens behind a prefill chunk
and runs the whole as EXTEND. Its own backends treat every decode row as a prefill of one token: a
full query tile per head, and no split over the keys. POD-Attention (arXiv 2410.18038) gives decode
rows decode tiles and runs them beside the prefill tiles, which want the tensor cores while decode
wants the memory bus. The kernels, the tables they read and the gate that decides between one fused
launch and one launch per role are in ``sglang_tiered_kernels.pod_attention``.

``PodAttention`` is a mixin before a backend that does everything else. On CUDA that is SGLang's
default, if it is FlashAttention 3 (``pod_flash``) or FlashInfer (``pod_flashinfer``), or its Triton
backend (``pod_triton``). On a CPU that is this package's ``reference``. It
takes a forward only if there are decode rows in an extend, and a layer only if the kernels compute
it. The parent computes the rest, so every model that the parent serves runs.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.utils import get_device_core_count

from sglang_tiered_kernels.pod_attention import (
    PodPlan,
    PodShape,
    is_decode_row,
    make_plan,
    pod_attention,
    supports,
    warm_up,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


logger = logging.getLogger(__name__)

NAME = "pod"
_MODES = (ForwardMode.EXTEND, ForwardMode.MIXED)

DEVICE_SIGNATURES: dict[str, tuple[str, ...]] = {
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
"""Of SGLang, checked when a backend of CUDA is made."""


@dataclass
class PodStatistics:
    """Counters of the backend of this process, written by the scheduler thread.

    serving: a backend was made. forwards: extends with decode rows; decode_rows: in them. layers:
    attention calls in them that went through the POD kernels; fused: those in one launch, the rest
    one launch per role. left: calls that the parent computed, by reason.
    """

    serving: bool = False
    forwards: int = 0
    decode_rows: int = 0
    layers: int = 0
    fused: int = 0
    left: Counter[str] = field(default_factory=Counter)

    def state(self) -> dict[str, Any]:
        """Return the counters as ``/server_info`` shows them."""
        return {
            "forwards": self.forwards,
            "decode_rows": self.decode_rows,
            "layers": self.layers,
            "fused_layers": self.fused,
            "other_layers": dict(self.left),
        }


@dataclass
class PodForward:
    """Tensors and plans that the layers of one extend with decode rows share.

    indptr: [rows + 1] int32. slots: where layers without a sliding window read, [sum of lengths],
    every row's keys from its first token to its last new one. sliding: the same where the layers
    with one read, and the same tensor where they share the pool. plans: by shape and window, with
    the reason in place of a plan that cannot be made.
    """

    extend_lens: Sequence[int]
    prefix_lens: Sequence[int]
    indptr: torch.Tensor
    slots: torch.Tensor
    sliding: torch.Tensor
    plans: dict[tuple[PodShape, int], PodPlan | str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(self.extend_lens)


def has_decode_rows(extend_lens: Sequence[int] | None, prefix_lens: Sequence[int] | None) -> bool:
    """Return whether an extend has rows that are better run as decodes. False for lengths that
    SGLang keeps on the device only (None), since asking the device would stall it."""
    if extend_lens is None or prefix_lens is None:
        return False
    return any(map(is_decode_row, extend_lens, prefix_lens))


def why_not(layer: RadixAttention, extras: dict[str, Any]) -> str | None:
    """Return why the parent must compute ``layer``, or None. extras: keyword arguments of the model
    beside the sinks; each changes the scores or the result."""
    if layer.is_cross_attention:
        return "cross attention"
    if layer.attn_type != AttentionType.DECODER:
        return f"{layer.attn_type.value} attention"
    if layer.qk_head_dim != layer.v_head_dim:
        return "keys and values of different sizes"
    if layer.xai_temperature_len > 0:
        return "attention temperature"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        return f"{layer.logit_capping_method} logit cap"
    for name, value in extras.items():
        if value is not None and value is not False:
            return name
    return None


class PodAttention:
    """Mixin before an attention backend of SGLang. One per model runner, on its scheduler thread.

    Borrows the parent's pools; owns the slots and plans of the current forward.
    """

    token_to_kv_pool: Any
    page_size: int
    device: Any
    # One per process: SGLang has no way from its scheduler to a backend behind its wrappers.
    statistics: ClassVar[PodStatistics] = PodStatistics()
    _forward: PodForward | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare the forward. Every read of SGLang's request table happens here: a later one
        would race with the scheduler, which prepares the next batch meanwhile."""
        self._forward = None
        super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        if self._takes(forward_batch):
            self._forward = self._pod_forward(forward_batch)
            self.statistics.forwards += 1
            self.statistics.decode_rows += sum(
                map(is_decode_row, self._forward.extend_lens, self._forward.prefix_lens)
            )

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Prepare a captured forward, all layers of which the parent computes."""
        self._forward = None
        super().init_forward_metadata_out_graph(forward_batch, in_capture)  # type: ignore[misc]

    def forward_extend(  # noqa: PLR0917 - wrapping backends pass save_kv_cache by position
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **extras: Any,
    ) -> torch.Tensor:
        """Attend, here or in the parent. q: [tokens, heads * dim]; k, v: [tokens, kv_heads, dim],
        copied into the pool. sinks: [heads] or None. Returns [tokens, heads * dim] in the query's
        dtype."""
        forward = self._forward
        if forward is not None:
            plan = self._plan(forward, q, k, layer, extras)
            if not isinstance(plan, str):
                if save_kv_cache:
                    self._save_kv(k, v, layer, forward_batch)
                return self._attend(forward, plan, q, layer, forward_batch, sinks)
            self.statistics.left[plan] += 1
            self._complete_parent(forward)
        if sinks is not None:
            extras["sinks"] = sinks  # FlashInfer's parent knows none
        return super().forward_extend(  # type: ignore[misc, no-any-return]
            q, k, v, layer, forward_batch, save_kv_cache, **extras
        )

    def refuses(self, layer: RadixAttention) -> bool:
        """Return whether the parent computes ``layer`` in every forward."""
        return why_not(layer, {}) is not None

    def window_of(self, layer: RadixAttention) -> int:
        """Return how many earlier keys a query sees, -1 for all (SGLang: -1 or None)."""
        window = layer.sliding_window_size
        return -1 if window is None or window < 0 else int(window)

    def shape_of(self, layer: RadixAttention, q_dtype: torch.dtype) -> PodShape:
        # In a separate window pool slots follow no pages: those that no query sees are freed.
        by_page = self.window_of(layer) < 0 or not self._has_window_pool()
        return PodShape(
            num_q_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_dim=layer.qk_head_dim,
            page_size=self.page_size if by_page else 1,
            q_dtype=q_dtype,
            kv_dtype=self.token_to_kv_pool.get_key_buffer(layer.layer_id).dtype,
        )

    def _takes(self, forward_batch: ForwardBatch) -> bool:
        return (
            forward_batch.forward_mode in _MODES
            and forward_batch.encoder_lens is None
            and has_decode_rows(
                forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
            )
        )

    def _plan(
        self,
        forward: PodForward,
        q: torch.Tensor,
        k: torch.Tensor | None,
        layer: RadixAttention,
        extras: dict[str, Any],
    ) -> PodPlan | str:
        """Return the layer's plan, made for the first layer of its shape, or why there is none."""
        reason = why_not(layer, extras)
        if reason is not None:
            return reason
        if k is None:
            return "keys of another layer"
        if q.shape[0] != forward.num_tokens:
            return "other tokens than planned"
        shape, window = self.shape_of(layer, q.dtype), self.window_of(layer)
        plan = forward.plans.get((shape, window))
        if plan is None:
            plan = supports(shape, q.device) or make_plan(
                forward.extend_lens,
                forward.prefix_lens,
                shape,
                num_sms=self._num_sms(),
                window=window,
                device=q.device,
            )
            forward.plans[shape, window] = plan
        return plan

    def _attend(
        self,
        forward: PodForward,
        plan: PodPlan,
        q: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        out = getattr(forward_batch, "_attn_output", None)
        if out is None:
            out = torch.empty_like(q)
        k_scale, v_scale = self._kv_scales(layer)
        shape = (-1, layer.tp_q_head_num, layer.qk_head_dim)
        pod_attention(
            q.view(shape),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            out.view(shape),
            forward.indptr,
            forward.sliding if self.window_of(layer) >= 0 else forward.slots,
            plan,
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        self.statistics.layers += 1
        self.statistics.fused += plan.fuse and q.is_cuda  # a CPU has no launches to fuse
        return out

    def _pod_forward(self, forward_batch: ForwardBatch) -> PodForward:
        """Gather the slots of every row. Called once per forward that is taken, after the parent's
        metadata."""
        raise NotImplementedError

    def _complete_parent(self, forward: PodForward) -> None:
        """Give the parent what it has not got yet: it computes a layer of a forward that is taken.
        Without a read of SGLang's request table."""

    def _save_kv(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        """Write the new tokens' keys and values as the parent does."""
        raise NotImplementedError

    def _kv_scales(self, layer: RadixAttention) -> tuple[float, float]:
        """Return the factors by which the parent multiplies stored keys and values."""
        raise NotImplementedError

    def _has_window_pool(self) -> bool:
        """Return whether layers with a window read a separate pool."""
        raise NotImplementedError

    def _num_sms(self) -> int:
        """Return the number of multiprocessors of the device."""
        raise NotImplementedError


class DevicePod(PodAttention):
    """What the backends of CUDA share, whichever of SGLang's is below. Borrows the parent's pools,
    request table and index translator."""

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


def layers_of(model: torch.nn.Module) -> Iterator[tuple[RadixAttention, torch.Tensor | None]]:
    """Yield every attention layer with its sinks. SGLang passes sinks with each call only; in its
    models they are an attribute beside the layer. A wrong guess only costs a compilation later."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, RadixAttention):
                sinks = getattr(module, "sinks", None)
                yield child, sinks if isinstance(sinks, torch.Tensor) else None


def compile_kernels(backend: PodAttention, model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Compile once per kind of layer that the backend takes, before it serves, so that no request
    waits for a compiler. Returns the number of kinds.

    dtype: of queries. Takes seconds per kind the first time on a machine; Triton keeps the results
    on disk. A failure is logged, not raised: the kernels are then compiled when they are needed.
    """
    kinds: set[Any] = set()
    failures: list[Exception] = []
    for layer, sinks in layers_of(model):
        try:
            if backend.refuses(layer):
                continue
            shape, window = backend.shape_of(layer, dtype), backend.window_of(layer)
            kind = (shape, window >= 0, layer.logit_cap > 0, None if sinks is None else sinks.dtype)
            if kind in kinds or supports(shape, backend.device) is not None:
                continue
            kinds.add(kind)
            pool = backend.token_to_kv_pool
            warm_up(
                pool.get_key_buffer(layer.layer_id),
                pool.get_value_buffer(layer.layer_id),
                shape,
                index_dtype=torch.int32,
                window=window,
                logit_cap=layer.logit_cap,
                sinks=sinks,
            )
        except Exception as error:
            # A server must start whatever a model's layers look like.
            failures.append(error)
    if failures:
        logger.error(
            "internal error while compiling the POD kernels of %d layers, which are compiled at "
            "their first use",
            len(failures),
            exc_info=failures[0],
        )
    return len(kinds)

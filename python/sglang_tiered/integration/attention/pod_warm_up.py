"""Compiles the POD kernels of a model before it serves, so that no request waits for a compiler."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_tiered_kernels.pod_attention import supports, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_tiered.integration.attention.pod import PodAttention

__all__ = ["compile_kernels", "layers_of"]

logger = logging.getLogger(__name__)


def layers_of(model: torch.nn.Module) -> Iterator[tuple[RadixAttention, torch.Tensor | None]]:
    """Yield every attention layer with its sinks. SGLang passes sinks with each call only; in its
    models they are an attribute beside the layer. A wrong guess only costs a compilation later."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, RadixAttention):
                sinks = getattr(module, "sinks", None)
                yield child, sinks if isinstance(sinks, torch.Tensor) else None


def compile_kernels(backend: PodAttention, model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Compile once per kind of layer that the backend takes. Returns the number of kinds.

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

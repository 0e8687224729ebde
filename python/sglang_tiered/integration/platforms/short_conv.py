"""Short convolutions of hybrid models (LFM2) on the CPU platform, in PyTorch.

SGLang has these two functions for CUDA and, elsewhere, in Triton, which needs a GPU too. They keep
SGLang's signatures. Cases that the CPU platform never reaches (padding slots, several new tokens
per sequence in a decode) are refused rather than computed wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_tiered_kernels.causal_conv import convolve, convolve_step

if TYPE_CHECKING:
    import torch


_MODULE = "sglang.srt.layers.attention.mamba.causal_conv1d"

SIGNATURES = {
    f"{_MODULE}:causal_conv1d_fn": (
        "x",
        "weight",
        "bias",
        "query_start_loc",
        "cache_indices",
        "has_initial_state",
        "conv_states",
        "activation",
    ),
    f"{_MODULE}:causal_conv1d_update": (
        "x",
        "conv_state",
        "weight",
        "bias",
        "activation",
        "cache_seqlens",
        "conv_state_indices",
        "pad_slot_id",
    ),
}
"""What the launcher checks on a machine without an accelerator."""


def register() -> None:
    """Make SGLang call these instead of its Triton kernels. Call it once per process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for function in (causal_conv1d_fn, causal_conv1d_update):
        HookRegistry.register(f"{_MODULE}.{function.__name__}", function, HookType.REPLACE)


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    conv_states: torch.Tensor | None = None,
    activation: str | None = "silu",
    **_: Any,
) -> torch.Tensor:
    """Convolve a prefill. x: [channels, tokens] end to end; query_start_loc: [sequences + 1];
    cache_indices, has_initial_state: [sequences]. Returns [channels, tokens]."""
    if query_start_loc is None or cache_indices is None or conv_states is None:
        raise NotImplementedError("a short convolution without states")
    starts = query_start_loc.tolist()
    lengths = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    continues = [False] * len(lengths)
    if has_initial_state is not None:
        continues = has_initial_state.tolist()
    return convolve(
        x,
        weight,
        bias,
        conv_states,
        _slots(cache_indices).tolist(),
        lengths,
        continues,
        use_silu=_uses_silu(activation),
    )


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Convolve a decode step. x: [sequences, channels]; conv_state_indices: [sequences]. Returns
    the shape of ``x``."""
    if x.dim() != 2 or cache_seqlens is not None or conv_state_indices is None:
        raise NotImplementedError("a short convolution of several new tokens per sequence")
    slots = _slots(conv_state_indices)
    return convolve_step(x, weight, bias, conv_state, slots, use_silu=_uses_silu(activation))


def _slots(indices: torch.Tensor) -> torch.Tensor:
    if bool((indices < 0).any()):
        raise NotImplementedError("a short convolution with padding slots")
    return indices.long()


def _uses_silu(activation: str | bool | None) -> bool:
    if activation not in (None, False, True, "silu", "swish"):
        raise NotImplementedError(f"a short convolution with activation {activation!r}")
    return bool(activation)

"""Depthwise causal convolution in plain PyTorch, as hybrid models use it between attention layers.

Each output token is a weighted sum of the last ``width`` inputs of its channel. What a sequence
needs to go on is its last ``width - 1`` inputs: its state. Continuing from a state gives the bits
that one pass over the whole sequence gives, for each output is the same sum of the same terms.

Tensors are borrowed for the call; ``states`` is updated in place; results are new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

if TYPE_CHECKING:
    from collections.abc import Sequence


def convolve(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: Sequence[int],
    lengths: Sequence[int],
    continues: Sequence[bool],
    *,
    use_silu: bool,
) -> torch.Tensor:
    """Convolve sequences that lie end to end.

    inputs: [channels, tokens]. weight: [channels, width]. bias: [channels] or None.
    states: [slots, channels, width - 1]; sequence ``i`` of ``lengths[i]`` tokens starts from
    ``states[slots[i]]`` if ``continues[i]``, else from zeros, and leaves its own state there.
    Returns [channels, tokens]; tokens beyond ``sum(lengths)`` are padding and come back as zeros.
    """
    out = torch.zeros_like(inputs)
    begin = 0
    for slot, length, continued in zip(slots, lengths, continues, strict=True):
        left = states[slot] if continued else torch.zeros_like(states[slot])
        own = torch.cat([left.to(inputs.dtype), inputs[:, begin : begin + length]], dim=1)
        out[:, begin : begin + length] = _weighted(own, weight, bias, use_silu)
        states[slot] = own[:, own.shape[1] - states.shape[2] :]
        begin += length
    return out


def convolve_step(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    *,
    use_silu: bool,
) -> torch.Tensor:
    """One more token of each sequence.

    inputs: [sequences, channels]. slots: [sequences] int64. Others as in ``convolve``.
    Returns [sequences, channels].
    """
    own = torch.cat([states[slots].to(inputs.dtype), inputs[:, :, None]], dim=2)
    states[slots] = own[:, :, 1:].to(states.dtype)
    return _weighted(own, weight, bias, use_silu)[:, :, 0]


def _weighted(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, use_silu: bool
) -> torch.Tensor:
    """inputs: [..., channels, tokens + width - 1]. Returns [..., channels, tokens]. The terms are
    added in one order whatever the number of tokens, which a library convolution does not promise.
    """
    width = weight.shape[1]
    num_tokens = inputs.shape[-1] - width + 1
    total = inputs[..., :num_tokens] * weight[:, :1]
    for place in range(1, width):
        total = total + inputs[..., place : place + num_tokens] * weight[:, place : place + 1]
    if bias is not None:
        total = total + bias[:, None]
    return silu(total) if use_silu else total

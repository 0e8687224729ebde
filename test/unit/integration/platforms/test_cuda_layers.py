"""Layers in few launches, against SGLang's own in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import interpreted

from sglang_tiered.integration.platforms.cuda_layers import rms_norm, rotary_embedding


def norm(**given: Any) -> Any:
    from sglang.srt.layers.layernorm import RMSNorm

    layer = RMSNorm(32, 1e-5, **given)
    layer.weight.data.uniform_(0.5, 2.0)
    return layer


@pytest.mark.parametrize("more", [(), ("residual",), ("residual", "addition")], ids=len)
@pytest.mark.parametrize(
    "given",
    [{}, {"cast_x_before_out_mul": True}, {"fp32_residual": True}, {"var_hidden_size": 16}],
    ids=str,
)
def test_norm_equals_the_plain_one(given: dict[str, Any], more: tuple[str, ...]) -> None:
    layer = norm(**given)
    tensors = [torch.randn(3, 32) for _ in range(1 + len(more))]
    wanted = layer.forward_native(*[tensor.clone() for tensor in tensors])
    torch.testing.assert_close(rms_norm(layer, *tensors), wanted)


@interpreted
def test_rotation_equals_the_plain_one() -> None:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    for rotary_dim, is_neox in ((16, True), (8, True), (16, False)):
        layer = RotaryEmbedding(16, rotary_dim, 64, 10000, is_neox, torch.float32)
        positions = torch.tensor([3, 0, 63])
        query, key = torch.randn(3, 4 * 16), torch.randn(3, 2 * 16)
        wanted = layer.forward_native(positions, query.clone(), key.clone())
        found = rotary_embedding(layer, positions, query, key)
        torch.testing.assert_close(found, wanted)

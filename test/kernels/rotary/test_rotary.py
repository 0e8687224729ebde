"""Queries and keys rotated by one launch, against SGLang's layer in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from interpreted import interpreted

from sglang_tiered_kernels.rotary import rotate

HEAD, TOKENS, POSITIONS = 16, 5, 40


def expected(x: torch.Tensor, cos_sin: torch.Tensor, *, neox: bool) -> torch.Tensor:
    """RoFormer's formula (arXiv 2104.09864) by complex numbers, in float64."""
    half = cos_sin.shape[-1] // 2
    turns = torch.complex(cos_sin[:, :half].double(), cos_sin[:, half:].double())[:, None]
    part, rest = x[..., : 2 * half].double(), x[..., 2 * half :]
    pairs = (
        torch.complex(part[..., :half], part[..., half:])
        if neox
        else torch.view_as_complex(part.unflatten(-1, (half, 2)).contiguous())
    )
    turned = pairs * turns
    parts = (
        torch.cat((turned.real, turned.imag), -1)
        if neox
        else torch.view_as_real(turned).flatten(-2)
    )
    return torch.cat((parts.to(x.dtype), rest), -1)


def check(
    dtype: torch.dtype, q_heads: int, k_heads: int, rotary: int, *, neox: bool, device: str
) -> None:
    """Queries and keys are parts of one tensor, as a model's are."""
    source = torch.Generator().manual_seed(0)
    width = (q_heads + k_heads + 1) * HEAD
    packed = torch.randn(TOKENS, width, generator=source).to(device, dtype)
    before = packed.clone()
    cos_sin = torch.randn(POSITIONS, rotary, generator=source).to(device, dtype)
    positions = torch.randperm(POSITIONS, generator=source)[:TOKENS].to(device)
    cut = (q_heads * HEAD, (q_heads + k_heads) * HEAD)
    query, key = (packed[:, a:b].view(TOKENS, -1, HEAD) for a, b in ((0, cut[0]), (cut[0], cut[1])))
    wanted = [expected(part.clone(), cos_sin[positions], neox=neox) for part in (query, key)]
    rotate(query, key, positions, cos_sin, neox=neox)
    for found, part in zip((query, key), wanted, strict=True):
        torch.testing.assert_close(found, part)
    assert torch.equal(packed[:, cut[1] :], before[:, cut[1] :])


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(
    ("q_heads", "k_heads", "rotary"), [(9, 1, 16), (8, 8, 12), (2, 1, 16)], ids=str
)
@interpreted
def test_kernel_rotates_heads_in_place(q_heads: int, k_heads: int, rotary: int, neox: bool) -> None:
    check(torch.float32, q_heads, k_heads, rotary, neox=neox, device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_rotates_heads_in_place(dtype: torch.dtype, neox: bool) -> None:
    check(dtype, 9, 3, 12, neox=neox, device="cuda")

"""Rotary position embeddings (RoPE, arXiv 2104.09864): one launch that rotates the queries and keys
of all tokens where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


_HEADS_OF_A_BLOCK = 8


# Nothing that changes from call to call is specialised on, so a warm server never compiles.
@triton.jit(do_not_specialize_on_alignment=["q_ptr", "k_ptr", "positions"])
def rotate_kernel(
    q_ptr,
    k_ptr,
    positions,
    cos_sin,  # [positions, 2 * HALF]: cosines, then sines
    num_q_heads,
    num_k_heads,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NEOX: tl.constexpr,
):
    """Grid [tokens, blocks of query heads and then of key heads]."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = tl.cdiv(num_q_heads, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    live_d = offs_d < HALF
    row = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    cos = tl.load(row + offs_d, mask=live_d, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + HALF + offs_d, mask=live_d, other=0.0).to(tl.float32)[None, :]
    if block < q_blocks:
        base = q_ptr + token * stride_qt
        heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
        num_heads = num_q_heads
        stride = stride_qh
    else:
        base = k_ptr + token * stride_kt
        heads = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        num_heads = num_k_heads
        stride = stride_kh
    first_at = base + heads[:, None] * stride
    if NEOX:  # the second half of a head is the partner of the first; else neighbours are
        first_at += offs_d[None, :]
        second_at = first_at + HALF
    else:
        first_at += 2 * offs_d[None, :]
        second_at = first_at + 1
    live = (heads < num_heads)[:, None] & live_d[None, :]
    first = tl.load(first_at, mask=live, other=0.0).to(tl.float32)
    second = tl.load(second_at, mask=live, other=0.0).to(tl.float32)
    tl.store(first_at, (first * cos - second * sin).to(q_ptr.dtype.element_ty), mask=live)
    tl.store(second_at, (second * cos + first * sin).to(q_ptr.dtype.element_ty), mask=live)


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    neox: bool,
) -> None:
    """Rotate queries and keys in place, in float32.

    query, key: [tokens, heads, head_dim] of one dtype, whose last dimension is in one piece.
    positions: [tokens] int. cos_sin: [positions, rotary_dim], contiguous; what of a head is behind
    ``rotary_dim`` stays. neox: element i is rotated with i + rotary_dim / 2, else with its
    neighbour. In stream order; nothing waits.
    """
    tokens, num_q_heads, _ = query.shape
    num_k_heads = key.shape[1]
    half = cos_sin.shape[-1] // 2
    if not tokens:
        return
    blocks = triton.cdiv(num_q_heads, _HEADS_OF_A_BLOCK) + triton.cdiv(
        num_k_heads, _HEADS_OF_A_BLOCK
    )
    rotate_kernel[(tokens, blocks)](
        query,
        key,
        positions,
        cos_sin,
        num_q_heads,
        num_k_heads,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        HALF=half,
        BLOCK_D=triton.next_power_of_2(half),
        BLOCK_H=_HEADS_OF_A_BLOCK,
        NEOX=neox,
        num_warps=1,
        enable_fp_fusion=True,  # said, since the default is about to change
    )

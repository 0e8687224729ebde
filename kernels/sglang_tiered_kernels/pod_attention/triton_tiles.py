"""The two kinds of tile: queries of one head against their keys, block by block of keys.

Softmax runs in base 2 with a running maximum (FlashAttention-2, arXiv 2307.08691), so scales carry
log2(e). A tile reads keys through ``kv_row``, its row's part of ``kv_indices``.

Triton's interpreter has no bfloat16 arithmetic: it multiplies the bit patterns, without an error.
``UPCAST`` keeps every such operand in float32 there and compiles to nothing on a GPU.

Arguments that only pass through travel as tuples:
    tensors: q, k, v, out, sinks, kv_indptr, kv_indices
    strides: in elements, per token and per head, of q, out, k and v
    scalars: window, qk_scale, cap, v_scale
    OPTIONS: WINDOW, LOGIT_CAP, SINKS, INDEX64, UPCAST, all constexpr
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _cast(x, like, UPCAST: tl.constexpr):
    if UPCAST:
        return x.to(tl.float32)
    else:
        return x.to(like.dtype)


@triton.jit
def _attend(
    q,  # [rows, D]
    state,  # running maximum [rows], denominator [rows], output [rows, D], all float32
    heads,  # keys and values of one KV head, and their strides from slot to slot
    kv_row,
    positions,  # [rows] of the queries; read only where CAUSAL
    begin,  # steps [begin, end) by BLOCK_N; begin is a multiple of it
    end,
    lo,  # keys [lo, hi) may be read
    hi,
    scalars,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    AFFINE: tl.constexpr,
    STAGES: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    WINDOW: tl.constexpr = OPTIONS[0]
    LOGIT_CAP: tl.constexpr = OPTIONS[1]
    INDEX64: tl.constexpr = OPTIONS[3]
    UPCAST: tl.constexpr = OPTIONS[4]
    m_i, l_i, acc = state
    k_head, v_head, stride_k, stride_v = heads
    window, qk_scale, cap, _ = scalars
    offs_d = tl.arange(0, D)
    offs_n = tl.arange(0, BLOCK_N)
    # Slots are loaded a step ahead and carried. Loaded where they are used, they would be an
    # indirection within the step, which gets the pipeline's stages in place of keys and values.
    if AFFINE:
        # A step lies in one page, so one slot gives them all. That of the first key that may be
        # read: slots behind a window may have been given away.
        nearest = tl.maximum(begin, lo) if MASKED else begin
        ahead = tl.load(kv_row + nearest, mask=begin < end, other=0)
    else:
        n = begin + offs_n
        ahead = tl.load(kv_row + n, mask=(n >= lo) & (n < hi), other=0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = start + offs_n
        readable = (n >= lo) & (n < hi)
        slots = ahead.to(tl.int64 if INDEX64 else tl.int32)
        if AFFINE:
            slots += n - (tl.maximum(start, lo) if MASKED else start)
            ahead = tl.load(kv_row + start + BLOCK_N, mask=start + BLOCK_N < end, other=0)
        else:
            ahead = tl.load(kv_row + n + BLOCK_N, mask=n + BLOCK_N < hi, other=0)

        # Keys arrive transposed, [D, BLOCK_N].
        k_at = k_head + slots[None, :] * stride_k + offs_d[:, None]
        k = tl.load(k_at, mask=readable[None, :], other=0.0) if MASKED else tl.load(k_at)
        s = _dot(q, _cast(k, q, UPCAST), UPCAST)
        if LOGIT_CAP:
            # cap * tanh(s * scale / cap), by way of exp2, which saturates the right way.
            s = cap * (1.0 - 2.0 / (tl.exp2(s * qk_scale) + 1.0))
        if MASKED:
            visible = readable[None, :]
            if CAUSAL:
                visible = visible & (n[None, :] <= positions[:, None])
                if WINDOW:
                    visible = visible & (n[None, :] >= positions[:, None] - window)
            s = tl.where(visible, s, float("-inf"))

        largest = tl.max(s, 1)
        m_new = tl.maximum(m_i, largest if LOGIT_CAP else largest * qk_scale)
        m_base = m_new
        if MASKED and CAUSAL and WINDOW:
            # A query may see no key yet: -inf less -inf would be NaN.
            m_base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((s if LOGIT_CAP else s * qk_scale) - m_base[:, None])
        alpha = tl.exp2(m_i - m_base)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]

        v_at = v_head + slots[:, None] * stride_v + offs_d[None, :]
        v = tl.load(v_at, mask=readable[:, None], other=0.0) if MASKED else tl.load(v_at)
        acc += _dot(_cast(p, q, UPCAST), _cast(v, q, UPCAST), UPCAST)
        m_i = m_new
    return m_i, l_i, acc


@triton.jit
def prefill_tile(
    tile,
    tensors,
    units,  # records of PREFILL_FIELDS
    scalars,
    strides,
    HEADS: tl.constexpr,  # query heads, KV heads, D
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AFFINE: tl.constexpr,
    STAGES: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """BLOCK_M queries of one head, consecutive tokens of one row, attended and written."""
    Q_HEADS: tl.constexpr = HEADS[0]
    GROUP: tl.constexpr = HEADS[0] // HEADS[1]
    D: tl.constexpr = HEADS[2]
    WINDOW: tl.constexpr = OPTIONS[0]
    SINKS: tl.constexpr = OPTIONS[2]
    q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr, kv_indptr, kv_indices = tensors
    stride_qt, stride_qh, stride_ot, stride_oh, stride_kt, stride_kh, stride_vt, stride_vh = strides

    # Heads of a group are neighbours in the launch, so that they find their keys in the cache.
    head = tile % Q_HEADS
    unit = units + tile // Q_HEADS * 4
    row = tl.load(unit)
    first_query = tl.load(unit + 1).to(tl.int64)
    num_queries = tl.load(unit + 2)
    first = tl.load(unit + 3)
    kv_row = kv_indices + tl.load(kv_indptr + row)
    kv_head = (head // GROUP).to(tl.int64)
    heads = (k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh, stride_kt, stride_vt)

    rows = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    live = (rows < num_queries)[:, None]
    q_at = q_ptr + first_query * stride_qt + head * stride_qh
    q = tl.load(q_at + rows[:, None] * stride_qt + offs_d[None, :], mask=live, other=0.0)
    state = (
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, D], tl.float32),
    )
    positions = first + rows

    # Whole steps that every query sees need no mask: they end at or before the first query's own
    # key and, under a window, begin at or after the last query's first key.
    lo = 0
    hi = first + num_queries
    whole_begin = 0
    whole_end = (first + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        window = scalars[0]
        lo = tl.maximum(first - window, 0)
        begin = lo // BLOCK_N * BLOCK_N
        last_lo = tl.maximum(hi - 1 - window, 0)
        whole_begin = (last_lo + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        whole_end = tl.maximum(whole_begin, whole_end)
        state = _attend(
            q, state, heads, kv_row, positions, begin, tl.minimum(whole_begin, hi), lo, hi,
            scalars, BLOCK_N, D, True, True, AFFINE, STAGES, OPTIONS,
        )  # fmt: skip
    state = _attend(
        q, state, heads, kv_row, positions, whole_begin, whole_end, lo, hi,
        scalars, BLOCK_N, D, False, True, AFFINE, STAGES, OPTIONS,
    )  # fmt: skip
    m_i, l_i, acc = _attend(
        q, state, heads, kv_row, positions, whole_end, hi, lo, hi,
        scalars, BLOCK_N, D, True, True, AFFINE, STAGES, OPTIONS,
    )  # fmt: skip

    if SINKS:
        l_i += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E - m_i)
    out = acc * (scalars[3] / l_i)[:, None]
    out_at = out_ptr + first_query * stride_ot + head * stride_oh
    out_at += rows[:, None] * stride_ot + offs_d[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def decode_tile(
    tile,
    tensors,
    partials,  # output [partials, q_heads, D] float32, and [partials, q_heads] float32
    units,  # records of DECODE_FIELDS
    scalars,
    strides,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AFFINE: tl.constexpr,
    STAGES: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """The query heads of one KV head, packed as rows, against one split of a decode row's keys.

    A row with one split is written to the output; otherwise the partial result waits for the
    merge, with the base-2 logarithm of its denominator. Few rows on purpose: products of a taller
    tile would be taken from prefill.
    """
    KV_HEADS: tl.constexpr = HEADS[1]
    GROUP: tl.constexpr = HEADS[0] // HEADS[1]
    D: tl.constexpr = HEADS[2]
    WINDOW: tl.constexpr = OPTIONS[0]
    SINKS: tl.constexpr = OPTIONS[2]
    q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr, kv_indptr, kv_indices = tensors
    stride_qt, stride_qh, stride_ot, stride_oh, stride_kt, stride_kh, stride_vt, stride_vh = strides

    kv_head = tile % KV_HEADS
    unit = units + tile // KV_HEADS * 5
    row = tl.load(unit)
    query = tl.load(unit + 1).to(tl.int64)
    lo = tl.load(unit + 2)
    hi = tl.load(unit + 3)
    partial = tl.load(unit + 4)
    kv_row = kv_indices + tl.load(kv_indptr + row)
    k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
    v_head = v_ptr + kv_head.to(tl.int64) * stride_vh
    kv = (k_head, v_head, stride_kt, stride_vt)

    rows = tl.arange(0, BLOCK_H)
    heads = kv_head * GROUP + rows
    offs_d = tl.arange(0, D)
    live = rows < GROUP
    q_at = q_ptr + query * stride_qt + heads[:, None] * stride_qh + offs_d[None, :]
    q = tl.load(q_at, mask=live[:, None], other=0.0)
    state = (
        tl.full([BLOCK_H], float("-inf"), tl.float32),
        tl.zeros([BLOCK_H], tl.float32),
        tl.zeros([BLOCK_H, D], tl.float32),
    )

    # Only under a window does a split begin within a step; one masked loop serves it then.
    whole_end = lo // BLOCK_N * BLOCK_N
    if not WINDOW:
        whole_end = hi // BLOCK_N * BLOCK_N
        state = _attend(
            q, state, kv, kv_row, rows, lo, whole_end, lo, hi,
            scalars, BLOCK_N, D, False, False, AFFINE, STAGES, OPTIONS,
        )  # fmt: skip
    m_i, l_i, acc = _attend(
        q, state, kv, kv_row, rows, whole_end, hi, lo, hi,
        scalars, BLOCK_N, D, True, False, AFFINE, STAGES, OPTIONS,
    )  # fmt: skip

    if partial < 0:
        if SINKS:
            sinks = tl.load(sinks_ptr + heads, mask=live, other=0.0).to(tl.float32)
            l_i += tl.exp2(sinks * LOG2_E - m_i)
        out = acc * (scalars[3] / l_i)[:, None]
        out_at = out_ptr + query * stride_ot + heads[:, None] * stride_oh + offs_d[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=live[:, None])
    else:
        partial_out, partial_lse = partials
        place = partial.to(tl.int64) * (KV_HEADS * GROUP) + heads
        part_at = partial_out + place[:, None] * D + offs_d[None, :]
        tl.store(part_at, acc / l_i[:, None], mask=live[:, None])
        tl.store(partial_lse + place, m_i + tl.log2(l_i), mask=live)

"""The fused launch and the merge of split rows.

After POD-Attention's CTA-parallel fusion (arXiv 2410.18038, section 4): a thread block learns
which SM it runs on, takes that SM's next ticket, and the ticket decides whether it computes a
prefill or a decode tile. Blocks that share an SM thus have different roles, wherever the hardware
put them. No block waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_tiered_kernels.pod_attention.triton_tiles import LOG2_E, decode_tile, prefill_tile

# Numbers that change from batch to batch: specialising on them would recompile in the middle of
# serving whenever one becomes 1 or a multiple of 16.
PER_BATCH = [
    "num_prefill",
    "num_decode",
    "prefill_tickets",
    "decode_tickets",
    "decode_offset",
    "window",
]
# Slices of larger buffers, which need not begin at a multiple of 16 bytes.
ANY_ALIGNMENT = ["kv_indptr", "kv_indices", "sinks_ptr"]


@triton.jit
def _sm_id(FAKE_SMS: tl.constexpr):
    # The untaken branch is never traced, so the interpreter does not meet the assembly.
    if FAKE_SMS > 0:
        return tl.program_id(0) % FAKE_SMS
    else:  # noqa: RET505
        return tl.inline_asm_elementwise(
            "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _run_tile(
    role,  # 0 prefill, 1 decode; ignored where ROLES has only one
    index,
    tensors,
    partials,
    table,
    decode_offset,
    scalars,
    strides,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    AFFINE: tl.constexpr,
    STAGES: tl.constexpr,
    ROLES: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """The tile of this role with this index. BLOCKS: BLOCK_M, BLOCK_N, BLOCK_H, BLOCK_N_DECODE;
    AFFINE, STAGES: of prefill, of decode."""
    if ROLES == 1:
        prefill_tile(
            index, tensors, table, scalars, strides,
            HEADS, BLOCKS[0], BLOCKS[1], AFFINE[0], STAGES[0], OPTIONS,
        )  # fmt: skip
    elif ROLES == 2:
        decode_tile(
            index, tensors, partials, table + decode_offset, scalars, strides,
            HEADS, BLOCKS[2], BLOCKS[3], AFFINE[1], STAGES[1], OPTIONS,
        )  # fmt: skip
    else:  # noqa: PLR5501 - an elif on role would mix a constexpr with a value
        if role == 0:
            prefill_tile(
                index, tensors, table, scalars, strides,
                HEADS, BLOCKS[0], BLOCKS[1], AFFINE[0], STAGES[0], OPTIONS,
            )  # fmt: skip
        else:
            decode_tile(
                index, tensors, partials, table + decode_offset, scalars, strides,
                HEADS, BLOCKS[2], BLOCKS[3], AFFINE[1], STAGES[1], OPTIONS,
            )  # fmt: skip


@triton.jit(do_not_specialize=PER_BATCH, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def pod_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sinks_ptr,
    partial_out,
    partial_lse,
    counters,  # int32 zeros: next prefill tile, next decode tile, and tickets from FIRST_TICKET
    table,
    kv_indptr,
    kv_indices,
    num_prefill,
    num_decode,
    prefill_tickets,
    decode_tickets,
    decode_offset,
    window,
    qk_scale,
    cap,
    v_scale,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N_DECODE: tl.constexpr,
    ROLES: tl.constexpr,  # 3 both, 1 prefill, 2 decode
    SCHEDULE: tl.constexpr,  # 0 ticket, 1 persistent
    WINDOW: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    AFFINE: tl.constexpr,
    AFFINE_DECODE: tl.constexpr,
    INDEX64: tl.constexpr,
    UPCAST: tl.constexpr,
    SM_SLOTS: tl.constexpr,
    FIRST_TICKET: tl.constexpr,
    FAKE_SMS: tl.constexpr,
    STAGES: tl.constexpr,
    STAGES_DECODE: tl.constexpr,
):
    """Grid: one block per tile, or any number of blocks where SCHEDULE is persistent."""
    HEADS: tl.constexpr = (Q_HEADS, KV_HEADS, D)
    BLOCKS: tl.constexpr = (BLOCK_M, BLOCK_N, BLOCK_H, BLOCK_N_DECODE)
    AFFINES: tl.constexpr = (AFFINE, AFFINE_DECODE)
    STAGE_PAIR: tl.constexpr = (STAGES, STAGES_DECODE)
    OPTIONS: tl.constexpr = (WINDOW, LOGIT_CAP, SINKS, INDEX64, UPCAST)
    tensors = (q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr, kv_indptr, kv_indices)
    partials = (partial_out, partial_lse)
    scalars = (window, qk_scale, cap, v_scale)
    strides = (
        stride_qt, stride_qh, stride_ot, stride_oh, stride_kt, stride_kh, stride_vt, stride_vh,
    )  # fmt: skip
    if ROLES != 3:
        _run_tile(
            0, tl.program_id(0), tensors, partials, table, decode_offset,
            scalars, strides, HEADS, BLOCKS, AFFINES, STAGE_PAIR,
            ROLES, OPTIONS,
        )  # fmt: skip
    else:
        slot = _sm_id(FAKE_SMS) % SM_SLOTS
        ticket = tl.atomic_add(counters + FIRST_TICKET + slot, 1, sem="relaxed")
        # Spread evenly over a period: the two numbers are coprime. The first ticket is prefill's.
        period = prefill_tickets + decode_tickets
        role = tl.where(ticket % period * prefill_tickets % period < prefill_tickets, 0, 1)
        if SCHEDULE == 0:
            index = tl.atomic_add(counters + role, 1, sem="relaxed")
            if index >= tl.where(role == 0, num_prefill, num_decode):
                # This role ran dry. As there is a block per tile, the other one cannot have.
                role = 1 - role
                index = tl.atomic_add(counters + role, 1, sem="relaxed")
            _run_tile(
                role, index, tensors, partials, table, decode_offset,
                scalars, strides, HEADS, BLOCKS, AFFINES, STAGE_PAIR,
                ROLES, OPTIONS,
            )  # fmt: skip
        else:
            dry = 0
            while dry < 2:
                index = tl.atomic_add(counters + role, 1, sem="relaxed")
                if index >= tl.where(role == 0, num_prefill, num_decode):
                    role = 1 - role
                    dry += 1
                else:
                    _run_tile(
                        role, index, tensors, partials, table, decode_offset,
                        scalars, strides, HEADS, BLOCKS, AFFINES, STAGE_PAIR,
                        ROLES, OPTIONS,
                    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["units", "sinks_ptr"])
def merge_kernel(
    partial_out,
    partial_lse,
    out_ptr,
    sinks_ptr,
    units,  # records of MERGE_FIELDS
    v_scale,
    stride_ot,
    stride_oh,
    Q_HEADS: tl.constexpr,
    D: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid [split rows, query heads]: weigh a row's partial results by their denominators."""
    unit = units + tl.program_id(0) * 3
    head = tl.program_id(1)
    query = tl.load(unit).to(tl.int64)
    first = tl.load(unit + 1).to(tl.int64)
    num_partials = tl.load(unit + 2)
    splits = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, D)
    m_i = -float("inf")
    l_i = 0.0
    acc = tl.zeros([D], tl.float32)
    for begin in range(0, num_partials, BLOCK_S):
        live = begin + splits < num_partials
        place = (first + begin + splits) * Q_HEADS + head
        lse = tl.load(partial_lse + place, mask=live, other=float("-inf"))
        at = partial_out + place[:, None] * D + offs_d[None, :]
        part = tl.load(at, mask=live[:, None], other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        weight = tl.exp2(lse - m_new)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        m_i = m_new
    if SINKS:
        l_i += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E - m_i)
    out_at = out_ptr + query * stride_ot + head * stride_oh + offs_d
    tl.store(out_at, (acc * (v_scale / l_i)).to(out_ptr.dtype.element_ty))

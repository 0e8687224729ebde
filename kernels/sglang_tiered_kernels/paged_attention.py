"""Paged attention in plain PyTorch: only the new queries, each KV head read once.

It serves SGLang on machines without a GPU (``--attention-backend reference``), and is what faster
kernels are checked against.

A *row* is a slot of the KV cache. A sequence is its rows in token order, so key ``j`` of sequence
``i`` is ``key_cache[rows[i][j]]``; rows may be scattered. No slot outside ``rows`` is read, nor any
that a sliding window hides from every query, so such slots may hold anything, NaN included.

Query head ``h`` uses KV head ``h // (query_heads // kv_heads)``. The queries of a group are stacked
as rows of one matrix product, which is what makes grouped-query attention free of KV copies.

PyTorch's fused CPU kernel serves plain attention; a soft cap, sinks or unequal head sizes take
the explicit product in float32. Both accumulate in float32.

Tensors are borrowed for the call; results are new. Forward only: no gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence


# Queries handled together. Larger blocks waste products on masked keys and push the explicit
# product's scores out of cache; smaller ones pay call overhead.
_QUERY_BLOCK = 128
# The explicit product holds its scores, in float32: at most 64 MiB of them at a time.
_SCORE_BUDGET = 1 << 24
# Decode gathers about this many tokens at a time, so that the copy is in cache when it is used.
_GROUP_TOKENS = 3072
# One more group costs about as much as this many padding tokens.
_GROUP_WASTE = 512


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences of similar length, padded to the longest.

    sequences: [n] int64, rows of ``query``. rows: [n * longest] int64; padding repeats a row of the
    same sequence, so it is live memory. mask: [n, 1, 1, longest] bool, False at padding; None when
    there is none.
    """

    sequences: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor | None


DecodePlan = list[_DecodeGroup]
"""Which cache rows each sequence of a decode batch reads, shared by all layers that read the same
rows under the same window. Owns its index tensors. Make it with ``plan_decode``."""


def plan_decode(rows: Sequence[torch.Tensor], *, sliding_window: int | None = None) -> DecodePlan:
    """Group a decode batch by length.

    rows: one [length] int64 or int32 tensor per sequence, whose last key is the query's own token.
    sliding_window: as in ``extend``. A sequence without rows gets zeros from ``decode``.
    """
    if sliding_window is not None:
        rows = [r[max(0, len(r) - 1 - sliding_window) :] for r in rows]
    order = sorted((i for i, r in enumerate(rows) if len(r)), key=lambda i: -len(rows[i]))
    groups: DecodePlan = []
    members: list[int] = []
    waste = 0
    for i in order:
        if members:
            longest = len(rows[members[0]])
            waste += longest - len(rows[i])
            if waste > _GROUP_WASTE or (len(members) + 1) * longest > _GROUP_TOKENS:
                groups.append(_pad_group(rows, members))
                members, waste = [], 0
        members.append(i)
    if members:
        groups.append(_pad_group(rows, members))
    return groups


def _pad_group(rows: Sequence[torch.Tensor], members: list[int]) -> _DecodeGroup:
    """Pads the rows of ``members``, which have descending lengths above zero."""
    lengths = [len(rows[i]) for i in members]
    device = rows[members[0]].device
    padded = torch.empty(len(members), lengths[0], dtype=torch.int64, device=device)
    for target, i, length in zip(padded, members, lengths, strict=True):
        target[:length] = rows[i]
        target[length:] = rows[i][0]
    mask = None
    if lengths[-1] != lengths[0]:
        ends = torch.tensor(lengths, device=device)[:, None]
        mask = (torch.arange(lengths[0], device=device) < ends)[:, None, None]
    return _DecodeGroup(torch.tensor(members, device=device), padded.flatten(), mask)


def decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one new token of each sequence.

    query: [sequences, query_heads, qk_dim]; caches and options as in ``extend``.
    Returns [sequences, query_heads, v_dim] in the query's dtype.
    """
    _check_shapes(query, key_cache, value_cache)
    kv_heads = key_cache.shape[1]
    out = query.new_zeros(query.shape[0], query.shape[1], value_cache.shape[-1])
    grouped_sinks = None if sinks is None else sinks.float().view(kv_heads, -1, 1)
    longest = max((len(group.rows) for group in plan), default=0)
    gather = _Gather(key_cache, value_cache, query.dtype, longest)
    for group in plan:
        batch = len(group.sequences)
        # [batch * keys, kv_heads, dim] -> [batch, kv_heads, keys, dim]
        key, value = (
            half.view(batch, -1, kv_heads, half.shape[-1]).transpose(1, 2)
            for half in gather(group.rows)
        )
        attended = _attend(
            query.index_select(0, group.sequences).view(batch, kv_heads, -1, query.shape[-1]),
            key,
            value,
            group.mask,
            scale=scale,
            logit_cap=logit_cap,
            sinks=grouped_sinks,
        )
        out.index_copy_(0, group.sequences, attended.flatten(1, 2))
    return out


def extend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: Sequence[torch.Tensor],
    query_lens: Sequence[int],
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from the last ``query_lens[i]`` tokens of each sequence to all its keys.

    query: [tokens, query_heads, qk_dim] float32, bfloat16 or float16, the sequences end to end;
        tokens beyond ``sum(query_lens)`` are padding and come back as zeros.
    key_cache, value_cache: [slots, kv_heads, qk_dim] and [slots, kv_heads, v_dim], any floating
        dtype (fp8 is cast to the query's after the gather). ``v_dim`` may differ from ``qk_dim``,
        and ``value_cache`` may be the leading slice of ``key_cache`` (MLA), which is read once.
    rows: one [length] int64 or int32 tensor per sequence, prefix and new tokens. A sequence without
        rows (a text-only request in cross attention) comes back as zeros.
    causal: query ``r`` of a sequence sits at position ``length - query_len + r`` and sees the keys
        up to it. False: it sees every key, and ``rows`` may be shorter than ``query_lens``.
    sliding_window: keys at ``position - window`` and later are visible, SGLang's inclusive meaning;
        without ``causal`` the window closes at ``position + window`` too.
    logit_cap: scores become ``cap * tanh(scores / cap)``; 0 for none.
    sinks: [query_heads], a logit per head that joins the softmax's denominator.
    Returns [tokens, query_heads, v_dim] in the query's dtype.
    """
    _check_shapes(query, key_cache, value_cache)
    out = query.new_zeros(query.shape[0], query.shape[1], value_cache.shape[-1])
    gather = _Gather(key_cache, value_cache, query.dtype, max(map(len, rows), default=0))
    begin = 0
    for sequence_rows, count in zip(rows, query_lens, strict=True):
        if causal and count > len(sequence_rows):
            raise ValueError(f"{count} queries at the end of {len(sequence_rows)} keys")
        if count and len(sequence_rows):
            _extend_one(
                out[begin : begin + count],
                query[begin : begin + count],
                gather,
                sequence_rows,
                scale=scale,
                causal=causal,
                sliding_window=sliding_window,
                logit_cap=logit_cap,
                sinks=sinks,
            )
        begin += count
    return out


def _extend_one(
    out: torch.Tensor,
    query: torch.Tensor,
    gather: _Gather,
    rows: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    logit_cap: float,
    sinks: torch.Tensor | None,
) -> None:
    """Write one sequence's attention to ``out`` [queries, query_heads, v_dim]."""
    count, query_heads, qk_dim = query.shape
    length = len(rows)
    offset = length - count
    # Keys before the first query's window are not gathered: their slots may be freed already.
    base = 0 if sliding_window is None else max(0, offset - sliding_window)
    key, value = (half.transpose(0, 1)[None] for half in gather(rows[base:]))
    kv_heads = key.shape[1]
    group = query_heads // kv_heads

    plain = not logit_cap and sinks is None and qk_dim == value.shape[-1]
    if plain and causal and sliding_window is None and offset == 0:
        # The one case the fused kernel's own causal mask fits, and there it skips hidden keys.
        fused = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key,
            value,
            is_causal=True,
            scale=scale,
            enable_gqa=group > 1,
        )
        out.copy_(fused[0].transpose(0, 1))
        return

    block = _QUERY_BLOCK
    if not plain:
        block = max(1, min(block, _SCORE_BUDGET // (query_heads * length)))
    for low in range(0, count, block):
        high = min(count, low + block)
        first, last = base, length
        if causal:
            last = offset + high
        if sliding_window is not None:
            first = max(base, offset + low - sliding_window)
            last = min(last, offset + high + sliding_window)
        mask = None
        if causal or sliding_window is not None:
            mask = _visible(
                torch.arange(offset + low, offset + high, device=query.device),
                torch.arange(first, last, device=query.device),
                causal=causal,
                sliding_window=sliding_window,
            ).repeat(group, 1)
        # [queries, heads, dim] -> [1, kv_heads, group * queries, dim]
        grouped = query[low:high].reshape(high - low, kv_heads, group, qk_dim)
        attended = _attend(
            grouped.permute(1, 2, 0, 3).flatten(1, 2)[None],
            key[:, :, first - base : last - base],
            value[:, :, first - base : last - base],
            mask,
            scale=scale,
            logit_cap=logit_cap,
            sinks=None if sinks is None else _sink_rows(sinks, kv_heads, high - low),
        )
        ungrouped = attended.view(kv_heads, group, high - low, -1).permute(2, 0, 1, 3)
        out[low:high] = ungrouped.flatten(1, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    logit_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query: [batch, kv_heads, rows, qk_dim]. key, value: [batch, kv_heads, keys, dim] of the same
    dtype. mask: bool, broadcastable to [batch, kv_heads, rows, keys], True where visible.
    sinks: [kv_heads, rows, 1] float32. Returns [batch, kv_heads, rows, v_dim]."""
    if not logit_cap and sinks is None and query.shape[-1] == value.shape[-1]:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = (query.float() * scale) @ key.float().mT
    if logit_cap:
        scores.div_(logit_cap).tanh_().mul_(logit_cap)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        column = sinks.expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return (weights @ value.float()).to(query.dtype)


def _visible(
    queries: torch.Tensor, keys: torch.Tensor, *, causal: bool, sliding_window: int | None
) -> torch.Tensor:
    """[queries, keys] bool from positions, each [n] int64."""
    distance = queries[:, None] - keys
    if sliding_window is None:
        return distance >= 0
    return (distance >= (0 if causal else -sliding_window)) & (distance <= sliding_window)


def _sink_rows(sinks: torch.Tensor, kv_heads: int, queries: int) -> torch.Tensor:
    """[query_heads] -> [kv_heads, group * queries, 1] float32, in the order of grouped queries."""
    return sinks.float().view(kv_heads, -1, 1).repeat_interleave(queries, dim=1)


class _Gather:
    """Copies rows out of the caches into memory that the next copy overwrites.

    One buffer for all groups of a call: a fresh one for each costs more in page faults than the
    copy itself. capacity: the most rows of one copy.
    """

    def __init__(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        dtype: torch.dtype,
        capacity: int,
    ) -> None:
        self._caches = [key_cache]
        self._dtype = dtype
        self._value_dim = value_cache.shape[-1]
        aliased = (
            value_cache.data_ptr() == key_cache.data_ptr()
            and value_cache.stride() == key_cache.stride()
            and value_cache.dtype == key_cache.dtype
        )
        if not aliased:
            self._caches.append(value_cache)
        self._buffers = [c.new_empty(capacity, *c.shape[1:]) for c in self._caches]

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values at ``rows`` [n], each [n, kv_heads, dim], until the next call."""
        # index_select is four to six times as fast as indexing with a tensor here.
        halves = [
            torch.index_select(cache, 0, rows, out=buffer[: len(rows)]).to(self._dtype)
            for cache, buffer in zip(self._caches, self._buffers, strict=True)
        ]
        return halves[0], halves[-1][..., : self._value_dim]


def _check_shapes(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    if query.shape[2] != key_cache.shape[2]:
        raise ValueError(f"query head size {query.shape[2]}, key head size {key_cache.shape[2]}")
    if key_cache.shape[1] != value_cache.shape[1] or query.shape[1] % key_cache.shape[1]:
        raise ValueError(
            f"{query.shape[1]} query heads, {key_cache.shape[1]} key heads, "
            f"{value_cache.shape[1]} value heads"
        )

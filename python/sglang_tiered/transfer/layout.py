"""Which bytes of a prefill rank's page are which bytes of a decode rank's page.

Buffers pair by layer; where the ranks split heads differently (prefill TP is not decode TP), each
pair carries the byte range of the heads that both hold. Both sides compute the pairs from the two
layouts exchanged in Hello and Welcome, so no header needs to say where bytes belong. Nor need an
encoded slab say how to read it: its codec follows from them too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import lru_cache
from typing import TYPE_CHECKING

from sglang_tiered.codecs import NO_CODEC, PageLayout, SegmentLayout, make_codec
from sglang_tiered.codecs.base import ITEM_BYTES
from sglang_tiered.errors import TransferError
from sglang_tiered.transfer.memory import SlabPiece, TokenSlice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.codecs import PageCodec
    from sglang_tiered.transfer.memory import Buffer
    from sglang_tiered.transfer.messages import KVLayout


_SAME = {
    "page_size": "--page-size",
    "dtype": "--kv-cache-dtype",
    "codec": "--transfer-codec",
    "element": "--dtype",
}
"""Of two layouts, with the flag that sets each. Elements matter to a codec only."""


Pair = tuple[SlabPiece, SlabPiece]
"""The same bytes of a page at the source and at the destination."""


def heads_of_rank(rank: int, num_ranks: int, num_heads: int) -> range:
    """The KV heads of a tensor-parallel rank; with fewer heads than ranks they repeat."""
    if num_ranks <= num_heads:
        per_rank = num_heads // num_ranks
        return range(rank * per_rank, (rank + 1) * per_rank)
    head = rank * num_heads // num_ranks
    return range(head, head + 1)


def pair_buffers(source: KVLayout, destination: KVLayout) -> list[Pair]:
    """The pairs of a prefill rank (source) and a decode rank, in source order.

    Empty if another prefill rank sends the same heads. Raises ``TransferError`` with one
    sentence for layouts that cannot be paired.
    """
    for who, layout in (("prefill", source), ("decode", destination)):
        if layout.tp_rank >= layout.tp_size or len(layout.layer_ids) != len(layout.page_bytes):
            raise TransferError(f"{who} describes its KV inconsistently.")
    for name, flag in _SAME.items():
        ours, theirs = getattr(source, name), getattr(destination, name)
        if ours != theirs and (name != "element" or source.codec != NO_CODEC):
            raise TransferError(
                f"prefill has {flag} {ours} and decode {theirs}; start both with the same."
            )
    if [state.kind for state in source.states] != [state.kind for state in destination.states]:
        raise TransferError(
            f"prefill keeps the states {_kinds(source)} and decode {_kinds(destination)}; serve "
            "the same model with the same flags on both."
        )
    if source.states and source.states != destination.states:
        raise TransferError(
            "prefill and decode split the model's states differently; give both the same --tp-size."
        )
    if source.aux_bytes != destination.aux_bytes:
        raise TransferError(
            f"prefill has {len(source.aux_bytes)} metadata buffers and decode "
            f"{len(destination.aux_bytes)}, or of other sizes; give both the same flags."
        )
    by_layer = _by_layer(source, destination)
    total_heads = source.total_heads or destination.total_heads
    if not total_heads or (source.tp_rank, source.tp_size) == (
        destination.tp_rank,
        destination.tp_size,
    ):
        return [_whole(source, destination, a, b) for a, b in by_layer]
    sent = heads_of_rank(source.tp_rank, source.tp_size, total_heads)
    wanted = heads_of_rank(destination.tp_rank, destination.tp_size, total_heads)
    if not _shared(sent, wanted) or _is_repeated(source, destination, sent, total_heads):
        return []
    return [_sliced(source, destination, a, b, sent, wanted) for a, b in by_layer]


def whole_pieces(buffers: Sequence[Buffer]) -> list[SlabPiece]:
    """Whole rows of each buffer: how state components travel."""
    return [SlabPiece(index, buffer.page_bytes) for index, buffer in enumerate(buffers)]


def are_whole(pairs: Sequence[Pair]) -> bool:
    """Whether pages need not be cut, on either side."""
    return all(piece.part is None for pair in pairs for piece in pair)


def slab_codec(layout: KVLayout, pieces: Sequence[SlabPiece], num_pages: int) -> PageCodec | None:
    """The codec of slabs of KV, each of consecutive tokens; None where slabs go as they are. A
    slab that does not divide into whole elements has another length, and is stored exactly."""
    if layout.codec == NO_CODEC:
        return None
    dtype = layout.element or "uint8"
    channel_bytes = layout.page_size * ITEM_BYTES[dtype]
    widths = tuple(max(1, piece.page_bytes // channel_bytes) for piece in pieces)
    return _codec(layout.codec, dtype, num_pages * layout.page_size, widths)


@lru_cache(maxsize=64)  # a room has slabs of a few shapes
def _codec(name: str, dtype: str, num_tokens: int, widths: tuple[int, ...]) -> PageCodec:
    axes = ("token", "channel")
    segments = tuple(SegmentLayout(axes, (num_tokens, width)) for width in widths)
    return make_codec(name, PageLayout(dtype=dtype, segments=segments))


def _kinds(layout: KVLayout) -> str:
    return ", ".join(state.kind for state in layout.states) or "none"


def _is_repeated(source: KVLayout, destination: KVLayout, heads: range, total_heads: int) -> bool:
    """Whether the rank before ``source`` sends the same heads to ``destination``. Consecutive
    prefill ranks serve a decode rank; the first of them has no such neighbour."""
    group = source.tp_size // destination.tp_size
    if group < 2 or source.tp_rank % group == 0:
        return False
    return heads_of_rank(source.tp_rank - 1, source.tp_size, total_heads) == heads


def _by_layer(source: KVLayout, destination: KVLayout) -> list[tuple[int, int]]:
    """Pairs the buffers of each layer, the n-th with the n-th (K with K, V with V)."""
    wanted: defaultdict[int, deque[int]] = defaultdict(deque)
    for index, layer in enumerate(destination.layer_ids):
        wanted[layer].append(index)
    pairs = []
    for index, layer in enumerate(source.layer_ids):
        if not wanted[layer]:
            raise TransferError(
                f"prefill holds KV of layer {layer} that decode does not; serve the same model "
                "with the same --pp-size or --pp-size 1 on decode."
            )
        pairs.append((index, wanted[layer].popleft()))
    return pairs


def _whole(source: KVLayout, destination: KVLayout, a: int, b: int) -> Pair:
    sent, wanted = source.page_bytes[a], destination.page_bytes[b]
    if sent != wanted:
        raise TransferError(
            f"a page of layer {source.layer_ids[a]} has {sent} bytes on prefill and {wanted} on "
            "decode; serve the same model with the same flags on both."
        )
    return SlabPiece(a, sent), SlabPiece(b, sent)


def _sliced(
    source: KVLayout, destination: KVLayout, a: int, b: int, sent: range, wanted: range
) -> Pair:
    """The heads of a buffer that both ranks have: ``sent`` are all of prefill's, ``wanted`` all of
    decode's."""
    page_size, shared = source.page_size, _shared(sent, wanted)
    source_token, source_rest = divmod(source.page_bytes[a], page_size)
    destination_token, destination_rest = divmod(destination.page_bytes[b], page_size)
    head_bytes, rest = divmod(source_token, len(sent))
    if source_rest or destination_rest or rest or head_bytes * len(wanted) != destination_token:
        raise TransferError(
            f"layer {source.layer_ids[a]} has {source_token} bytes per token for {len(sent)} "
            f"heads on prefill and {destination_token} for {len(wanted)} on decode, which is not a "
            "split by heads; give both the same --tp-size."
        )
    num_bytes = len(shared) * head_bytes

    def piece(buffer: int, own: range) -> SlabPiece:
        low = (shared.start - own.start) * head_bytes
        part = TokenSlice(len(own) * head_bytes, low, low + num_bytes)
        return SlabPiece(buffer, num_bytes * page_size, None if own == shared else part)

    return piece(a, sent), piece(b, wanted)


def _shared(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))

"""Cuts prompts into blocks of another size, sharing what they shared."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace.request import num_blocks_for
from sglang_tiered_lab.trace.reuse import PrefixKeys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sglang_tiered_lab.trace.request import TraceRequest


def with_block_tokens(
    requests: Iterable[TraceRequest], block_tokens: int | None = None
) -> Iterator[TraceRequest]:
    """The requests with blocks of ``block_tokens``, or of their own size; ids name prefixes, from 0
    in order of appearance. Lengths stay.

    Joining small blocks is exact. Splitting large ones gives every part an id that follows from its
    block's, so nothing more is shared than before. One dict entry for every different block.
    Raises ``TraceError`` unless one size is a multiple of the other.
    """
    prefixes = PrefixKeys()
    for request in requests:
        size = request.block_tokens if block_tokens is None else block_tokens
        keys = prefixes.of(_blocks(request, size))
        yield msgspec.structs.replace(request, block_ids=tuple(keys), block_tokens=size)


def _blocks(request: TraceRequest, size: int) -> Iterable[object]:
    own, ids = request.block_tokens, request.block_ids
    if size == own:
        return ids
    if size % own == 0:
        joined = size // own
        return [ids[start : start + joined] for start in range(0, len(ids), joined)]
    if own % size == 0:
        parts = itertools.product(ids, range(own // size))
        return itertools.islice(parts, num_blocks_for(request.input_length, size))
    raise TraceError(
        f"blocks of {own} tokens cannot become blocks of {size}; give a multiple or a divisor of "
        f"{own}."
    )

"""How many tokens a block has, where a trace gives lengths and numbers of blocks only."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from sglang_tiered_lab.trace.request import num_blocks_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_ENOUGH = 0.9  # of the rows must fit
_MAX_BLOCK_TOKENS = 1 << 20
_ROUND = (16, 10, 1)  # a size is a power of two, else a multiple of the first of these that fits


def infer_block_tokens(lengths: Sequence[tuple[int, int]], usual: int) -> int:
    """The block size of prompts, each given as its tokens and its number of ids.

    ``usual`` where nearly all fit it. Otherwise the size that most rows fit, the last block
    counted; if that leaves too many out, whole blocks alone may be counted too.
    """
    lengths = [(tokens, ids) for tokens, ids in lengths if tokens and ids]
    if sum(_fits(tokens, ids, usual) for tokens, ids in lengths) >= _ENOUGH * len(lengths):
        return usual
    count, size = _most([_counting_the_last(*length) for length in lengths])
    if count < _ENOUGH * len(lengths):
        _, size = _most([_either(*length) for length in lengths])
    return size


def _fits(tokens: int, ids: int, size: int) -> bool:
    return ids in (num_blocks_for(tokens, size), tokens // size)


def _counting_the_last(tokens: int, ids: int) -> tuple[int, int]:
    """The least and the largest size with so many blocks."""
    largest = _MAX_BLOCK_TOKENS if ids == 1 else num_blocks_for(tokens, ids - 1) - 1
    return num_blocks_for(tokens, ids), largest


def _either(tokens: int, ids: int) -> tuple[int, int]:
    return tokens // (ids + 1) + 1, _counting_the_last(tokens, ids)[1]


def _most(ranges: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """How many of the ranges the best size lies in, and the roundest such size."""
    steps: dict[int, int] = {}
    for least, largest in ranges:
        if least <= largest:
            steps[least] = steps.get(least, 0) + 1
            steps[largest + 1] = steps.get(largest + 1, 0) - 1
    places = sorted(steps)
    counts = list(itertools.accumulate(steps[place] for place in places))
    best = max(counts, default=0)
    if best == 0:
        return 0, 1
    spans = [
        (place, after - 1)
        for (place, after), count in zip(itertools.pairwise(places), counts, strict=False)
        if count == best
    ]
    for power in range(_MAX_BLOCK_TOKENS.bit_length()):
        if any(least <= 1 << power <= largest for least, largest in spans):
            return best, 1 << power
    for factor in _ROUND:
        for least, largest in spans:
            multiple = num_blocks_for(least, factor) * factor
            if multiple <= largest:
                return best, multiple
    raise AssertionError("one is a factor of every size")

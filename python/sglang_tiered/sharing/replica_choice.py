"""Chooses which of several holders of a page to ask. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

from sglang_tiered.sharing.table import WORD_BITS

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["choose_slots"]

_MAX_RUNS = 16  # pages after these runs go to any holder


def choose_slots(
    bits: npt.NDArray[np.uint64], pages: npt.NDArray[np.uint64], salt: int
) -> npt.NDArray[np.int64]:
    """The slot to ask for each page, -1 for a page without a holder. ``bits`` are ``[words,
    pages]``.

    Each run goes to one of the peers that hold its longest leading span. A hash of ``salt`` and its
    first page chooses among them, so that servers spread over the holders.
    """
    slots = np.full(len(pages), -1, np.int64)
    left = np.flatnonzero(bits[0] if len(bits) == 1 else bits.any(axis=0))
    for _ in range(_MAX_RUNS):
        if not left.size:
            return slots
        start = int(left[0])
        common = np.bitwise_and.accumulate(bits[:, start:], axis=1)
        length = int(np.count_nonzero(common.any(axis=0)))  # no bit comes back in ``common``
        slots[start : start + length] = _pick(common[:, length - 1], int(pages[start]), salt)
        left = left[np.searchsorted(left, start + length) :]
    slots[left] = _lowest(bits[:, left])
    return slots


def _pick(words: npt.NDArray[np.uint64], page: int, salt: int) -> int:
    holders = [
        index * WORD_BITS + bit
        for index, word in enumerate(words.tolist())
        if word
        for bit in range(WORD_BITS)
        if word >> bit & 1
    ]
    if len(holders) == 1:
        return holders[0]
    return holders[xxhash.xxh3_64_intdigest(page.to_bytes(8, "little"), salt) % len(holders)]


def _lowest(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """The lowest bit of each column. No column may be empty."""
    word = (bits != 0).argmax(axis=0)
    values = bits[word, np.arange(bits.shape[1])]
    lowest = values & (~values + np.uint64(1))
    places: npt.NDArray[np.int64] = np.log2(lowest.astype(np.float64)).astype(np.int64)
    slots: npt.NDArray[np.int64] = word * WORD_BITS + places
    return slots

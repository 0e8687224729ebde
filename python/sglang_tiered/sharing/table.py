"""Maps a fingerprint to the peers that hold that page, as a bit for each peer, and chooses one of
them. No I/O.

A hash table of buckets of eight places, filled from the left; a full bucket overflows to the next
one. The hash multiplies by a random number, so an attacker cannot fill one bucket. Every method
works on arrays. One writer at a time; readers need no lock: a place is taken before its bits are
set, and a fingerprint without bits has no holder. Zero is not a fingerprint."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Fingerprints = npt.NDArray[np.uint64]
    Rows = npt.NDArray[np.int64]


WORD_BITS = 64
_WIDTH = 8  # places in a bucket: one cache line
_MAX_FILL = 0.5  # then a page in twenty needs a second bucket
_MIN_BUCKETS = 1 << 7
_PIECE = 1 << 14  # places for one call of numpy, which may hold the GIL
_MAX_RUNS = 16  # pages after these runs go to any holder


class PageTable:
    """Has room for ``_MAX_FILL`` of its places, and for ``num_words * 64`` peers."""

    def __init__(self, num_pages: int, num_words: int = 1) -> None:
        self.num_buckets = max(_MIN_BUCKETS, int(num_pages / _MAX_FILL / _WIDTH) + 1)
        self.num_words = num_words
        self._pages = np.zeros((self.num_buckets, _WIDTH), np.uint64)
        # One more than places: row -1 has no holder.
        self._holders = np.zeros((num_words, self.num_buckets * _WIDTH + 1), np.uint64)
        self._factor = np.uint64(secrets.randbits(64) | 1)
        self.num_used = 0  # places taken, also by pages without a holder

    @property
    def capacity(self) -> int:
        """The number of places that may be taken."""
        return int(self.num_buckets * _WIDTH * _MAX_FILL)

    @property
    def num_bytes(self) -> int:
        return self._pages.nbytes + self._holders.nbytes

    def find(self, pages: Fingerprints) -> Rows:
        """The place of each page, or -1 (for zero, any place)."""
        rows = np.full(len(pages), -1, np.int64)
        left = np.arange(len(pages))
        bucket = self._bucket(pages)
        while left.size:
            # ``take`` costs a fifth of an index here.
            places = self._pages.take(bucket, axis=0)  # [left, 8]
            hits = np.flatnonzero(places == pages[:, None])
            found = hits >> 3
            rows[left[found]] = (bucket[found] << 3) + (hits & 7)
            on = places[:, _WIDTH - 1] != 0
            on[found] = False
            left = left[on]
            pages = pages[on]
            bucket = (bucket[on] + 1) % self.num_buckets
        return rows

    def holders(self, rows: Rows) -> npt.NDArray[np.uint64]:
        """The bits of the holders, ``[num_words, rows]``, without any for row -1."""
        return self._holders.take(rows, axis=1)

    def _bucket(self, pages: Fingerprints) -> Rows:
        mixed = (pages * self._factor) >> np.uint64(32)
        mixed *= np.uint64(self.num_buckets)
        mixed >>= np.uint64(32)
        return mixed.view(np.int64)

    def add(self, pages: Fingerprints) -> Rows:
        """Give each page a place, within ``capacity``, and return the places. Pages are distinct
        and not zero, and do not have a place yet."""
        rows = np.full(len(pages), -1, np.int64)
        bucket = self._bucket(pages)
        left = np.argsort(bucket, kind="stable")
        bucket = bucket[left]
        while left.size:
            starts = np.flatnonzero(np.diff(bucket, prepend=-1))
            lengths = np.diff(starts, append=len(bucket))
            rank = np.arange(len(bucket)) - np.repeat(starts, lengths)
            column = rank + np.count_nonzero(self._pages.take(bucket, axis=0), axis=1)
            fits = column < _WIDTH
            chosen = left[fits]
            rows[chosen] = bucket[fits] * _WIDTH + column[fits]
            self._pages[bucket[fits], column[fits]] = pages[chosen]
            left = left[~fits]
            bucket = (bucket[~fits] + 1) % self.num_buckets
            order = np.argsort(bucket, kind="stable")
            left, bucket = left[order], bucket[order]
        self.num_used += len(pages)
        return rows

    def set_bit(self, rows: Rows, slot: int) -> tuple[int, int]:
        """Add a holder of distinct rows. Returns how many are new to it, and how many had no
        holder."""
        word, bit = self._holders[slot // WORD_BITS], np.uint64(1 << slot % WORD_BITS)
        before = word[rows]
        num_new = int(np.count_nonzero((before & bit) == 0))
        num_unheld = int(np.count_nonzero(self._unheld(rows)))
        word[rows] = before | bit
        return num_new, num_unheld

    def clear_bit(self, rows: Rows, slot: int) -> tuple[int, int]:
        """Remove a holder of distinct rows. Returns how many it held, and how many have no holder
        now."""
        word, bit = self._holders[slot // WORD_BITS], np.uint64(1 << slot % WORD_BITS)
        rows = rows[(word[rows] & bit) != 0]
        word[rows] &= ~bit
        return len(rows), int(np.count_nonzero(self._unheld(rows)))

    def _unheld(self, rows: Rows) -> npt.NDArray[np.bool_]:
        held: npt.NDArray[np.bool_] = np.any(self._holders[:, rows], axis=0)
        return ~held

    def rows_of(self, slot: int) -> Iterator[Rows]:
        """All places of a peer, in pieces."""
        word, bit = self._holders[slot // WORD_BITS], np.uint64(1 << slot % WORD_BITS)
        for start in range(0, len(word), _PIECE):
            rows = np.flatnonzero(word[start : start + _PIECE] & bit) + start
            if rows.size:
                yield rows

    def held(self) -> Iterator[tuple[Fingerprints, npt.NDArray[Any]]]:
        """All pages with a holder, in pieces, with the bits of their holders."""
        flat = self._pages.reshape(-1)
        for start in range(0, len(flat), _PIECE):
            bits = self._holders[:, start : start + _PIECE]
            rows = np.flatnonzero(bits.any(axis=0))
            yield flat[start + rows], bits[:, rows]

    def copied(self, num_pages: int, num_words: int) -> PageTable:
        """A copy without pages that have no holder, with room for ``num_pages``."""
        table = PageTable(num_pages, num_words)
        for pages, bits in self.held():
            table._holders[: self.num_words, table.add(pages)] = bits  # noqa: SLF001
        return table

    def check_integrity(self, num_held: int) -> None:
        flat = self._pages.reshape(-1)
        used = np.flatnonzero(flat)
        assert len(used) == self.num_used, f"{len(used)} places taken, counted {self.num_used}"
        assert (self.find(flat[used]) == used).all(), "a page is not found at its place"
        gaps = (self._pages[:, :-1] == 0) & (self._pages[:, 1:] != 0)
        assert not gaps.any(), f"{int(gaps.sum())} buckets have a gap"
        bits: npt.NDArray[np.bool_] = np.any(self._holders[:, :-1], axis=0)
        assert not self._holders[:, -1].any(), "row -1 has a holder"
        assert int(bits.sum()) == num_held, f"{int(bits.sum())} pages held, counted {num_held}"
        assert not bits[flat == 0].any(), "an empty place has a holder"


def choose_slots(
    bits: npt.NDArray[np.uint64], pages: Fingerprints, salt: int
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

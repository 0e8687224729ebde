"""What is remembered of a listing, in bounded memory and whatever its order."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import xxhash

__all__ = ["Entry", "IdFilter", "Oldest"]

_NUM_PROBES = 5


class IdFilter:
    """A Bloom filter: "no" is certain, "yes" is wrong for one in 10,000 at 20 bits per id.

    Each filter draws its own seed, so that what one takes for held by mistake, the next does not.
    """

    def __init__(self, nbytes: int = 4 << 20) -> None:
        """Size the filter for 1.6 million ids by default: 50 TiB in objects of 32 MiB."""
        self._bits = bytearray(nbytes)
        self._num_bits = nbytes * 8
        self._seed = secrets.randbits(63)

    def add(self, name: str) -> None:
        for position in self._positions(name):
            self._bits[position >> 3] |= 1 << (position & 7)

    def __contains__(self, name: str) -> bool:
        return all(self._bits[at >> 3] >> (at & 7) & 1 for at in self._positions(name))

    def _positions(self, name: str) -> list[int]:
        digest = xxhash.xxh3_128_intdigest(name.encode(), self._seed)
        first, step = digest & (1 << 64) - 1, digest >> 64 | 1
        return [(first + i * step) % self._num_bits for i in range(_NUM_PROBES)]


class Entry(NamedTuple):
    """One entry of a listing; sorts by age."""

    modified: float  # seconds since 1970, as the store says
    name: str
    nbytes: int


class Oldest:
    """The ``limit`` oldest of all that was added; memory of twice as many."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[Entry] = []

    def add(self, entry: Entry) -> None:
        self._kept.append(entry)
        if len(self._kept) >= 2 * self._limit:
            self._kept = self.take()

    def take(self) -> list[Entry]:
        return sorted(self._kept)[: self._limit]

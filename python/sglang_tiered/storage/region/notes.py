"""Notes: small files that the owner of a store keeps beside its regions.

Outside the byte cap, never read by the store itself, as private as the pages are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.storage.filesystem import read_small_file
from sglang_tiered.storage.region.walk import persist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt


MAX_PAGE_SIZES = 64
"""Of the last namespaces. Another update of the weights makes another namespace."""


class PageSize(NamedTuple):
    """What the pages of a namespace hold that have tokens in them: those of a model's KV pool.
    ``num_pools``: so many pools have pages of that many bytes, each for the same tokens.
    ``others`` are the bytes of pages of other pools; None where that was not noted."""

    num_tokens: int
    nbytes: int
    num_pools: int = 1
    others: tuple[int, ...] | None = None

    def in_memory(self, lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return how long pages are in memory that are stored in these lengths; -1 where that is
        not told, as one that is encoded may be of any pool."""
        stored = np.asarray(lengths, np.int64)
        is_whole = np.isin(stored, (self.nbytes, *(self.others or ())))
        is_told = (stored < self.nbytes) & (self.others == ())
        return np.where(is_whole, stored, np.where(is_told, self.nbytes, -1))


def read_note(read: Callable[[], bytes]) -> bytes:
    """Return what was written last; empty where the note is missing or cannot be read."""
    try:
        return persist(read)
    except OSError:
        return b""


def note_of(shard: Path, name: str) -> bytes:
    """Read a note of a shard that need not be open."""
    return read_note(lambda: read_small_file(shard / name))


def read_page_sizes(data: bytes) -> dict[bytes, PageSize]:
    """Return what the note ``PAGE_SIZES_NAME`` says, by namespace; empty where it is damaged."""
    return unseal(data, dict[bytes, PageSize]) or {}


def with_page_size(data: bytes, namespace: bytes, size: PageSize) -> bytes:
    """Return the note ``PAGE_SIZES_NAME``, saying that too."""
    known = read_page_sizes(data)
    if known.get(namespace) == size:
        return data
    known.pop(namespace, None)
    known[namespace] = size
    return seal(dict(list(known.items())[-MAX_PAGE_SIZES:]))

"""``Notes``: small files that the owner of a store keeps beside its regions.

Outside the byte cap, never read by the store itself, as private as the pages are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.storage.filesystem import read_small_file
from sglang_tiered.storage.region.format import NOTE_NAMES, PAGE_SIZES_NAME
from sglang_tiered.storage.region.walk import persist

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from sglang_tiered.storage.region.device import FileDevice


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


def read_note(shard: Path, name: str) -> bytes:
    """Read a note as ``Notes.read`` does, of a shard that need not be open."""
    try:
        return persist(lambda: read_small_file(shard / name))
    except OSError:
        return b""


class Notes:
    """Small files of one shard. Any thread; all calls wait for the disk."""

    def __init__(self, device: FileDevice) -> None:
        self._device = device

    def read(self, name: str) -> bytes:
        """Return what was written last; empty where the note is missing or cannot be read."""
        try:
            return persist(lambda: self._device.read_file(name))
        except OSError:
            return b""

    def write(self, name: str, data: bytes) -> None:
        """Replace a note whole, flushed. Raises ``OSError``, and ``ValueError`` for a name that is
        not in the list of a shard's files, by which files are recognized."""
        if name not in NOTE_NAMES:
            raise ValueError(f"{name!r} is not in NOTE_NAMES")
        self._device.replace_file(name, data)


def read_page_sizes(data: bytes) -> dict[bytes, PageSize]:
    """Return what the note ``PAGE_SIZES_NAME`` says, by namespace; empty where it is damaged."""
    return unseal(data, dict[bytes, PageSize]) or {}


def add_page_size(notes: Notes, namespace: bytes, size: PageSize) -> None:
    """Note the size of a namespace's pages, for who looks into the shard. Raises ``OSError``."""
    before = read_page_sizes(notes.read(PAGE_SIZES_NAME))
    if before.get(namespace) == size:
        return
    known = {name: one for name, one in before.items() if name != namespace}
    known[namespace] = size
    kept = list(known.items())[-MAX_PAGE_SIZES:]
    notes.write(PAGE_SIZES_NAME, seal(dict(kept)))

"""Which pages were forgotten one by one: by key, as far as the log reached then. Pure.

A part of ``PURGES``. A page is dead where it lies before the bound of its key, whatever its
namespace; what is stored later lies behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.storage.region.format import BLOCK_BYTES
from sglang_tiered.storage.region.purging.bound import NOWHERE, Bound

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from sglang_tiered.storage.region.format import Contents

__all__ = ["FORGOTTEN_BYTES", "MAX_FORGOTTEN", "Forgotten"]

MAX_FORGOTTEN = 1 << 18
"""Beyond it the older half is replaced by a purge of everything as far back as those reach: a file
that grows with every call would make each the slower."""

_DTYPE: np.dtype[Any] = np.dtype([("key", "S32"), ("sequence", "<u8"), ("offset", "<u8")])
FORGOTTEN_BYTES = _DTYPE.itemsize


class Forgotten:
    """Keys with their bounds, sorted by key; every key once."""

    def __init__(self, rows: npt.NDArray[Any] | None = None) -> None:
        self._rows = np.zeros(0, _DTYPE) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Forgotten) and bool(np.array_equal(self._rows, other._rows))

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> Forgotten:
        return Forgotten(self._rows.copy())

    def add(self, keys: Sequence[bytes], bound: Bound) -> None:
        """Declare dead what is stored under these keys before the bound, which is not before that
        of any key already there."""
        new = np.zeros(len(keys), _DTYPE)
        new["key"] = np.frombuffer(b"".join(keys), "S32")
        new["sequence"], new["offset"] = bound
        kept = self._rows[~np.isin(self._rows["key"], new["key"])]
        rows = np.concatenate([kept, new[np.unique(new["key"], return_index=True)[1]]])
        self._rows = rows[np.argsort(rows["key"], kind="stable")]

    def fold(self) -> Bound:
        """Drop the older half when there are too many; returns the bound they are all before."""
        if len(self._rows) <= MAX_FORGOTTEN:
            return NOWHERE
        order = np.lexsort((self._rows["offset"], self._rows["sequence"]))
        oldest = order[: MAX_FORGOTTEN // 2]
        last = self._rows[oldest[-1]]
        self._rows = np.delete(self._rows, oldest)
        return Bound(int(last["sequence"]), int(last["offset"]))

    def next_sequence(self) -> int:
        return int(self._rows["sequence"].max()) + 1 if len(self._rows) else 0

    def forget_before(self, sequence: int) -> bool:
        """Drop what speaks only of regions older than ``sequence``; true when there was any."""
        bounds = self._rows["sequence"], self._rows["offset"]
        old = (bounds[0] < sequence) | ((bounds[0] == sequence) & (bounds[1] <= BLOCK_BYTES))
        if not old.any():
            return False
        self._rows = self._rows[~old]
        return True

    def dead_pages(self, sequence: int, contents: Contents) -> npt.NDArray[np.bool_]:
        """Return which pages of a region are dead."""
        dead = np.zeros(len(contents.pages), np.bool_)
        if not len(self._rows) or not len(dead):
            return dead
        keys = np.ascontiguousarray(contents.pages["key"]).view("S32").reshape(-1)
        at = np.minimum(np.searchsorted(self._rows["key"], keys), len(self._rows) - 1)
        named = np.flatnonzero(self._rows["key"][at] == keys)
        bounds = self._rows[at[named]]
        offsets = np.repeat(contents.extents["offset"], contents.extents["num_pages"])[named]
        dead[named] = (sequence < bounds["sequence"]) | (
            (sequence == bounds["sequence"]) & (offsets < bounds["offset"])
        )
        return dead

    def pack(self) -> bytes:
        return self._rows.tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Forgotten | None:
        """Unpack what ``pack`` gave; ``None`` for rows that no store wrote."""
        rows = np.frombuffer(data, _DTYPE).copy()
        sane = (rows["offset"] % BLOCK_BYTES == 0) & (rows["sequence"] < np.uint64(1 << 63))
        sorted_once = (rows["key"][:-1] < rows["key"][1:]).all()
        return cls(rows) if sane.all() and sorted_once else None

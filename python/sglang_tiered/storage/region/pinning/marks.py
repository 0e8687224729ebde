"""Which rows of the index are pinned, and what they take, by region slot. Empty while none is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["PinMarks"]


class PinMarks:
    """One flag per row, allocated with the first pin, and the padded bytes of the rows that have
    it."""

    def __init__(self) -> None:
        self._flags = np.zeros(0, np.bool_)
        self._by_slot: dict[int, int] = {}
        self.num_rows = 0
        self.num_bytes = 0

    def of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of these rows are pinned."""
        flags = np.zeros(len(rows), np.bool_)
        known = rows < len(self._flags)
        flags[known] = self._flags[rows[known]]
        return flags

    def bytes_in(self, slot: int) -> int:
        return self._by_slot.get(slot, 0)

    def set(
        self,
        rows: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int32],
        sizes: npt.NDArray[np.int64],
        *,
        pinned: bool,
    ) -> None:
        """Pin rows that are not, or unpin rows that are, each once."""
        if not rows.size:
            return
        needed = int(rows.max()) + 1
        if needed > len(self._flags):
            self._flags.resize(max(needed, 2 * len(self._flags)), refcheck=False)
        self._flags[rows] = pinned
        sign = 1 if pinned else -1
        self.num_rows += sign * len(rows)
        self.num_bytes += sign * int(sizes.sum())
        for slot in np.unique(slots).tolist():
            left = self._by_slot.get(slot, 0) + sign * int(sizes[slots == slot].sum())
            self._by_slot[slot] = left
            if not left:
                del self._by_slot[slot]

    def check_integrity(
        self,
        rows: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int32],
        sizes: npt.NDArray[np.int64],
    ) -> None:
        """Recount; given are all rows in use."""
        pinned = self.of(rows)
        assert int(pinned.sum()) == self.num_rows == int(self._flags.sum()), (
            f"{pinned.sum()} rows in use are pinned, counted {self.num_rows}"
        )
        total = int(sizes[pinned].sum())
        assert total == self.num_bytes, f"pinned rows take {total}, counted {self.num_bytes}"
        by_slot = {
            slot: int(sizes[pinned & (slots == slot)].sum())
            for slot in np.unique(slots[pinned]).tolist()
        }
        assert by_slot == self._by_slot, f"pinned by slot {by_slot}, counted {self._by_slot}"

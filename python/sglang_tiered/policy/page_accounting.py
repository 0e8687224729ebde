"""What is known of every host page: whether NVMe holds it, and if not, why not.

Every page of a radix node's host copy is in one state, and when the tree gives it up the state
says in which counter it ends: clean, or lost for one reason. A page that is lost is not wrong and
not an error; it is a prefill to come, and the counters say which limit caused it.

One byte a page. States of pages in the tree are set by the scheduler thread (written, loaded,
freed) and by the storage thread (stored, or not). Both work on different pages at any time, since
SGLang keeps the pages of a store allocated until the scheduler has taken its result; each counter
is written by one thread only. Nothing blocks.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Fate", "PageFates"]


class Fate(enum.Enum):
    """What became of a page that left host memory, or of KV that never got a host page."""

    CLEAN = "clean"  # NVMe holds it
    LOST_WAITING = "lost_waiting"  # evicted before its store began: the disk is too slow for now
    LOST_FIRST_TOUCH = "lost_first_touch"  # admission: nothing spoke for it under pressure
    LOST_BUDGET = "lost_budget"  # admission: the write budget was used up
    LOST_BACKLOG = "lost_backlog"  # admission: stores waited too long
    LOST_FAILED = "lost_failed"  # the disk was full or failed
    LOST_WEIGHTS = "lost_weights"  # weights were replaced under it
    LOST_UNOFFERED = "lost_unoffered"  # never offered, such as before a tier was attached
    LOST_FLUSHED = "lost_flushed"  # the cache was flushed before its store began
    LOST_HOST_SHORT = "lost_host_short"  # evicted from the device while host memory was short

    @property
    def code(self) -> int:
        return _CODES[self]


_FATES = tuple(Fate)
_CODES = {fate: code for code, fate in enumerate(_FATES)}
_FREE = 255


class PageFates:
    """The pages of one host pool. Page numbers are those of the pool."""

    def __init__(self, num_pages: int) -> None:
        self._states: NDArray[np.uint8] = np.full(num_pages, _FREE, dtype=np.uint8)
        self._left = np.zeros(len(_FATES), dtype=np.int64)
        self._num_dirtied = 0  # scheduler thread: written, less dirty ones that left
        self._num_cleaned = 0  # storage thread

    @property
    def num_dirty(self) -> int:
        """Pages in host memory that NVMe does not hold."""
        return self._num_dirtied - self._num_cleaned

    @property
    def left(self) -> dict[Fate, int]:
        """Pages that left so far, by fate."""
        return {fate: int(count) for fate, count in zip(_FATES, self._left, strict=True)}

    # ---- Scheduler thread ----

    def written(self, pages: NDArray[np.int64]) -> None:
        """Device memory was copied to these pages; their store has not begun."""
        self._states[pages] = Fate.LOST_WAITING.code
        self._num_dirtied += len(pages)

    def loaded(self, pages: NDArray[np.int64]) -> None:
        """These pages came from NVMe."""
        self._states[pages] = Fate.CLEAN.code

    def freed(self, pages: NDArray[np.int64]) -> None:
        """The tree gave these pages up."""
        states = self._states[pages]
        counts = np.bincount(states, minlength=_FREE + 1)
        self._left += counts[: len(_FATES)]
        self._left[Fate.LOST_UNOFFERED.code] += counts[_FREE]
        self._num_dirtied -= len(pages) - int(counts[Fate.CLEAN.code]) - int(counts[_FREE])
        self._states[pages] = _FREE

    def never_written(self, num_pages: int) -> None:
        """Device memory gave up KV that has no host copy."""
        self._left[Fate.LOST_HOST_SHORT.code] += num_pages

    def flushed(self) -> None:
        """The tree was emptied; no store is under way."""
        num_held = int(np.count_nonzero(self._states != _FREE))
        num_clean = int(np.count_nonzero(self._states == Fate.CLEAN.code))
        self._left[Fate.CLEAN.code] += num_clean
        self._left[Fate.LOST_FLUSHED.code] += num_held - num_clean
        self._states[:] = _FREE
        self._num_dirtied = self._num_cleaned

    # ---- Storage thread ----

    def stored(self, pages: NDArray[np.int64], fates: Sequence[Fate]) -> None:
        """What a store made of its pages. CLEAN only if NVMe holds the page now."""
        codes = np.array([fate.code for fate in fates], dtype=np.uint8)
        clean = Fate.CLEAN.code
        before = self._states[pages]
        # A page no one reported as written (a tier attached late) was never counted as dirty.
        self._num_cleaned += int(
            np.count_nonzero((codes == clean) & (before != clean) & (before != _FREE))
        )
        self._num_cleaned -= int(np.count_nonzero((codes != clean) & (before == clean)))
        self._states[pages] = np.where((before == _FREE) & (codes != clean), _FREE, codes)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books do not balance; with no store under way."""
        held = self._states[self._states != _FREE]
        assert self.num_dirty == int(np.count_nonzero(held != Fate.CLEAN.code))

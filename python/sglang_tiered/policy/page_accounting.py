"""``PageAccounting``: for every host page, whether NVMe holds it, and if not, why not.

Every page of a radix node's host copy is in one state. When the tree evicts the page, the state
says in which counter it ends: clean, or lost for one reason. A page that is lost is not wrong and
not an error; it is a prefill to come, and the counters say which limit caused it.

One byte a page. States of pages in the tree are set by the scheduler thread (written, loaded,
freed) and by the storage thread (stored, or not). Both work on different pages at any time, since
SGLang keeps the pages of a store allocated until the scheduler has taken its result. Pages that
left are counted by the scheduler thread alone. Nothing blocks.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.policy.admission import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray


class EvictionOutcome(enum.Enum):
    """Says what became of a page that left host memory, or of KV that never got a host page."""

    CLEAN = "clean"  # NVMe holds it
    LOST_WAITING = "lost_waiting"  # evicted before its store began: the disk is too slow for now
    LOST_FIRST_TOUCH = "lost_first_touch"  # admission: seen only once, under pressure
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


_OUTCOMES = tuple(EvictionOutcome)
_CODES = {outcome: code for code, outcome in enumerate(_OUTCOMES)}
_FREE = 255


_DROPPED_AS = {
    Outcome.DROPPED_FIRST_TOUCH: EvictionOutcome.LOST_FIRST_TOUCH,
    Outcome.DROPPED_BUDGET: EvictionOutcome.LOST_BUDGET,
    Outcome.DROPPED_BACKLOG: EvictionOutcome.LOST_BACKLOG,
}


def store_outcomes(
    ok: Sequence[bool], num_admitted: int, why: Outcome | None
) -> list[EvictionOutcome]:
    """Return what a store made of its pages, of which admission let the leading ones in. ``why`` is
    None where stores were refused, since the pages are of weights that were replaced."""
    clean, failed = EvictionOutcome.CLEAN, EvictionOutcome.LOST_FAILED
    outcomes = [clean if is_ok else failed for is_ok in ok[:num_admitted]]
    dropped = EvictionOutcome.LOST_WEIGHTS if why is None else _DROPPED_AS.get(why, failed)
    return [*outcomes, *[dropped] * (len(ok) - num_admitted)]


class PageAccounting:
    """Keeps the states of the pages of one host pool of ``num_tokens`` slots. ``host_indices`` are
    slots of whole pages."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self._page_size = page_size
        self._states: NDArray[np.uint8] = np.full(num_tokens // page_size, _FREE, dtype=np.uint8)
        self._left = np.zeros(len(_OUTCOMES), dtype=np.int64)

    @property
    def num_dirty(self) -> int:
        """Count the pages in host memory that NVMe does not hold."""
        clean = EvictionOutcome.CLEAN.code
        return int(np.count_nonzero((self._states != _FREE) & (self._states != clean)))

    @property
    def left(self) -> dict[EvictionOutcome, int]:
        """Return the pages that left so far, by outcome."""
        counts = zip(_OUTCOMES, self._left, strict=True)
        return {outcome: int(count) for outcome, count in counts}

    def _pages(self, host_indices: ArrayLike) -> NDArray[np.int64]:
        pages: NDArray[np.int64] = np.asarray(host_indices)[:: self._page_size] // self._page_size
        return pages

    # ---- Scheduler thread ----

    def note_written(self, host_indices: ArrayLike) -> None:
        """Note that device memory is copied to these slots; their store has not begun."""
        self._states[self._pages(host_indices)] = EvictionOutcome.LOST_WAITING.code

    def note_loaded(self, host_indices: ArrayLike) -> None:
        """Note that these slots were filled from NVMe and belong to the tree now."""
        self._states[self._pages(host_indices)] = EvictionOutcome.CLEAN.code

    def note_freed(self, host_indices: ArrayLike) -> None:
        """Note that the tree evicted what was in these slots."""
        pages = self._pages(host_indices)
        counts = np.bincount(self._states[pages], minlength=_FREE + 1)
        self._left += counts[: len(_OUTCOMES)]
        self._left[EvictionOutcome.LOST_UNOFFERED.code] += counts[_FREE]
        self._states[pages] = _FREE

    def note_never_written(self, num_tokens: int) -> None:
        """Count KV without a host copy that device memory evicted."""
        self._left[EvictionOutcome.LOST_HOST_SHORT.code] += num_tokens // self._page_size

    def note_flushed(self) -> None:
        """Count all pages as gone: the tree was emptied. No store may be under way."""
        num_clean = int(np.count_nonzero(self._states == EvictionOutcome.CLEAN.code))
        self._left[EvictionOutcome.CLEAN.code] += num_clean
        self._left[EvictionOutcome.LOST_FLUSHED.code] += self.num_dirty
        self._states[:] = _FREE

    # ---- Storage thread ----

    def note_stored(self, host_indices: ArrayLike, outcomes: Sequence[EvictionOutcome]) -> None:
        """Note what a store made of its pages. CLEAN only if NVMe holds the page now."""
        pages = self._pages(host_indices)
        codes = np.array([outcome.code for outcome in outcomes], dtype=np.uint8)
        # A page that was not reported as written (a tier attached late) does not count as dirty.
        is_unknown = (self._states[pages] == _FREE) & (codes != EvictionOutcome.CLEAN.code)
        self._states[pages] = np.where(is_unknown, _FREE, codes)

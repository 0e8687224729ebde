"""Admission to the NVMe tier: every page while the disk is idle, fewer and fewer under pressure.

Pressure is one number, the larger of two: the used share of the write budget, and how long stores
have been waiting. 0 is an idle disk, and 1 must not be exceeded. Three levels follow
from it, with hysteresis: OPEN takes everything, SELECTIVE takes second touches and the first
touches of long prefixes, CLOSED takes nothing. The length that counts as long doubles as pressure
rises within SELECTIVE, so that the admitted writes fall until they fit.

Second touch: a prefix that was computed once more after it had left every tier is known to be in
use; most prefixes are not. CacheLib's flash admission calls this "reject first" (it also knows a
daily write budget), Mooncake gates promotions on a count of two in a count-min sketch. Length: a
lost page costs the prefill of its tokens, which grows with what is before them, while a page costs
the same bytes at every depth.

``PageAccounting`` keeps for every host page whether NVMe holds it, and if not, why not. When the
tree evicts the page, its state says in which counter it ends: clean, or lost for one reason. A lost
page is no error; it is a prefill to come, and the counters say which limit caused it.

Pure decisions: no I/O, no threads of its own, clocks passed in. ``Admission`` and its parts are
used by one thread; its properties, ``level`` and ``is_long`` may be read by others.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from sglang_tiered.budgets import DailyBudget


MAX_WRITTEN_PER_PAYLOAD = 1.15
"""Device bytes expected per payload byte: the bound that write amplification is held to."""

TOUCH_SLOTS = 1 << 20
"""Slots of the table, 8 MiB. A page is still remembered with even odds after 700,000 others."""

LONG_PREFIX_TOKENS = 4096
"""The first touch of a prefix of this many tokens is admitted as SELECTIVE begins, when few writes
must be saved: on the Mooncake traces shorter ones are 4% of what is written, the cheapest to
compute again, and less than a point of the hit rate."""

LONG_PREFIX_DOUBLINGS = 6
"""Up to 262,144 tokens just below CLOSED, which leaves second touches. On the Mooncake traces, with
budgets of a quarter to three quarters of all writes, a threshold that grows served more hits than
one that stays in 9 of 12 settings, by up to 6 points, and at most 1 less in the others."""

SELECTIVE_ABOVE, OPEN_BELOW = 0.5, 0.25
CLOSED_ABOVE, SELECTIVE_BELOW = 1.0, 0.875

MAX_WAIT_S = 4.0
"""The wait of a store that makes pressure 1. SELECTIVE thus begins at 2 s: a disk that keeps up has
made it durable by then."""

MAX_PINNED_WAIT_S = 2.0
"""The longest time for which a burst of waiting stores may fill the host tier, since they keep
their host pages from eviction."""


class Level(enum.Enum):
    """How much is admitted at the current pressure."""

    OPEN = "open"
    SELECTIVE = "selective"
    CLOSED = "closed"


class Outcome(enum.Enum):
    """The outcome of an offered page."""

    ADMITTED = "admitted"
    DROPPED_FIRST_TOUCH = "dropped_first_touch"  # SELECTIVE; neither seen before nor long
    DROPPED_BUDGET = "dropped_budget"
    DROPPED_BACKLOG = "dropped_backlog"


def backlog_pressure(waited_s: float, pinned_share: float) -> float:
    """Return the pressure of a queue whose head waited so long and that pins this share of the host
    tier."""
    return max(waited_s / MAX_WAIT_S, min(pinned_share, waited_s / MAX_PINNED_WAIT_S))


class TouchMemory:
    """The pages that were offered before: a table of 64-bit fingerprints, one slot per page.

    A page overwrites the content of its slot, which is how the table ages and stays bounded. False
    positives have probability 2**-63. A page is lost with probability
    1 - exp(-offered / slots) after ``offered`` others: a lost second touch is a first one.
    """

    def __init__(self, num_slots: int = TOUCH_SLOTS) -> None:
        self._table = np.zeros(num_slots, dtype="<u8")

    def num_seen(self, keys: Sequence[bytes]) -> int:
        """Count the leading pages of a chain that were offered before, and mark all as offered.

        A key names its whole chain, so a seen page vouches for every page before it, and slots
        overwritten in between do no harm.
        """
        if not keys:
            return 0
        # Runs on the scheduler thread for every node: strides and methods cost half as much as
        # two-dimensional slices and module functions.
        words = np.frombuffer(b"".join(keys), dtype="<u8")
        stride = len(words) // len(keys)
        slots = words[::stride] % np.uint64(len(self._table))
        fingerprints = words[1::stride] | np.uint64(1)  # 0 is an empty slot
        seen = (self._table[slots] == fingerprints).nonzero()[0]
        self._table[slots] = fingerprints
        return int(seen[-1]) + 1 if seen.size else 0


class Admission:
    """Decides about whole operations: a chain is useful only up to its first missing page."""

    def __init__(
        self, *, budget: DailyBudget | None = None, memory: TouchMemory | None = None
    ) -> None:
        self._budget = budget
        self._memory = TouchMemory() if memory is None else memory
        self._backlog = 0.0
        self._pressure = 0.0
        self._outcomes = dict.fromkeys(Outcome, 0)
        self.level = Level.OPEN
        self.dropped_as = Outcome.DROPPED_FIRST_TOUCH

    @property
    def would_open(self) -> bool:
        """True if the level would be OPEN without waiting stores."""
        return self._budget is None or self._budget.pressure < OPEN_BELOW

    @property
    def outcomes(self) -> dict[Outcome, int]:
        """Pages decided on so far, by outcome."""
        return dict(self._outcomes)

    @property
    def budget_bytes(self) -> float | None:
        """Bytes that may be written now; None without a budget."""
        return None if self._budget is None else self._budget.available

    def spend(self, num_bytes: int) -> None:
        """Charge the bytes written to the device since the last call."""
        if self._budget is not None and num_bytes > 0:
            self._budget.spend(num_bytes)

    def is_long(self, prefix_tokens: int) -> bool:
        """Return whether the first touch of such a prefix is admitted while SELECTIVE."""
        above = (self._pressure - SELECTIVE_ABOVE) / (CLOSED_ABOVE - SELECTIVE_ABOVE)
        doublings = min(LONG_PREFIX_DOUBLINGS, max(0, int(above * (LONG_PREFIX_DOUBLINGS + 1))))
        return prefix_tokens >= LONG_PREFIX_TOKENS << doublings

    def decide(
        self,
        keys: Sequence[bytes],
        *,
        prefix_tokens: int,
        page_bytes: int,
        num_held: Callable[[], int],
        backlog: float | None = None,
        num_unwritten: int = 0,
    ) -> int:
        """Return how many leading pages of an operation to store.

        ``prefix_tokens`` is the length of the pages' chain. ``num_held`` returns how many leading
        pages are stored already and cost nothing. ``backlog`` is None where it is not known: then
        the last one stands. ``num_unwritten``: payload bytes of operations that were admitted
        before and are not charged yet.
        """
        if backlog is not None:
            self._backlog = backlog
        self._update_level()
        wanted, dropped = self._num_wanted(keys, prefix_tokens)
        free = num_held() if wanted < len(keys) or self._budget is not None else 0
        admitted = max(wanted, free)
        if self._budget is not None:
            cost = max(1.0, page_bytes * MAX_WRITTEN_PER_PAYLOAD)
            left = self._budget.available - num_unwritten * MAX_WRITTEN_PER_PAYLOAD
            affordable = free + max(0, int(left / cost))
            if admitted > affordable:
                # Closed until some budget has gathered, or every operation would lose its tail.
                self.level = Level.CLOSED
                admitted, dropped = affordable, Outcome.DROPPED_BUDGET
        self._outcomes[Outcome.ADMITTED] += admitted
        self._outcomes[dropped] += len(keys) - admitted
        self.dropped_as = dropped
        return admitted

    def _num_wanted(self, keys: Sequence[bytes], prefix_tokens: int) -> tuple[int, Outcome]:
        """Return how many leading pages the level admits, and the outcome of the rest."""
        num_seen = self._memory.num_seen(keys)
        if self.level is Level.CLOSED:
            is_backlog = self._budget is None or self._backlog >= self._budget.pressure
            return 0, Outcome.DROPPED_BACKLOG if is_backlog else Outcome.DROPPED_BUDGET
        if self.level is Level.OPEN or self.is_long(prefix_tokens):
            num_seen = len(keys)
        return num_seen, Outcome.DROPPED_FIRST_TOUCH

    def _update_level(self) -> None:
        budget = 0.0 if self._budget is None else self._budget.pressure
        self._pressure = pressure = max(budget, self._backlog)
        if pressure >= CLOSED_ABOVE:
            self.level = Level.CLOSED
        elif self.level is Level.CLOSED and pressure >= SELECTIVE_BELOW:
            return
        elif pressure >= SELECTIVE_ABOVE:
            self.level = Level.SELECTIVE
        elif self.level is not Level.OPEN:
            self.level = Level.SELECTIVE if pressure >= OPEN_BELOW else Level.OPEN


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
    """Keeps the states of the pages of one host pool of ``num_tokens`` slots, one byte each.
    ``host_indices`` are slots of whole pages.

    States of pages in the tree are set by the scheduler thread (written, loaded, freed) and by the
    storage thread (stored, or not). Both work on different pages at any time, since SGLang keeps
    the pages of a store allocated until the scheduler has taken its result. Pages that left are
    counted by the scheduler thread alone. Nothing blocks."""

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

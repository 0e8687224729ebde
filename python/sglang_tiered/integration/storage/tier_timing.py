"""``TierTiming``: what the reads of a tier take, in the order in which they overlap."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.metrics import Durations

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.policy.cost_model import TransferCost


MAX_WINDOWS = 1024

WINDOW_READS, WINDOW_S, MAX_WINDOW_READS = 8, 0.05, 64
"""Reads that overlap share a tier's speed in a way that is not known, so they are learnt from
together: at least so many or for so long, with all that were under way when the first of them
ended, or fewer when the tier has nothing more to read."""


@dataclass(slots=True, eq=False)
class InFlightRead:
    """Describes a read under way."""

    timing: TierTiming
    num_bytes: int
    begun_at: float


class _Window(NamedTuple):
    """Describes reads that ended, and the seconds in which the tier was at them."""

    num_read: int = 0
    bytes_read: int = 0
    num_failed: int = 0
    bytes_failed: int = 0
    seconds: float = 0.0
    num_starts: int = 0  # 1 if the tier was idle before
    is_tail: bool = False  # what it read was mostly read in the window before


class TierTiming:
    """Times the reads of one tier. ``begin`` and ``end`` run on any thread, the rest on the
    scheduler thread, which learns from what they noted.

    ``reads_parts``: loads are read in parts of about equal length, of which the next ones are under
    way before one has ended. Then the fixed time is paid once each time that the idle tier begins
    to read, and that is what counts as a load here, however many reads follow.
    """

    def __init__(
        self,
        cost: TransferCost,
        clock: Callable[[], float],
        *,
        stale_after_s: float,
        reads_parts: bool = True,
    ) -> None:
        self.cost = cost
        self._reads_parts = reads_parts
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._lock = threading.Lock()
        self._in_flight: dict[InFlightRead, None] = {}
        self._since = 0.0  # when the tier began with what is in flight, or ended the last read
        self._window = _Window()
        self._left: set[InFlightRead] = set()  # under way when the first of the window ended
        self._goes_on = False  # a window ended, and the tier has not been idle since
        self._windows: deque[_Window] = deque(maxlen=MAX_WINDOWS)
        self._reported_s = 0.0
        self._measured_at = clock()
        self.busy_s = 0.0
        self.durations = Durations()  # of complete reads, each from its own begin

    def begin(self, num_bytes: int) -> InFlightRead:
        """Note that a load (or a probe) begins to read."""
        with self._lock:
            read = InFlightRead(self, num_bytes, self._clock())
            if not self._in_flight:
                self._since, self._reported_s = read.begun_at, 0.0
            self._in_flight[read] = None
        return read

    def end(self, read: InFlightRead, *, is_complete: bool) -> None:
        """Note the end of a read: all bytes arrived, or it failed. A quick failure says nothing of
        speed; one that took long does."""
        with self._lock:
            if read not in self._in_flight:
                return  # of a storage that was detached
            del self._in_flight[read]
            self._left.discard(read)
            now, window = self._clock(), self._window
            if is_complete:
                self.durations.record(now - read.begun_at)
            seconds = now - self._since
            took_s = now - max(self._since, read.begun_at)
            if is_complete or took_s >= self.cost.seconds(read.num_bytes):
                self._since = now
                self._reported_s = 0.0
                if window.num_read + window.num_failed == 0:
                    self._left = set(self._in_flight)
                self._window = window = _Window(
                    window.num_read + is_complete,
                    window.bytes_read + is_complete * read.num_bytes,
                    window.num_failed + (not is_complete),
                    window.bytes_failed + (not is_complete) * read.num_bytes,
                    window.seconds + seconds,
                    int(not self._goes_on),
                )
            num_ended = window.num_read + window.num_failed
            is_full = num_ended >= WINDOW_READS or window.seconds >= WINDOW_S
            is_full = (is_full and not self._left) or num_ended >= MAX_WINDOW_READS
            is_over = not self._in_flight
            if num_ended and (is_over or is_full):
                is_tail = self._goes_on and not is_full
                self._windows.append(window._replace(is_tail=is_tail))
                self._window = _Window()
            self._goes_on = not is_over and (self._goes_on or is_full)

    def drop_reads(self) -> None:
        """Drop reads under way of a storage that was detached: one may hang for ever."""
        with self._lock:
            self._in_flight.clear()
            self._left.clear()
            self._window = _Window()
            self._goes_on = False

    @property
    def bytes_per_s(self) -> float | None:
        """Return the speed of a load of typical size; None before the first load."""
        return self.cost.bytes_per_s if self.cost.num_observed else None

    def wants_probe(self) -> bool:
        """Whether the tier was not measured for long. Ask only when a load was declined."""
        if self._clock() - self._measured_at < self._stale_after_s:
            return False
        self._measured_at = self._clock()  # one at a time
        return True

    def learn(self) -> None:
        """Take in the reads that have ended, and those under way if they are late."""
        while self._windows:
            window = self._windows.popleft()
            self.busy_s += window.seconds
            num_bytes, num_loads = window.bytes_read, window.num_read
            if window.num_failed:
                with_failed = num_bytes + window.bytes_failed, num_loads + window.num_failed
                if window.seconds >= self.cost.seconds(
                    with_failed[0], self._num_starts(with_failed[1], window.num_starts)
                ):
                    num_bytes, num_loads = with_failed
            if num_bytes and not window.is_tail:
                num_starts = self._num_starts(num_loads, window.num_starts)
                self._observe(num_bytes, window.seconds, num_starts)
        if self._in_flight:
            self._learn_from_late()

    def _num_starts(self, num_loads: int, num_starts: int) -> int:
        """Return how many fixed times these reads took."""
        return num_starts if self._reads_parts else num_loads

    def _learn_from_late(self) -> None:
        """Learn from reads of which none ended in twice the time expected of all of them, and again
        each time that doubles. Otherwise one request after the other would wait for a disk that
        hangs."""
        with self._lock:
            num_bytes = sum(read.num_bytes for read in self._in_flight)
            # Even one that follows others takes a fixed time, if it is the last.
            num_starts = self._num_starts(len(self._in_flight), 1)
            elapsed_s = self._clock() - self._since
            expected_s = self.cost.seconds(num_bytes, num_starts)
            if not num_bytes or elapsed_s <= 2 * max(expected_s, self._reported_s):
                return
            self._reported_s = elapsed_s
        self._observe(num_bytes, elapsed_s, num_starts)

    def _observe(self, num_bytes: int, seconds: float, num_starts: int) -> None:
        self.cost.observe(num_bytes, seconds, num_starts)
        self._measured_at = self._clock()

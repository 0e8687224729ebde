"""``TierTiming``: how long reads of one tier take, noted on any thread and learnt on one."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.policy.cost_model import TransferCost

__all__ = ["InFlightRead", "TierTiming"]

MAX_FINISHED = 1024


@dataclass(slots=True, eq=False)
class InFlightRead:
    """Describes a read under way."""

    timing: TierTiming
    num_bytes: int
    begun_at: float
    reported_s: float = 0.0


class TierTiming:
    """Times the reads of one tier. ``begin`` and ``end`` run on any thread, the rest on the
    scheduler thread. Calls nothing while it holds its lock."""

    def __init__(
        self, cost: TransferCost, clock: Callable[[], float], *, stale_after_s: float
    ) -> None:
        self.cost = cost
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._lock = threading.Lock()
        self._in_flight: list[InFlightRead] = []
        self._finished: deque[tuple[int, float, bool]] = deque(maxlen=MAX_FINISHED)
        self._measured_at = clock()
        self.num_loads = 0
        self.load_s = 0.0

    def begin(self, num_bytes: int) -> InFlightRead:
        """Note that a load (or a probe) begins to read."""
        read = InFlightRead(self, num_bytes, self._clock())
        with self._lock:
            self._in_flight.append(read)
        return read

    def end(self, read: InFlightRead, *, is_complete: bool) -> None:
        """Note the end of a read: all bytes arrived, or it failed."""
        with self._lock:
            self._in_flight.remove(read)
        self._finished.append((read.num_bytes, self._clock() - read.begun_at, is_complete))

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
        while self._finished:
            num_bytes, seconds, is_complete = self._finished.popleft()
            if is_complete:
                self.num_loads += 1
                self.load_s += seconds
            elif seconds < self.cost.seconds(num_bytes):
                continue  # a quick failure says nothing of speed; one that took long does
            self.cost.observe(num_bytes, seconds)
            self._measured_at = self._clock()
        with self._lock:
            reads = list(self._in_flight)
        for read in reads:
            self._learn_from(read)

    def _learn_from(self, read: InFlightRead) -> None:
        """Learn from a read that takes twice as long as expected, and again each time that doubles:
        otherwise one request after the other would wait for a disk that hangs."""
        elapsed_s = self._clock() - read.begun_at
        expected_s = self.cost.seconds(read.num_bytes)
        if elapsed_s > 2 * max(expected_s, read.reported_s):
            read.reported_s = elapsed_s
            self.cost.observe(read.num_bytes, elapsed_s)
            self._measured_at = self._clock()

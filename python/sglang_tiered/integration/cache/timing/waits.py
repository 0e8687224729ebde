"""``AdmissionWaits``: how long requests wait to be admitted, and how much of it for their loads.

Scheduler thread only. Looks at the clock when a request arrives, when its load first keeps it, and
when it is admitted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.integration.observe.stats import WaitStats
from sglang_tiered.metrics.durations import Durations

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["AdmissionWaits"]

MAX_WAITING = 100_000
"""Beyond this number requests that arrive are not timed."""


@dataclass(slots=True)
class _Wait:
    arrived_at: float
    has_load: bool = False
    held_up_at: float | None = None  # when nothing but its load first kept it


class AdmissionWaits:
    """See the module docstring. Requests that are not known are ignored."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[Hashable, _Wait] = {}
        self._requests, self._loads = Durations(), Durations()

    def arrives(self, request: Hashable) -> None:
        """Note a request that arrived. One that waits already keeps its time."""
        if request not in self._waiting and len(self._waiting) < MAX_WAITING:
            self._waiting[request] = _Wait(self._clock())

    def has_load(self, request: Hashable) -> None:
        """Note that a load begins for a request."""
        wait = self._waiting.get(request)
        if wait is not None:
            wait.has_load = True

    def held_up(self, request: Hashable) -> None:
        """Note that a request's turn has come, and that it waits for its load."""
        wait = self._waiting.get(request)
        if wait is not None and wait.held_up_at is None:
            wait.held_up_at = self._clock()

    def held_s(self, request: Hashable) -> float:
        """Return how long nothing but its load has kept a request."""
        wait = self._waiting.get(request)
        held_up_at = None if wait is None else wait.held_up_at
        return 0.0 if held_up_at is None else self._clock() - held_up_at

    def admitted(self, request: Hashable) -> None:
        """Count the waits of a request."""
        wait = self._waiting.pop(request, None)
        if wait is None:
            return
        now = self._clock()
        self._requests.record(now - wait.arrived_at)
        if wait.has_load:
            self._loads.record(0.0 if wait.held_up_at is None else now - wait.held_up_at)

    def drop(self, request: Hashable) -> None:
        """Drop a request that was aborted."""
        self._waiting.pop(request, None)

    def stats(self) -> WaitStats:
        """Take a snapshot."""
        return WaitStats(self._requests.take(), self._loads.take())

"""``PrefillWork``: how busy a scheduler is with prefill, and what is left of the batch that runs.

Pure: expected seconds in, times passed in. Not thread-safe.
"""

from __future__ import annotations

from collections import deque

__all__ = ["WINDOW_S", "PrefillWork"]

WINDOW_S = 10
"""Seconds over which the busy share is taken."""


class PrefillWork:
    """Follows the prefill batches of one scheduler from launch to end. They run one after the
    other, though several may have been launched. Times are of one clock that never goes back."""

    def __init__(self) -> None:
        self._expected_s: deque[float] = deque()  # of the batches under way
        self._begun_at = 0.0  # the first of them: its launch, or the end of the one before
        self._counted_to = 0.0  # its busy time
        self._busy_s = [0.0] * WINDOW_S  # of each second, by its number modulo the window
        self._second = 0  # the last one of those

    @property
    def is_running(self) -> bool:
        """Whether a batch was launched and has not ended."""
        return bool(self._expected_s)

    def launched(self, expected_s: float, now: float) -> None:
        """Note a batch that begins now, or when those before it have ended."""
        if not self._expected_s:
            self._begun_at = self._counted_to = now
        self._expected_s.append(expected_s)

    def ended(self, now: float) -> None:
        """Note that the first of the batches under way has ended."""
        if self._expected_s:
            self._count_to(now)
            self._expected_s.popleft()
            self._begun_at = now

    def left_s(self, now: float) -> float:
        """Return the seconds until all batches under way are expected to have ended. Nothing is
        left of one that is late."""
        if not self._expected_s:
            return 0.0
        first_s = self._expected_s[0]
        later_s = sum(self._expected_s) - first_s
        return max(0.0, self._begun_at + first_s - now) + max(0.0, later_s)

    def busy_share(self, now: float) -> float:
        """Return the share of the last ``WINDOW_S`` seconds, less what is left of the present one,
        in which a prefill ran: from 0 to 1."""
        if self._expected_s:
            self._count_to(now)
        self._move_to(int(now))
        return min(1.0, sum(self._busy_s) / (WINDOW_S - 1 + max(now - int(now), 1e-9)))

    def _count_to(self, end: float) -> None:
        """Add the busy time until now, or what the window holds of it."""
        self._move_to(int(end))
        begin = max(self._counted_to, float(self._second - WINDOW_S + 1))
        while begin < end:
            second = int(begin)
            until = min(end, float(second + 1))
            self._busy_s[second % WINDOW_S] += until - begin
            begin = until
        self._counted_to = end

    def _move_to(self, second: int) -> None:
        """Drop the seconds that have left the window."""
        for passed in range(max(self._second, second - WINDOW_S) + 1, second + 1):
            self._busy_s[passed % WINDOW_S] = 0.0
        self._second = max(self._second, second)

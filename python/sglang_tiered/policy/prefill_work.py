"""``PrefillWork``: how busy a scheduler is with prefill, and what is left of the batch that runs.

Pure: expected and measured seconds in, times passed in. Not thread-safe.
"""

from __future__ import annotations

__all__ = ["WINDOW_S", "PrefillWork"]

WINDOW_S = 10
"""Seconds over which the busy share is taken."""


class PrefillWork:
    """Adds up prefill batches as they are launched and end. Batches of one scheduler run one after
    the other, though several may have been launched. Times are of one clock that never goes
    back."""

    def __init__(self) -> None:
        self._num_launched = 0  # and not ended
        self._ends_at = 0.0  # when the last of them is expected to end
        self._begun_at = 0.0  # the first of them, or the end of the one before
        self._busy_s = [0.0] * WINDOW_S  # of each second, by its number modulo the window
        self._second = 0  # the last one that was counted

    def launched(self, expected_s: float, now: float) -> None:
        """Note a batch that begins now, or when those before it have ended."""
        if not self._num_launched:
            self._begun_at = self._ends_at = now
        self._num_launched += 1
        self._ends_at = max(self._ends_at, now) + expected_s

    def ended(self, now: float) -> None:
        """Note that the first of the batches under way has ended."""
        if not self._num_launched:
            return
        self._num_launched -= 1
        self._count(self._begun_at, now)
        self._begun_at = now

    def left_s(self, now: float) -> float:
        """Return the seconds until all batches under way are expected to have ended; 0 if they are
        late."""
        return max(0.0, self._ends_at - now) if self._num_launched else 0.0

    def busy_share(self, now: float) -> float:
        """Return the share of the last ``WINDOW_S`` seconds in which a prefill ran, from 0 to 1."""
        if self._num_launched:
            self._count(self._begun_at, now)
            self._begun_at = max(self._begun_at, now)
        self._move_to(int(now))
        # The second that has left the window in part counts for the part that is in it.
        elapsed_s = WINDOW_S - 1 + now - int(now)
        return min(1.0, sum(self._busy_s) / elapsed_s)

    def _count(self, begin: float, end: float) -> None:
        """Add a busy time, in whole or what the window holds of it."""
        self._move_to(int(end))
        begin = max(begin, float(self._second - WINDOW_S + 1))
        while begin < end:
            second = int(begin)
            until = min(end, float(second + 1))
            self._busy_s[second % WINDOW_S] += until - begin
            begin = until

    def _move_to(self, second: int) -> None:
        for passed in range(max(self._second, second - WINDOW_S) + 1, second + 1):
            self._busy_s[passed % WINDOW_S] = 0.0
        self._second = max(self._second, second)

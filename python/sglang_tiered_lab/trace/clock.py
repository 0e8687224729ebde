"""When a request came, where its row says that, or how long after the one before it."""

from __future__ import annotations

from sglang_tiered_lab.trace.tally import BadRowError


class Clock:
    """Follows the conversations of one reading; holds a time for each."""

    def __init__(self, *, has_times: bool) -> None:
        self._has_times = has_times
        self._last_s: dict[str, float] = {}

    def arrival_s(
        self, conversation: str | None, time_s: float | None, delay_s: float | None
    ) -> float | None:
        """``None`` in a file without times. How long an answer took no file says: it counts as
        given at once. Raises ``BadRowError`` for a request that is nowhere in time."""
        if not self._has_times:
            return None
        if time_s is None:
            last_s = None if conversation is None else self._last_s.get(conversation)
            if last_s is None:
                raise BadRowError("it has no timestamp, nor a request of its session before it")
            time_s = last_s + (delay_s or 0.0)
        if conversation is not None:
            self._last_s[conversation] = time_s
        return time_s

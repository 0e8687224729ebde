"""A clock for what asks one: time that moves only when a test moves it."""

from __future__ import annotations


class Clock:
    """Stands for ``time.monotonic``. Set ``now``, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

"""When to try again what failed, and how often to say so."""

from __future__ import annotations

import logging
import random

__all__ = ["Backoff", "OnceLog"]

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0


class Backoff:
    """A pause after each failure in a row, twice as long each time: 1 s up to 60 s by default.
    ``spread`` takes up to that part off a pause, so that many do not try again at once."""

    def __init__(
        self, first_s: float = FIRST_RETRY_S, longest_s: float = LAST_RETRY_S, spread: float = 0.0
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._spread = spread
        self.num_failures = 0
        self._retry_at = 0.0

    def is_over(self, now: float) -> bool:
        return self.num_failures == 0 or now >= self._retry_at

    def wait_s(self, now: float) -> float:
        """Return how long until the pause is over."""
        return 0.0 if self.is_over(now) else self._retry_at - now

    def fail(self, now: float) -> None:
        if not self.is_over(now):
            return  # one incident: jobs already under way when it began do not lengthen the pause
        pause_s = min(self._first_s * 2.0 ** min(self.num_failures, 16), self._longest_s)
        self._retry_at = now + pause_s * random.uniform(1.0 - self._spread, 1.0)
        self.num_failures += 1

    def succeed(self) -> None:
        self.num_failures = 0


class OnceLog:
    """One warning per cause, until the cause is settled and comes back."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._active: set[str] = set()

    def report(self, cause: str, message: str, *args: object) -> None:
        self._report(logging.WARNING, cause, message, *args)

    def fault(self, cause: str, message: str, *args: object) -> None:
        """Log an error with its trace; call it in an except clause."""
        self._report(logging.ERROR, cause, message, *args, exc_info=True)

    def _report(
        self, level: int, cause: str, message: str, *args: object, exc_info: bool = False
    ) -> None:
        if cause not in self._active:
            self._active.add(cause)
            self._logger.log(level, message, *args, exc_info=exc_info)

    def settle(self, cause: str) -> None:
        self._active.discard(cause)

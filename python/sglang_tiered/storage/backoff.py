"""When to try again what failed, and how often to say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

__all__ = ["Backoff", "OnceLog"]

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0


class Backoff:
    """Doubling pause after each failure in a row: 1 s up to 60 s."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._retry_at = 0.0

    def is_over(self, now: float) -> bool:
        return self.num_failures == 0 or now >= self._retry_at

    def fail(self, now: float) -> None:
        if not self.is_over(now):
            return  # one incident: jobs already under way when it began do not lengthen the pause
        exponent = min(self.num_failures, 16)
        self._retry_at = now + min(_FIRST_RETRY_S * 2**exponent, _LAST_RETRY_S)
        self.num_failures += 1

    def succeed(self) -> None:
        self.num_failures = 0


class OnceLog:
    """One warning per cause, until the cause is settled and comes back."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._active: set[str] = set()

    def report(self, cause: str, message: str, *args: object) -> None:
        if cause not in self._active:
            self._active.add(cause)
            self._logger.warning(message, *args)

    def settle(self, cause: str) -> None:
        self._active.discard(cause)

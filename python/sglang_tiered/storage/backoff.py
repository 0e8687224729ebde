"""When to try again what failed, and how often to say so."""

from __future__ import annotations

import logging
import random
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0


class Backoff:
    """A pause after each failure in a row, twice as long each time: 1 s up to 60 s by default.
    ``spread`` takes up to that part off a pause, so that many do not try again at once. Any
    thread."""

    def __init__(
        self,
        clock: Callable[[], float],
        first_s: float = FIRST_RETRY_S,
        longest_s: float = LAST_RETRY_S,
        spread: float = 0.0,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # a leaf
        self._first_s = first_s
        self._longest_s = longest_s
        self._spread = spread
        self.num_failures = 0  # that began a pause
        self._num_tolerated = 0
        self._retry_at = 0.0

    @property
    def wait_s(self) -> float:
        """How long until the pause is over."""
        return max(0.0, self._retry_at - self._clock()) if self.num_failures else 0.0

    @property
    def is_over(self) -> bool:
        return not self.wait_s

    def fail(self, tolerated: int = 0) -> None:
        """Begin a pause; the first one behind more failures in a row than are tolerated."""
        with self._lock:
            if not self.is_over:
                return  # one incident: what was under way when it began lengthens no pause
            if not self.num_failures and self._num_tolerated < tolerated:
                self._num_tolerated += 1
                return
            pause_s = min(self._first_s * 2.0 ** min(self.num_failures, 16), self._longest_s)
            self._retry_at = self._clock() + pause_s * random.uniform(1.0 - self._spread, 1.0)
            self.num_failures += 1

    def succeed(self) -> None:
        with self._lock:
            self.num_failures = self._num_tolerated = 0


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

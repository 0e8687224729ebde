"""Why Redis does not answer, logged once, and when to try again."""

from __future__ import annotations

import logging
import random
import threading

__all__ = ["Backoff", "ConnectionHealth"]

logger = logging.getLogger(__name__)


class ConnectionHealth:
    """The latest failure of each connection, by name. Thread-safe."""

    def __init__(self, shown_url: str) -> None:
        self._shown_url = shown_url
        self._lock = threading.Lock()
        self._clauses: dict[str, str] = {}
        self._answered: set[str] = set()
        self._logged = ""
        self.num_errors = 0

    @property
    def clause(self) -> str:
        """The latest failure; empty while every connection works, or before the first exchange."""
        with self._lock:
            return next(iter(self._clauses.values()), "")

    def works(self, connection: str) -> bool:
        """Whether the latest exchange of a connection was answered."""
        return connection in self._answered and connection not in self._clauses

    def answered(self, connection: str) -> None:
        with self._lock:
            self._answered.add(connection)
            self._clauses.pop(connection, None)
            is_over = bool(self._logged) and not self._clauses
            if is_over:
                self._logged = ""
        if is_over:
            logger.info("the locality index at %s works again", self._shown_url)

    def failed(self, connection: str, clause: str) -> None:
        with self._lock:
            self.num_errors += 1
            self._clauses[connection] = clause
            is_new = self._logged != clause
            self._logged = clause
        if is_new:
            logger.warning(
                "the locality index at %s fails (%s); no pages are shared with other servers "
                "until it works; retrying",
                self._shown_url,
                clause,
            )


class Backoff:
    """Pauses between tries, twice as long each time, spread by half."""

    def __init__(self, first_s: float = 0.1, longest_s: float = 5.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._num_failures = 0

    def reset(self) -> None:
        self._num_failures = 0

    def next_s(self) -> float:
        pause_s = min(self._first_s * 2.0 ** min(self._num_failures, 16), self._longest_s)
        self._num_failures += 1
        return pause_s * random.uniform(0.5, 1.0)

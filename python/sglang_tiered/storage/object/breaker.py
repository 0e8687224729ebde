"""When the bucket is asked. Pure state behind a small lock; the clock is passed in.

RUNNING -> MISS_ONLY after failures in a row, of whatever thread; from then on only the discovery
thread asks, one probe after a pause that doubles, and the first that succeeds brings RUNNING back.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.base import Health

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Breaker"]

_FAILURES_TOLERATED = 2
_FIRST_PAUSE_S = 1.0
_LAST_PAUSE_S = 60.0


class Breaker:
    """Requests that read open and close it. Failed stores pause stores only. A bucket that never
    answered yet gets no benefit of the doubt: its first failure opens. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = _FAILURES_TOLERATED  # in a row
        self._num_probes = 0  # that failed since it opened
        self._retry_at: float | None = None  # when the next probe is due; None: closed
        self._cause = ""
        self._stores = Backoff()
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        return self._retry_at is not None

    def diagnosis(self) -> tuple[Health, str]:
        """The state of now and why; the reason is empty while RUNNING."""
        with self._lock:
            if self._retry_at is None:
                return Health.RUNNING, ""
            return Health.MISS_ONLY, self._cause

    def wait_s(self) -> float:
        """How long until the next probe is due; 0 when it is, or when it is closed."""
        with self._lock:
            return 0.0 if self._retry_at is None else max(self._retry_at - self._clock(), 0.0)

    def succeeded(self) -> None:
        """A request was answered, if only by "not found"."""
        with self._lock:
            self._num_failures = 0
            self._num_probes = 0
            self._retry_at = None

    def failed(self, cause: str) -> None:
        """A request failed after its retries."""
        with self._lock:
            self._num_failures += 1
            self._cause = cause
            now = self._clock()
            if self._retry_at is None:
                if self._num_failures <= _FAILURES_TOLERATED:
                    return
                self.num_opened += 1
            elif now < self._retry_at:
                return  # under way since before it opened
            pause = min(_FIRST_PAUSE_S * 2 ** min(self._num_probes, 16), _LAST_PAUSE_S)
            self._num_probes += 1
            self._retry_at = now + pause

    def fault(self, cause: str) -> None:
        """Something of ours failed, not the bucket: misses until it has answered a probe."""
        with self._lock:
            self._num_failures = max(self._num_failures, _FAILURES_TOLERATED)
        self.failed(cause)

    def accepts_stores(self) -> bool:
        with self._lock:
            return self._retry_at is None and self._stores.is_over(self._clock())

    def store_failed(self) -> None:
        """Stores pause; loads go on."""
        with self._lock:
            self._stores.fail(self._clock())

    def store_succeeded(self) -> None:
        with self._lock:
            self._stores.succeed()

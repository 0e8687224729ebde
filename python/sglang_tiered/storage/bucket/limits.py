"""When the bucket is asked. The clock is passed in."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.base import Health

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.storage.bucket.requests import BucketError

__all__ = ["Breaker"]

logger = logging.getLogger(__name__)

_FAILURES_TOLERATED = 2


class Breaker:
    """RUNNING -> MISS_ONLY after failed reads in a row, of whatever thread. From then on only the
    discovery thread asks, one probe after a pause that doubles, and the first that succeeds brings
    RUNNING back. (A ``HealthMonitor`` lets loads be the probes, which may take seconds here.)

    A bucket that never answered yet gets no benefit of the doubt: its first failure opens.
    Thread-safe."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        name: str = "",
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._on_open = on_open
        self._lock = threading.Lock()
        self._tolerated = 0  # failures in a row
        self._probes = Backoff(clock)  # open while one failed
        self._cause = ""
        self.stores = Backoff(clock)  # which failed ones pause, while loads go on

    @property
    def is_open(self) -> bool:
        return self._probes.num_failures > 0

    def diagnosis(self) -> tuple[Health, str]:
        """Return the state of now and why; the reason is empty while RUNNING."""
        with self._lock:
            if not self.is_open:
                return Health.RUNNING, ""
            return Health.MISS_ONLY, self._cause

    def wait_s(self) -> float:
        """Return how long until the next probe is due; 0 when it is, or when it is closed."""
        return self._probes.wait_s

    def note(self, error: BucketError | None) -> None:
        """Note a request that reads: None was answered, if only by "not found"; an error after its
        retries."""
        if error is not None:
            self._failed(error.clause, self._tolerated)
            return
        with self._lock:
            was_open = self.is_open
            self._tolerated = _FAILURES_TOLERATED
            self._probes.succeed()
        if was_open:
            logger.info("%s answers again", self._name)

    def fault(self, what: str) -> None:
        """Note that the engine failed, not the bucket, in an except clause: misses until a probe
        succeeds."""
        logger.exception("%s: internal error while %s", self._name, what)
        self._failed(f"internal error while {what}", 0)

    def _failed(self, cause: str, tolerated: int) -> None:
        with self._lock:
            was_open, self._cause = self.is_open, cause
            self._probes.fail(tolerated)
            opens = self.is_open and not was_open
        if opens:
            self._on_open()
            logger.warning("%s: %s; every lookup misses until it works again", self._name, cause)

    def accepts_stores(self) -> bool:
        return not self.is_open and self.stores.is_over

"""When the device may be used. The clock is passed in.

Nothing runs in the background: the next caller notices an I/O that hangs.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING

from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.base import Health

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_READ_FAILURES_TOLERATED = 2


class HealthMonitor:
    """RUNNING while reads work and nothing hangs; MISS_ONLY otherwise, with automatic retry, or for
    good once what the engine has is no longer its own.

    Every method is thread-safe and returns at once.
    """

    def __init__(self, clock: Callable[[], float], io_timeout_s: float) -> None:
        self._clock = clock
        self._io_timeout_s = io_timeout_s
        self._lock = threading.Lock()
        self._tokens = itertools.count()
        self._started: dict[int, float] = {}  # guarded by _lock
        self.stores = Backoff(clock)  # which failed ones pause, while loads go on
        self._device = Backoff(clock)
        self._cause = ""  # of the last failure of the device; guarded by _lock
        self._lost = ""  # why it is not used again; guarded by _lock

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Wrap every blocking call to the device."""
        token = next(self._tokens)
        with self._lock:
            self._started[token] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                took_s = self._clock() - self._started.pop(token)
                if took_s > self._io_timeout_s:
                    self._cause = f"an operation took {took_s:.0f} s"
                    self._device.fail()

    def state(self) -> Health:
        return self.diagnosis()[0]

    def diagnosis(self) -> tuple[Health, str]:
        """Return the state of now and why; the reason is empty while RUNNING."""
        with self._lock:
            if self._lost:
                return Health.MISS_ONLY, self._lost
            now = self._clock()
            waited_s = now - min(self._started.values(), default=now)
            if waited_s > self._io_timeout_s:
                return Health.MISS_ONLY, f"the device has not answered for {waited_s:.0f} s"
            if not self._device.is_over:
                return Health.MISS_ONLY, self._cause
            return Health.RUNNING, ""

    def accepts_stores(self) -> bool:
        return not self._lost and self.stores.is_over

    def read_failed(self, error: OSError) -> None:
        with self._lock:
            self._cause = f"reads fail: {error.strerror or error}"
            self._device.fail(_READ_FAILURES_TOLERATED)

    def check_lock(self, is_held: Callable[[], bool]) -> bool:
        """Return whether the directory is still the engine's alone, and answer misses from now on
        where it is not. ``is_held`` asks the filesystem."""
        try:
            with self.watch():
                if is_held():
                    return True
        except OSError:
            return True  # which says nothing about who has it
        with self._lock:
            self._lost = "its directory or the lock in it was removed"
        return False

    def fault(self, cause: str) -> None:
        """Answer misses for a while: the engine failed, not the device."""
        with self._lock:
            self._cause = cause
            self._device.fail()

    def read_succeeded(self) -> None:
        with self._lock:
            if self._device.is_over:  # else it was begun before the incident, and proves nothing
                self._device.succeed()

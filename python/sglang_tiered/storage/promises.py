"""Futures that a tier gives out, and what becomes of several of them."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.base import Job


def promise() -> Future[bool]:
    """Return a future that the thread waiting for it cannot cancel."""
    future: Future[bool] = Future()
    future.set_running_or_notify_cancel()
    return future


def keep(future: Future[bool], outcome: bool) -> None:
    """End a future, unless it has ended."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(outcome)


def keep_as(future: Future[bool], other: Future[bool]) -> None:
    """End a future as another one has ended."""
    keep(future, other.result())


def ended(outcome: bool) -> Future[bool]:
    future = promise()
    keep(future, outcome)
    return future


def is_true(future: Future[bool], timeout_s: float) -> bool:
    """Wait for a future; false when the time runs out. Never on the scheduler thread."""
    try:
        return future.result(timeout_s)
    except TimeoutError:
        return False


def all_true(futures: Sequence[Future[bool]], jobs: Sequence[Job] = ()) -> Future[bool]:
    """Return whether every future becomes true; known once all have ended and all jobs are over."""
    whole = promise()
    lock = threading.Lock()
    num_left = len(futures) + len(jobs) + 1

    def end_part(_: object = None) -> None:
        nonlocal num_left
        with lock:
            num_left -= 1
            if num_left:
                return
        keep(whole, all(future.result() for future in futures))

    for job in jobs:
        job.call_at_end(end_part)
    for future in futures:
        future.add_done_callback(end_part)
    end_part()
    return whole


class Promises:
    """Futures that a tier owes: each ends at the latest, as false, when the tier is closed. Any
    thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Future[bool]] = set()
        self._closed = False

    def make(self) -> Future[bool]:
        return self.watch(promise())

    def watch(self, future: Future[bool]) -> Future[bool]:
        """End a future of another owner too when the tier is closed."""
        with self._lock:
            closed = self._closed
            self._open.add(future)
        future.add_done_callback(self._drop)
        if closed:
            keep(future, False)
        return future

    def _drop(self, future: Future[bool]) -> None:
        with self._lock:
            self._open.discard(future)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            left = list(self._open)
        for future in left:
            keep(future, False)

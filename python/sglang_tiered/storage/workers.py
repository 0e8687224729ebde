"""``Workers``: the threads of an engine, and calls on threads of their own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Workers", "call_each"]

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


class Workers:
    """Threads that end when their engine is closed, or with the process. Of one thread."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, name: str, run: Callable[[], None], count: int | None = None) -> None:
        """Start a thread, or ``count`` of them with numbers in their names."""
        names = [name] if count is None else [f"{name}-{number}" for number in range(count)]
        for each in names:
            thread = threading.Thread(target=run, name=each, daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for their end; false where one is still at work after that time."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)


def call_each(
    call: Callable[[_Item], _Found], items: Sequence[_Item], num_threads: int
) -> list[Future[_Found]]:
    """Call for each item, on threads that the end of the process does not wait for, as it does for
    those of a ``ThreadPoolExecutor``. What is cancelled in time is not called."""
    futures: list[Future[_Found]] = [Future() for _ in items]
    rest = iter(list(zip(items, futures, strict=True)))

    def work() -> None:
        for item, future in rest:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(item))
                except BaseException as error:
                    future.set_exception(error)

    for _ in range(min(num_threads, len(items))):
        threading.Thread(target=work, daemon=True).start()
    return futures

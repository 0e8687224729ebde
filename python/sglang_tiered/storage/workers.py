"""``Workers``: the threads of an engine."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Workers"]


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

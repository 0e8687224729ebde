"""How many loads from storage may be under way: the prefetch window.

Loads land in the host tier before their request consumes them. If more were begun than fit, each
would evict an earlier one before it was used, and all of them would be read in vain. The window
bounds what is loading or loaded and not yet consumed; a load beyond it is put off, not dropped.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["PrefetchWindow"]

Request = TypeVar("Request")


class PrefetchWindow(Generic[Request]):
    """Bookkeeping for one scheduler; not thread-safe. Sizes are tokens."""

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"a prefetch window of {limit} tokens lets nothing load")
        self._limit = limit
        self._put_off: set[Request] = set()

    def has_room(self, num_tokens: int, num_taken: int) -> bool:
        """Whether a load of ``num_tokens`` may begin beside ``num_taken`` tokens under way.

        One load always may, however large: a prompt longer than the window must not wait forever.
        """
        return num_taken == 0 or num_taken + num_tokens <= self._limit

    def put_off(self, request: Request) -> None:
        self._put_off.add(request)

    def is_put_off(self, request: Request) -> bool:
        return request in self._put_off

    def withdraw(self, request: Request) -> None:
        """Forget a request: its load begins, or it was aborted. Unknown requests are fine."""
        self._put_off.discard(request)

    def clear(self) -> None:
        self._put_off.clear()

    @property
    def num_put_off(self) -> int:
        return len(self._put_off)

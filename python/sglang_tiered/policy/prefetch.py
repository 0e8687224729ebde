"""How many loads from storage may be under way: the prefetch window.

Loads land in the host tier before their request consumes them. If more were begun than fit, each
would evict an earlier one before it was used, and all of them would be read in vain. The window
bounds what is loading or loaded and not yet consumed; a load beyond it is put off, not dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["PrefetchWindow"]

Request = TypeVar("Request")

MAX_IGNORED_ASKS = 100
"""Asks in a row that led to no new attempt, after which the asker no longer means to load."""


@dataclass(slots=True)
class _PutOff:
    num_tokens: int
    num_asks: int = 0  # since its last attempt


class PrefetchWindow(Generic[Request]):
    """Bookkeeping for one scheduler; not thread-safe. Sizes are tokens."""

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"a prefetch window of {limit} tokens lets nothing load")
        self._limit = limit
        self._put_off: dict[Request, _PutOff] = {}

    def has_room(self, num_tokens: int, num_taken: int) -> bool:
        """Whether a load of ``num_tokens`` may begin beside ``num_taken`` tokens under way.

        One load always may, however large: a prompt longer than the window must not wait forever.
        Nor must a request that loads nothing wait for one.
        """
        return num_tokens == 0 or num_taken == 0 or num_taken + num_tokens <= self._limit

    def put_off(self, request: Request, num_tokens: int) -> None:
        """An attempt found no room for so much; the request shall be asked again."""
        self._put_off[request] = _PutOff(num_tokens)

    def is_put_off(self, request: Request) -> bool:
        return request in self._put_off

    def has_turn(self, request: Request, num_taken: int) -> bool:
        """Whether a put-off request would find room now."""
        return self.has_room(self._put_off[request].num_tokens, num_taken)

    def num_tokens(self, request: Request) -> int:
        """What a put-off request is going to load."""
        return self._put_off[request].num_tokens

    def ask(self, request: Request) -> bool:
        """Whether a put-off request should go on waiting, its load being attempted again.

        False, and the request forgotten, once that was asked many times in a row without another
        attempt: whoever repeats attempts has given up, and a request must not wait for nothing.
        """
        put_off = self._put_off[request]
        put_off.num_asks += 1
        if put_off.num_asks <= MAX_IGNORED_ASKS:
            return True
        self.withdraw(request)
        return False

    def withdraw(self, request: Request) -> None:
        """Forget a request: its load begins, or it was aborted. Unknown requests are fine."""
        self._put_off.pop(request, None)

    def clear(self) -> None:
        self._put_off.clear()

    @property
    def num_put_off(self) -> int:
        return len(self._put_off)

"""The prefetch window: how many loads from storage may be under way at once.

Loads land in the host tier before their request consumes them. If more were begun than fit, each
would evict an earlier one before its use, and all of them would be read in vain. The window bounds
the tokens that are loading or loaded and not yet consumed; a load beyond it is postponed, not
dropped.

Room is given in one place, once a step (``turns``), so the same room is promised once. Requests
that could start but for their load come first, in their order. The others, whose admission is far,
have what is left. The first without room keeps what there is, and nobody behind it begins.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import chain, filterfalse
from typing import Generic, TypeVar

__all__ = ["PrefetchWindow"]

Request = TypeVar("Request")

MAX_TURNS = 16
"""Turns at once: a scheduler's step must not pay for a thousand."""

MAX_IGNORED_TURNS = 4
"""Turns in a row without a new attempt, after which others go first: its request does not wait for
admission, or may be attempted no more."""


@dataclass(slots=True)
class _PutOff:
    num_tokens: int
    rank: tuple[int, int]
    num_turns: int = 0  # since its last attempt


class PrefetchWindow(Generic[Request]):
    """Keeps the postponed loads of one scheduler. Not thread-safe. Sizes are tokens."""

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"a prefetch window of {limit} tokens lets nothing load")
        self._limit = limit
        self._put_off: dict[Request, _PutOff] = {}
        self._ready: set[Request] = set()  # that could have started since the last turns
        self._order: list[Request] = []  # of the turns
        self._num_tokens = 0  # of those that take turns

    def has_room(self, num_tokens: int, num_taken: int) -> bool:
        """Return whether ``num_tokens`` may be loaded beside ``num_taken`` tokens under way.

        One load always may, however large: a prompt longer than the window must not wait forever.
        A request that loads nothing waits for no load either.
        """
        return num_tokens == 0 or num_taken == 0 or num_taken + num_tokens <= self._limit

    def has_room_for_next(self, num_tokens: int, num_taken: int) -> bool:
        """The same for a request that has just come, and overtakes nobody who waits for room."""
        return num_tokens == 0 or (not self.waits_for_room and self.has_room(num_tokens, num_taken))

    @property
    def waits_for_room(self) -> bool:
        """Return whether a request that takes turns waits for room."""
        return self._num_tokens > 0

    def put_off_load(
        self,
        request: Request,
        num_tokens: int,
        rank: tuple[int, int] = (0, 0),
        *,
        rests: bool = False,
    ) -> None:
        """Postpone a load of ``num_tokens`` that found no room, until it is attempted again. Those
        with a smaller ``rank`` come first, and of equal ones those that were put off first.
        ``rests``: it takes no turn before its request could start."""
        self.withdraw_load(request)
        num_turns = MAX_IGNORED_TURNS if rests else 0
        self._put_off[request] = _PutOff(num_tokens, rank, num_turns)
        self._num_tokens += num_tokens * (not rests)
        insort(self._order, request, key=self._rank)

    def _rank(self, request: Request) -> tuple[int, int]:
        return self._put_off[request].rank

    def is_put_off(self, request: Request) -> bool:
        return request in self._put_off

    def has_waited(self, request: Request) -> bool:
        """Return whether a request is postponed for lack of room."""
        return self.is_put_off(request) and self._put_off[request].num_tokens > 0

    def could_start(self, request: Request) -> None:
        """Note that a postponed request waits for nothing but its load, until the next turns."""
        self._ready.add(request)
        put_off = self._put_off[request]
        if put_off.num_turns >= MAX_IGNORED_TURNS:  # it is attempted after all
            put_off.num_turns = 0
            self._num_tokens += put_off.num_tokens

    def first_ready(self) -> Request | None:
        """Return the first of the requests that could start."""
        return min(self._ready, key=self._rank, default=None)

    def num_tokens(self, request: Request) -> int:
        """Return how many tokens a postponed request is going to load."""
        return self._put_off[request].num_tokens

    def withdraw_load(self, request: Request) -> None:
        """Drop a request whose load begins or that was aborted. Unknown ones are ignored."""
        if request not in self._put_off:
            return
        first = bisect_left(self._order, self._rank(request), key=self._rank)
        del self._order[self._order.index(request, first)]
        self._ready.discard(request)
        put_off = self._put_off.pop(request)
        if put_off.num_turns < MAX_IGNORED_TURNS:
            self._num_tokens -= put_off.num_tokens

    def turns(self, num_taken: int, *, only_ready: bool = False) -> list[Request]:
        """Return the postponed requests that find room now, one beside the other: first those that
        could start (``only_ready``: no others), each time in their order. Each counts as a turn,
        whatever comes of it."""
        found: list[Request] = []
        ready, self._ready = self._ready, set()
        others = () if only_ready else filterfalse(ready.__contains__, self._order)
        for request in chain(sorted(ready, key=self._rank), others):
            put_off = self._put_off[request]
            if put_off.num_turns >= MAX_IGNORED_TURNS:
                continue
            if len(found) >= MAX_TURNS or not self.has_room(put_off.num_tokens, num_taken):
                break
            num_taken += put_off.num_tokens
            put_off.num_turns += 1
            if put_off.num_turns == MAX_IGNORED_TURNS:
                self._num_tokens -= put_off.num_tokens
            found.append(request)
        return found

    def clear(self) -> None:
        self._put_off.clear()
        self._ready.clear()
        self._order.clear()
        self._num_tokens = 0

    @property
    def num_put_off(self) -> int:
        return len(self._put_off)

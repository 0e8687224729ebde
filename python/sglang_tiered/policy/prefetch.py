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
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")

MAX_TURNS = 16
"""Turns at once: a scheduler's step must not pay for a thousand."""

MAX_IGNORED_TURNS = 4
"""Turns in a row without a new attempt, after which others go first: its request does not wait for
admission, or may be attempted no more."""


@dataclass(slots=True, eq=False)
class PutOff(Generic[Request]):
    """Describes a postponed load; its request keeps this as long as it is postponed."""

    request: Request
    num_tokens: int
    rank: tuple[int, int]
    num_turns: int = 0  # since its last attempt


def _rank(put_off: PutOff[Any]) -> tuple[int, int]:
    return put_off.rank


class PrefetchWindow(Generic[Request]):
    """Keeps the postponed loads of one scheduler. Not thread-safe. Sizes are tokens."""

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"a prefetch window of {limit} tokens lets nothing load")
        self._limit = limit
        self._ready: set[PutOff[Request]] = set()  # that could have started since the last turns
        self._order: list[PutOff[Request]] = []  # of the turns
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
    ) -> PutOff[Request]:
        """Postpone a load of ``num_tokens`` that found no room, until it is attempted again. Those
        with a smaller ``rank`` come first, and of equal ones those that were put off first.
        ``rests``: it takes no turn before its request could start."""
        put_off = PutOff(request, num_tokens, rank, MAX_IGNORED_TURNS if rests else 0)
        self._num_tokens += num_tokens * (not rests)
        insort(self._order, put_off, key=_rank)
        return put_off

    def could_start(self, put_off: PutOff[Request]) -> None:
        """Note that a postponed request waits for nothing but its load, until the next turns."""
        self._ready.add(put_off)
        if put_off.num_turns >= MAX_IGNORED_TURNS:  # it is attempted after all
            put_off.num_turns = 0
            self._num_tokens += put_off.num_tokens

    def first_ready(self) -> PutOff[Request] | None:
        """Return the first of the requests that could start."""
        return min(self._ready, key=_rank, default=None)

    def withdraw_load(self, put_off: PutOff[Request]) -> None:
        """Postpone no more: the load begins, or its request was aborted."""
        first = bisect_left(self._order, put_off.rank, key=_rank)
        del self._order[self._order.index(put_off, first)]
        self._ready.discard(put_off)
        if put_off.num_turns < MAX_IGNORED_TURNS:
            self._num_tokens -= put_off.num_tokens

    def turns(self, num_taken: int, *, only_ready: bool = False) -> list[Request]:
        """Return the postponed requests that find room now, one beside the other: first those that
        could start (``only_ready``: no others), each time in their order. Each counts as a turn,
        whatever comes of it."""
        found: list[Request] = []
        ready, self._ready = self._ready, set()
        others = () if only_ready else filterfalse(ready.__contains__, self._order)
        for put_off in chain(sorted(ready, key=_rank), others):
            if put_off.num_turns >= MAX_IGNORED_TURNS:
                continue
            if len(found) >= MAX_TURNS or not self.has_room(put_off.num_tokens, num_taken):
                break
            num_taken += put_off.num_tokens
            put_off.num_turns += 1
            if put_off.num_turns == MAX_IGNORED_TURNS:
                self._num_tokens -= put_off.num_tokens
            found.append(put_off.request)
        return found

    def clear(self) -> None:
        self._ready.clear()
        self._order.clear()
        self._num_tokens = 0

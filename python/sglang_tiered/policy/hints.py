"""``HintQueue``: which conversations are loaded to host memory before a request asks for them.

A hint says that a conversation is about to be used. Hints are served in the order in which they
came, a piece at a time, so that a request finds at most one short piece ahead of its own load. The
tokens in host memory that all hints loaded and nobody has used yet have a limit. They take the
place of what was used least recently, and nobody has paid for them with a request. A hint's share
is free again once its conversation is used, or at the end of its life.

A hint that is dropped before it was loaded says why for one more life, to whoever asks again.

Pure bookkeeping, the same on every rank that is told the same. Not thread-safe. Sizes are tokens.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.policy.cost_model import LoadPlan


PIECE_TOKENS = 2048

LIFE_S = 60.0
"""A user who is about to come back has come back by then."""

MAX_PIECE_S = 0.25
"""What a piece may take: loads end one after the other, so one that comes meanwhile waits
for it. Or twice what the shortest takes, where a tier answers late."""

MAX_HINTS = 256
"""Hints that are served, were served or dropped, and whose life has not ended."""


class HintEnd(enum.Enum):
    """Says how a hint ended."""

    LOADED = "loaded"  # all that pays is in host memory
    WITHDRAWN = "withdrawn"  # memory was needed, a read failed, or its pages are no more
    EXPIRED = "expired"


def piece_length(
    num_held: int,
    *,
    page_tokens: int,
    piece_tokens: int = PIECE_TOKENS,
    ends: Sequence[int] | None = None,
) -> int:
    """Return how much of ``num_held`` tokens to load at once: whole pages, and more than a piece
    only where a load may end (``ends``, ascending) at no place before. 0: nothing can be loaded."""
    size = max(page_tokens, piece_tokens // page_tokens * page_tokens)
    if ends is None:
        return min(num_held, size)
    if not ends:
        return 0
    return ends[min(bisect_left(ends, size), len(ends) - 1)]


def short_piece(lengths: Sequence[int], plan_of: Callable[[int], LoadPlan]) -> int:
    """Return how much to load at once of what pays as a whole. Of the ``lengths`` that a piece may
    have, ascending, it is the longest that takes no longer than a piece may; longer if that pays
    not."""
    bound_s = max(MAX_PIECE_S, 2 * plan_of(lengths[0]).load_s)
    num_short = bisect_right(lengths, bound_s, key=lambda length: plan_of(length).load_s)
    place = max(0, num_short - 1)
    while place < len(lengths):
        plan = plan_of(lengths[place])
        if plan.load_s < plan.saved_s:
            return lengths[place]
        place = 2 * place + 1  # what a load takes by itself is as nothing in a longer one
    return lengths[-1]


@dataclass(slots=True, eq=False)
class Hint:
    """One hint, by the hash of its last page. ``until``: when its life ends, by the clock of this
    rank."""

    name: str
    number: int = 0
    num_tokens: int = 0  # of the bound: what is to be loaded, or was and has not been used
    until: float = 0.0
    is_active: bool = False
    num_passed: int = 0  # how often others went before it, since it could not be loaded
    why_dropped: str = ""  # empty while it is served, and once all that pays was loaded


SomeHint = TypeVar("SomeHint", bound=Hint)


class HintQueue(Generic[SomeHint]):
    """The hints of one scheduler, at most ``capacity`` tokens of them. See the module docstring."""

    def __init__(self, capacity: int, *, max_hints: int = MAX_HINTS) -> None:
        self.capacity = capacity
        self._max_hints = max_hints
        self._hints: OrderedDict[str, SomeHint] = OrderedDict()  # as their lives end
        self._num_begun = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._hints)

    def __iter__(self) -> Iterator[SomeHint]:
        """Those whose life has not ended, as it does; they may be removed meanwhile."""
        return iter(list(self._hints.values()))

    def get(self, name: str) -> SomeHint | None:
        """Return the hint of a chain whose life has not ended, or what became of it."""
        return self._hints.get(name)

    def room_for(self, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` a hint may load now: all of them, or as many as all
        hints together may have; 0 if it must wait for others."""
        wanted = min(num_tokens, self.capacity)
        has_room = len(self._hints) < self._max_hints and self.num_tokens + wanted <= self.capacity
        return wanted if has_room else 0

    def add(self, hint: SomeHint, num_tokens: int, now: float) -> None:
        """Begin a hint in place of an earlier one of that chain. The caller has asked
        ``room_for``."""
        self.remove(hint.name)
        self._num_begun += 1
        hint.number, hint.num_tokens, hint.is_active = self._num_begun, num_tokens, True
        self._keep(hint, now)

    def _keep(self, hint: SomeHint, now: float) -> None:
        hint.until = now + LIFE_S
        self._hints[hint.name] = hint
        self.num_tokens += hint.num_tokens

    def next(self) -> SomeHint | None:
        """Return the hint that is served now: of those that are active the one that was passed the
        fewest times, and of equal ones the first."""
        active = (hint for hint in self._hints.values() if hint.is_active)
        return min(active, key=lambda hint: hint.num_passed, default=None)

    def served(self, hint: SomeHint, num_tokens: int) -> None:
        """Note that nothing is left to load for a hint, which brought so many tokens."""
        num_tokens = min(num_tokens, hint.num_tokens)
        self.num_tokens += num_tokens - hint.num_tokens
        hint.is_active, hint.num_tokens = False, num_tokens

    def drop(self, hint: SomeHint, why: str, now: float) -> None:
        """Serve a hint no longer. What it loaded so far is as anybody's from now on."""
        self.remove(hint.name)
        hint.is_active, hint.why_dropped, hint.num_tokens = False, why, 0
        self._keep(hint, now)

    def oldest(self) -> SomeHint | None:
        """Return the hint whose life ends next."""
        return next(iter(self._hints.values()), None)

    def remove(self, name: str) -> None:
        """Drop a hint: it was used, or its life has ended. Unknown ones are ignored."""
        hint = self._hints.pop(name, None)
        if hint is not None:
            self.num_tokens -= hint.num_tokens

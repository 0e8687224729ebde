"""How long a request waits for its admission: what is ahead of it, and how fast that goes.

The prefill of the requests ahead says how much there is to do, but not how long it takes: several
are computed in one batch, running decodes take their turns, and memory or rows may be lacking. So
the time per second of such prefill is measured on requests that waited for nothing else, and so
is the wait of those that found nobody ahead, for which a batch was running.

Pure: not thread-safe, and the caller says what time it is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["QueueWait"]

Request = TypeVar("Request")

HALF_LIFE = 16
"""Admissions after which one counts half."""

PRIOR_AHEAD_S = 0.05
"""The weight of the first guess, that prefills follow each other and nothing else happens."""

MAX_WAITING = 100_000

MAX_LEAVING = 1024


@dataclass(slots=True)
class _Place:
    arrived_at: float
    ahead_s: float  # prefill of those that waited then
    ahead_and_gone_s: float  # the same and what had left the queue before
    own_s: float
    rank: int
    number: int
    counts: bool = True  # it waits for nothing but its turn


class QueueWait(Generic[Request]):
    """Follows the waiting queue of one scheduler. Times are seconds."""

    def __init__(self) -> None:
        self._waiting: dict[Request, _Place] = {}
        self._leaving: OrderedDict[Request, _Place] = OrderedDict()  # until their batch runs
        self._total_s = 0.0  # prefill of those that wait
        self._gone_s = 0.0  # prefill of those that waited and do not any more
        self._num_arrived = 0
        self._is_ranked = False
        kept = 0.5 ** (1 / HALF_LIFE)
        self._kept = kept
        self._waited_s = self._ahead_s = PRIOR_AHEAD_S
        self._first_s, self._num_first = 0.0, 0.0  # of those with nobody ahead

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def total_s(self) -> float:
        """The prefill of all that wait."""
        return self._total_s

    def own_s(self, request: Request) -> float:
        """The prefill of a request; 0 if it does not wait."""
        place = self._waiting.get(request)
        return 0.0 if place is None else place.own_s

    def order(self, request: Request) -> tuple[int, int]:
        """The rank of a request that waits, and how many arrived before it."""
        place = self._waiting.get(request)
        return (0, self._num_arrived) if place is None else (place.rank, place.number)

    def seconds(self, request: Request | None = None, *, is_busy: bool, rank: int = 0) -> float:
        """The time until a request that waits is admitted, or one of ``rank`` that arrives now
        (``None``). ``is_busy``: a batch runs, for whose end even the first one waits."""
        place = None if request is None else self._waiting.get(request)
        ahead_s = self._ahead_of(rank if place is None else place.rank, place)
        return self._turn_s * is_busy + ahead_s * self._waited_s / self._ahead_s

    def _ahead_of(self, rank: int, place: _Place | None = None) -> float:
        """The prefill ahead of a place, or of one that is taken now."""
        if self._is_ranked or rank:
            mine = rank, self._num_arrived if place is None else place.number
            others = self._waiting.values()
            return sum(each.own_s for each in others if (each.rank, each.number) < mine)
        if place is None:
            return self._total_s
        # Those that left in the meantime were ahead, or are taken to have been.
        return max(0.0, place.ahead_and_gone_s - self._gone_s)

    @property
    def _turn_s(self) -> float:
        """How long requests wait that have nobody ahead."""
        return self._first_s / self._num_first if self._num_first else 0.0

    def arrives(self, request: Request, own_s: float, now: float, *, rank: int = 0) -> None:
        """Note a request with ``own_s`` of prefill that arrived, or was looked at again: then it
        keeps its place. Those of a smaller ``rank`` go first."""
        place = self._waiting.get(request)
        if place is not None:
            self._total_s += own_s - place.own_s
            place.own_s = own_s
        elif len(self._waiting) < MAX_WAITING:
            self._waiting[request] = _Place(
                arrived_at=now,
                ahead_s=self._ahead_of(rank),
                ahead_and_gone_s=self._total_s + self._gone_s,
                own_s=own_s,
                rank=rank,
                number=self._num_arrived,
            )
            self._num_arrived += 1
            self._is_ranked = self._is_ranked or rank != 0
            self._total_s += own_s

    def leaves(self, request: Request) -> None:
        """Note that a request is about to be admitted. Unknown ones are ignored."""
        place = self._remove(request)
        if place is not None:
            self._leaving[request] = place
            if len(self._leaving) > MAX_LEAVING:
                self._leaving.popitem(last=False)

    def waits_for_more(self, request: Request) -> None:
        """Note that a request waits for more than its turn, so that nothing is learnt from it."""
        place = self._waiting.get(request)
        if place is not None:
            place.counts = False

    def starts(self, request: Request, now: float) -> None:
        """Note that the first batch of a request runs now. Unknown ones are ignored."""
        place = self._leaving.pop(request, None)
        if place is None or not place.counts:
            return
        waited_s = max(0.0, now - place.arrived_at)
        if place.ahead_s <= 0.0:
            self._first_s = self._first_s * self._kept + waited_s
            self._num_first = self._num_first * self._kept + 1.0
        else:
            self._waited_s = self._waited_s * self._kept + max(0.0, waited_s - self._turn_s)
            self._ahead_s = self._ahead_s * self._kept + place.ahead_s

    def _remove(self, request: Request) -> _Place | None:
        place = self._waiting.pop(request, None)
        if place is not None:
            self._total_s -= place.own_s
            self._gone_s += place.own_s
        if not self._waiting:
            self._total_s = self._gone_s = 0.0  # no rounding is left over
            self._is_ranked = False
        return place

    def clear(self) -> None:
        """Forget all requests, but not how fast they went."""
        self._waiting.clear()
        self._leaving.clear()
        self._total_s = self._gone_s = 0.0
        self._is_ranked = False

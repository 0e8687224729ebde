"""How long a request waits for its admission: what is ahead of it, and how fast that goes; and what
is left of the prefill that runs (``PrefillWork``).

The prefill of the requests ahead says how much there is to do, but not how long it takes. Several
are computed in one batch, running decodes take their turns, and memory or rows may be lacking. So
the time per second of such prefill is measured on requests that waited for nothing else. So is the
wait of those that found nobody ahead, but a batch running.

Pure: not thread-safe, and the caller says what time it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

HALF_LIFE = 16
"""Admissions after which one counts half."""

MAX_RANKS = 32
"""Ranks that are told apart: every plan looks at each. A request of a further one counts among
those of the nearest."""

PRIOR_AHEAD_S = 0.05
"""The weight of the first guess, that prefills follow each other and nothing else happens."""


WINDOW_S = 10
"""Seconds over which the busy share is taken."""


@dataclass(slots=True, eq=False)
class _Rank:
    """Describes the requests of one rank while any of it waits."""

    rank: int
    num_waiting: int = 0
    total_s: float = 0.0  # prefill of those that wait
    gone_s: float = 0.0  # prefill of those that waited and do not any more


@dataclass(slots=True)
class QueuePlace:
    """Describes where a request waits, which keeps this."""

    arrived_at: float
    ahead_s: float  # prefill of those ahead when it arrived
    was_busy: bool
    equals_s: float  # prefill of those of its rank that were ahead or gone when it arrived
    own_s: float
    equals: _Rank  # which it counts among
    rank: int
    number: int
    counts: bool = True  # it waits for nothing but its turn, so something is learnt from it

    @property
    def order(self) -> tuple[int, int]:
        """The rank, and how many arrived before."""
        return self.rank, self.number


class QueueWait:
    """Follows the waiting queue of one scheduler, in which those of a smaller rank go first, and of
    equal ones those that came first. Times are seconds."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._num_waiting = self._num_arrived = 0
        self._kept = 0.5 ** (1 / HALF_LIFE)
        self._waited_s = self._ahead_s = PRIOR_AHEAD_S
        self._first_s, self._num_first = 0.0, 0.0  # of those with nobody ahead
        self._own_s, self._num_own = 0.0, 0.0  # prefill of those that were admitted

    def __len__(self) -> int:
        return self._num_waiting

    def seconds(self, place: QueuePlace | None = None, *, is_busy: bool, rank: int = 0) -> float:
        """The time until a request that waits is admitted, or one of ``rank`` that arrives now
        (``None``). ``is_busy``: a batch runs, for whose end even the first one waits."""
        equals = self._equals(rank) if place is None else place.equals
        return self._wait_behind(self._ahead_of(equals, place), is_busy=is_busy)

    def longest_s(self, *, is_busy: bool) -> float:
        """The time until all that wait are admitted."""
        total_s = sum(rank.total_s for rank in self._ranks.values())
        return self._wait_behind(total_s, is_busy=is_busy)

    @property
    def service_s(self) -> float:
        """What a request adds to the wait of those behind it, on average; 0 before any."""
        return self._wait_behind(self._own_s, is_busy=False) / max(1.0, self._num_own)

    def _wait_behind(self, ahead_s: float, *, is_busy: bool) -> float:
        return self._turn_s * is_busy + max(0.0, ahead_s) * self._waited_s / self._ahead_s

    def _equals(self, rank: int) -> _Rank:
        """Those that a request of ``rank`` counts among."""
        if rank in self._ranks:
            return self._ranks[rank]
        if len(self._ranks) < MAX_RANKS:
            return _Rank(rank)
        return self._ranks[min(self._ranks, key=lambda each: abs(each - rank))]

    def _ahead_of(self, equals: _Rank, place: QueuePlace | None) -> float:
        """The prefill ahead of a place among those, or of one that is taken now."""
        ahead_s = sum(each.total_s for rank, each in self._ranks.items() if rank < equals.rank)
        if place is None:
            return ahead_s + equals.total_s
        # Those that left in the meantime were ahead, or are taken to have been.
        return ahead_s + min(max(0.0, place.equals_s - equals.gone_s), equals.total_s)

    @property
    def _turn_s(self) -> float:
        """How long requests wait that have nobody ahead."""
        return self._first_s / self._num_first if self._num_first else 0.0

    def arrives(
        self, place: QueuePlace | None, own_s: float, now: float, *, is_busy: bool, rank: int = 0
    ) -> QueuePlace:
        """Note a request with ``own_s`` of prefill that arrived, while a batch ran or not; or that
        was looked at again, and keeps its ``place``. Returns its place."""
        if place is None:
            equals = self._equals(rank)
            place = QueuePlace(
                arrived_at=now,
                ahead_s=self._ahead_of(equals, None),
                was_busy=is_busy,
                equals_s=equals.total_s + equals.gone_s,
                own_s=own_s,
                equals=equals,
                rank=rank,
                number=self._num_arrived,
            )
            self._ranks[equals.rank] = equals
            self._num_arrived += 1
            self._num_waiting += 1
            equals.num_waiting += 1
            equals.total_s += own_s
            return place
        equals = place.equals
        equals.total_s += own_s - place.own_s
        equals.gone_s -= own_s - place.own_s  # for those behind, which counted it as it was
        place.own_s = own_s
        return place

    def admitted(self, place: QueuePlace, now: float) -> None:
        """Note that a request's turn has come."""
        self.leaves(place)
        self._own_s = self._own_s * self._kept + place.own_s
        self._num_own = self._num_own * self._kept + 1.0
        if not place.counts:
            return
        waited_s = max(0.0, now - place.arrived_at)
        if place.ahead_s > 0.0:
            self._waited_s = self._waited_s * self._kept + max(0.0, waited_s - self._turn_s)
            self._ahead_s = self._ahead_s * self._kept + place.ahead_s
        elif place.was_busy:
            self._first_s = self._first_s * self._kept + waited_s
            self._num_first = self._num_first * self._kept + 1.0

    def leaves(self, place: QueuePlace) -> None:
        """Note that a request waits no more, whose turn need not have come."""
        equals = place.equals
        self._num_waiting -= 1
        equals.num_waiting -= 1
        equals.total_s -= place.own_s
        equals.gone_s += place.own_s
        if equals.num_waiting == 0:
            del self._ranks[equals.rank]  # and with it what rounding left over

    def clear(self) -> None:
        """Drop all requests, but not how fast they went."""
        self._ranks.clear()
        self._num_waiting = 0


class PrefillWork:
    """Follows the prefill batches of one scheduler from launch to end. They run one after the
    other, though several may have been launched. Times are of one clock that never goes back."""

    def __init__(self) -> None:
        self._expected_s: deque[float] = deque()  # of the batches under way
        self._begun_at = 0.0  # the first of them: its launch, or the end of the one before
        self._counted_to = 0.0  # its busy time
        self._busy_s = [0.0] * WINDOW_S  # of each second, by its number modulo the window
        self._second = 0  # the last one of those

    @property
    def is_running(self) -> bool:
        """Whether a batch was launched and has not ended."""
        return bool(self._expected_s)

    def launched(self, expected_s: float, now: float) -> None:
        """Note a batch that begins now, or when those before it have ended."""
        if not self._expected_s:
            self._begun_at = self._counted_to = now
        self._expected_s.append(expected_s)

    def ended(self, now: float) -> None:
        """Note that the first of the batches under way has ended."""
        if self._expected_s:
            self._count_to(now)
            self._expected_s.popleft()
            self._begun_at = now

    def left_s(self, now: float) -> float:
        """Return the seconds until all batches under way are expected to have ended. Nothing is
        left of one that is late."""
        if not self._expected_s:
            return 0.0
        first_s = self._expected_s[0]
        later_s = sum(self._expected_s) - first_s
        return max(0.0, self._begun_at + first_s - now) + max(0.0, later_s)

    def busy_share(self, now: float) -> float:
        """Return the share of the last ``WINDOW_S`` seconds, less what is left of the present one,
        in which a prefill ran: from 0 to 1."""
        if self._expected_s:
            self._count_to(now)
        self._move_to(int(now))
        return min(1.0, sum(self._busy_s) / (WINDOW_S - 1 + max(now - int(now), 1e-9)))

    def _count_to(self, end: float) -> None:
        """Add the busy time until now, or what the window holds of it."""
        self._move_to(int(end))
        begin = max(self._counted_to, float(self._second - WINDOW_S + 1))
        while begin < end:
            second = int(begin)
            until = min(end, float(second + 1))
            self._busy_s[second % WINDOW_S] += until - begin
            begin = until
        self._counted_to = end

    def _move_to(self, second: int) -> None:
        """Drop the seconds that have left the window."""
        for passed in range(max(self._second, second - WINDOW_S) + 1, second + 1):
            self._busy_s[passed % WINDOW_S] = 0.0
        self._second = max(self._second, second)

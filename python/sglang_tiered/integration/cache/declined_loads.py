"""``DeclinedLoads``: which of the loads that were declined are planned again, and what ranks tell
each other of where a load ends."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from sglang_tiered.integration.cache.load_planner import LoadPlanner
    from sglang_tiered.integration.ranks.rank_consensus import RankAgreement

__all__ = ["ABSENT", "DECLINED", "DeclinedLoads", "told_end"]

Request = TypeVar("Request")

DECLINED, ABSENT = -1, -2
"""What a rank answers in place of where a load ends: that computing is sooner, or that its tiers
hold nothing. The least answer counts, so a prefix that one rank lacks is not declined."""

MAX_ATTEMPTS = 2
"""How often a declined load is attempted again: SGLang bounds attempts too."""

MAX_DECLINED = 4096
"""Declined loads that are remembered: the first, since the turns of the others are far."""

LOOK_STEPS = 8
"""Steps between two plans while nothing is measured. A plan takes 0.2 ms."""


def told_end(end: int, *, has_back: bool = False) -> int:
    """Return what a rank tells of where a load ends: the smaller, the less it loads; of equal ends
    the one counts of which nothing is read from the back."""
    return 2 * end + has_back


class DeclinedLoads(Generic[Request]):
    """Has the loads that were declined when their request arrived planned again while it waits:
    the prices may have been wrong for a moment.

    Several ranks come to the same decision at no collective of their own: whose turn it is follows
    from what all of them see in the same step, and what each rank's own plan says is a question
    that rides in the next step's exchange. Scheduler thread."""

    def __init__(self, planner: LoadPlanner[Request]) -> None:
        self._planner = planner
        self._waiting: OrderedDict[Request, None] = OrderedDict()  # by turn
        self._num_attempts: dict[Request, int] = {}
        self._asked: Request | None = None  # of whom all ranks told their plan
        self._num_steps = 0
        self._prices_move = False

    def add(self, request: Request) -> None:
        """Note that all ranks together declined a load, though the tiers of each hold a prefix."""
        has_place = self._planner.knows(request) and len(self._waiting) < MAX_DECLINED
        if has_place and self._num_attempts.get(request, 0) < MAX_ATTEMPTS:
            self._waiting[request] = None

    def withdraw(self, request: Request) -> None:
        """Plan a load no more: its request arrived again."""
        self._waiting.pop(request, None)

    def drop(self, request: Request) -> None:
        """Drop a request that waits no more."""
        self.withdraw(request)
        self._num_attempts.pop(request, None)

    def clear(self) -> None:
        """Drop all requests."""
        self._waiting.clear()
        self._num_attempts.clear()
        self._asked = None

    def expect_prices(self) -> None:
        """Note that a load has ended or a prefill begins. What is measured, and when, differs
        between ranks; this is the same on all of them."""
        self._prices_move = True

    def step(self, agreement: RankAgreement, *, num_ahead: int) -> list[Request]:
        """Plan one load again in a step of the scheduler, another one each time, behind
        ``num_ahead`` tokens of other loads. Return those to attempt now, the same on all ranks:
        several know of the load that they planned in the step before. Where it ends stays the
        answer to the question that the request is, so the attempt need not ask."""
        self._num_steps += 1
        asked, self._asked = self._asked, None
        attempts = [] if asked is None else self._ask(asked, DECLINED, agreement)
        if self._waiting and (self._prices_move or self._num_steps % LOOK_STEPS == 0):
            self._prices_move = False
            request = next(iter(self._waiting))
            self._waiting.move_to_end(request)
            end = self._planner.end_by_now(request, num_ahead=num_ahead)
            attempts += self._ask(request, DECLINED if end is None else told_end(end), agreement)
        return attempts

    def _ask(self, request: Request, own: int, agreement: RankAgreement) -> list[Request]:
        """Return the request if its load gains on all ranks; nothing until they say."""
        if request not in self._waiting:
            return []
        end = agreement.ask_ranks(request, own)
        if end is None:
            self._asked = request
            return []
        if end < 0:
            agreement.drop_question(request)
            return []
        self.withdraw(request)
        self._num_attempts[request] = self._num_attempts.get(request, 0) + 1
        return [request]

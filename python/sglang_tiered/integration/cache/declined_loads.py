"""``DeclinedLoads``: which of the loads that were declined are planned again, and what ranks tell
each other of where a load ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from sglang_tiered.integration.cache.loads import State

if TYPE_CHECKING:
    from sglang_tiered.integration.cache.load_planner import LoadPlanner
    from sglang_tiered.integration.ranks import RankAgreement

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

    Several ranks come to the same decision at no collective of their own. Whose turn it is follows
    from what all of them see in the same step. What each rank's own plan says is a question that
    rides in the next step's exchange. Scheduler thread."""

    def __init__(self, planner: LoadPlanner[Request]) -> None:
        self._planner = planner
        self._loads = planner.loads
        self._asked: Request | None = None  # of whom all ranks told their plan
        self._num_steps = 0
        self._prices_move = False

    def add(self, request: Request) -> None:
        """Note that all ranks together declined a load, though the tiers of each hold a prefix."""
        has_place = self._loads.num_in(State.DECLINED) < MAX_DECLINED
        record = self._loads.get(request)
        if has_place and record.place is not None and record.num_attempts < MAX_ATTEMPTS:
            self._loads.move(request, State.DECLINED)

    def clear(self) -> None:
        """Plan none again."""
        for request in self._loads.in_state(State.DECLINED):
            self._loads.move(request, State.WAITING)
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
        request = self._loads.first_in(State.DECLINED)
        if request is not None and (self._prices_move or self._num_steps % LOOK_STEPS == 0):
            self._prices_move = False
            self._loads.move(request, State.DECLINED)  # its next turn is the last
            end = self._planner.end_by_now(request, num_ahead=num_ahead)
            attempts += self._ask(request, DECLINED if end is None else told_end(end), agreement)
        return attempts

    def _ask(self, request: Request, own: int, agreement: RankAgreement) -> list[Request]:
        """Return the request if its load gains on all ranks; nothing until they say."""
        if self._loads.get(request).state is not State.DECLINED:
            return []
        end = agreement.ask_ranks(request, own)
        if end is None:
            self._asked = request
            return []
        if end < 0:
            agreement.drop_question(request)
            return []
        self._loads.move(request, State.WAITING)
        self._loads.get(request).num_attempts += 1
        return [request]

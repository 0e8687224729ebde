"""What every request of a scheduling world may expect: while no other starts it waits for a tier no
longer than computing its prompt takes, and a quarter more while that would hold up others."""

from __future__ import annotations

import time
from typing import Any

QUARTER_MORE = 1.25
LOOKED_AT = 8
"""Of the requests that wait, in one step: the others are asked in their turn."""
GRACE_S = 0.05
"""From the first question beyond the bound. Of what has arrived SGLang
hears once its thread has run."""


class BoundedWaits:
    """Watches what the scheduler asks of a world's cache, and raises ``AssertionError`` for a
    request that still waits beyond its bound."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._asked = world.cache.check_prefetch_progress
        world.cache.check_prefetch_progress = self._ask
        self._since: dict[Any, float] = {}  # since when nothing but its load kept a request
        self._late: dict[Any, tuple[int, float]] = {}  # questions beyond its bound, and since when
        self.num_held_up = 0
        self._num_logged = 0

    def _ask(self, request: Any) -> bool:
        now = time.monotonic()
        may_start = bool(self._asked(request))
        if may_start:
            self._late.pop(request, None)
        elif self._world.cache.tiering.returns.back_of(request) is None:
            self.num_held_up += request not in self._since
            self._check(request, now - self._since.setdefault(request, now))
        return may_start

    def _check(self, request: Any, waited_s: float) -> None:
        waiting = self._world.scheduler.waiting_queue
        req = next(each for each in waiting if each.cache_request_handle == request)
        num_tokens = len(req.origin_input_ids)
        bound_s = QUARTER_MORE * self._world.cache.tiering.planner.costs.prefill.seconds(
            num_tokens, 0
        )
        if waited_s <= bound_s:
            return
        num_late, since = self._late.get(request, (0, time.monotonic()))
        self._late[request] = num_late + 1, since
        may_rest = num_late <= len(waiting) // LOOKED_AT
        assert may_rest or time.monotonic() - since <= GRACE_S, (
            f"{req.rid} waits for {waited_s:.3f} s; computing all of it takes {bound_s:.3f} s"
        )

    def step(self) -> None:
        """Forget requests that were admitted or aborted."""
        waiting = {each.cache_request_handle for each in self._world.scheduler.waiting_queue}
        gone = [request for request in self._since if request not in waiting]
        for request in gone:
            del self._since[request]
            self._late.pop(request, None)
        if self._num_logged != (num_logged := len(self._world.log)):  # a batch ran
            self._num_logged = num_logged
            self._since = dict.fromkeys(self._since, time.monotonic())

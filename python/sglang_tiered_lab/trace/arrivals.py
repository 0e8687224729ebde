"""Times for conversations that have none.

Conversations begin as a Poisson process. Each next turn comes after a lognormal gap with the median
126 s and sigma 1.05 of the published generator recipe for the Mooncake conversation trace, whose
own gaps between a request and its parent have the quartiles 69, 126 and 267 s and 486 s at p90.
"""

from __future__ import annotations

import heapq
import itertools
import random
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sglang_tiered_lab.trace.request import TraceRequest


GAP_MEDIAN_S = 126.0
GAP_SIGMA = 1.05


def with_arrivals(
    requests: Iterable[TraceRequest],
    *,
    conversations_per_s: float,
    gap_median_s: float = GAP_MEDIAN_S,
    seed: int = 0,
) -> Iterator[TraceRequest]:
    """The requests in order of the times they get. Those of a conversation must come together; one
    that says how long it comes after the one before it keeps that.

    Holds the turns to come of the conversations that have begun. The same seed gives the same
    times.
    """
    draw = random.Random(seed)
    waiting: list[tuple[float, int, TraceRequest]] = []
    order = itertools.count()
    start = 0.0
    for _, turns in itertools.groupby(requests, key=lambda request: request.conversation):
        while waiting and waiting[0][0] <= start:
            yield heapq.heappop(waiting)[2]
        time, gap_s = start, 0.0
        for request in turns:
            time += gap_s if request.delay_s is None else request.delay_s
            timed = msgspec.structs.replace(request, arrival_s=time)
            heapq.heappush(waiting, (time, next(order), timed))
            gap_s = gap_median_s * draw.lognormvariate(0.0, GAP_SIGMA)
        start += draw.expovariate(conversations_per_s)
    while waiting:
        yield heapq.heappop(waiting)[2]


def with_times(
    requests: Iterable[TraceRequest],
    *,
    conversations_per_s: float,
    gap_median_s: float = GAP_MEDIAN_S,
    seed: int = 0,
    on_none: Callable[[], None] = lambda: None,
) -> Iterator[TraceRequest]:
    """The requests as they are where the first has a time; otherwise ``with_arrivals``, and
    ``on_none`` is called first."""
    requests = iter(requests)
    first = next(requests, None)
    if first is None:
        return
    requests = itertools.chain([first], requests)
    if first.arrival_s is None:
        on_none()
        requests = with_arrivals(
            requests,
            conversations_per_s=conversations_per_s,
            gap_median_s=gap_median_s,
            seed=seed,
        )
    yield from requests

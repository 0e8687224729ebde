"""Whether the books of what waits to be stored balance."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from sglang_tiered.policy.spill import MAX_SHARE, MIN_SHARE

if TYPE_CHECKING:
    from sglang_tiered.policy.spill import SpillQueue


def check_spill_queue(queue: SpillQueue[Any]) -> None:
    """Raises ``AssertionError`` when they do not."""
    waiting = [store for stores in queue._waiting for store in stores.values()]
    assert queue.waiting_tokens == sum(store.num_tokens for store in waiting)
    flights = queue._flights.values()
    assert queue.flight_tokens == sum(store.num_tokens for store in flights)
    assert queue._num_flights_of == Counter(store.node for store in flights)
    assert not queue._waiting[0].keys() & queue._waiting[1].keys()
    assert all(node == each.node for stores in queue._waiting for node, each in stores.items())
    low, high = queue._host_tokens * MIN_SHARE, queue._host_tokens * MAX_SHARE
    assert low <= queue.limit_tokens <= high, (low, queue.limit_tokens, high)

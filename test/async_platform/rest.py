"""What an idle scheduler still holds: nothing, but what its tree has.

SGLang compares device memory with its books then. Here it is its tree, whose own check it asks only
of hybrid models, locks and host memory: a lock that stays keeps its nodes for good, and a host page
that no node has is lost until the next flush. Ends of copies and stores are heard of one step after
the other, so only what stays is told.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from report import Report

__all__ = ["Rest"]

LOOK_S = 0.25
TIMES = 6
"""So often in a row the same is seen before it is told."""


class Rest:
    """Of one scheduler, on its thread."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._next_look = 0.0
        self._seen: tuple[list[str], int] = ([], 0)

    def look(self, scheduler: Any) -> None:
        """Called whenever it has nothing to do."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        found = leftovers(scheduler) if is_at_rest(scheduler) else []
        number = self._seen[1] + 1 if found == self._seen[0] else 1
        self._seen = (found, number)
        if found and number == TIMES:
            self._report.violation("left-over-at-rest", what=found)


def is_at_rest(scheduler: Any) -> bool:
    cache = scheduler.tree_cache
    if getattr(cache, "storage", None) is None or not scheduler.is_fully_idle():
        return False
    ledger = cache.storage.ledger
    waits = ledger.waiting_tokens or ledger.flight_tokens
    return not (waits or cache._is_under_way() or cache.session.any_holding_kv())


def leftovers(scheduler: Any) -> list[str]:
    """One line each."""
    cache = scheduler.tree_cache
    found, held = [], 0
    root = cache.tree_core.root_node
    for node in cache.tree_core._collect_all_nodes():
        parts = [node.component_data[kind] for kind in cache.tree_core.component_types]
        host = parts[0].host_value
        held += 0 if host is None else len(host)
        if node is not root and any(part.lock_ref or part.host_lock_ref for part in parts):
            locks = [(part.lock_ref, part.host_lock_ref) for part in parts]
            found.append(f"node {node.id} is locked {locks}")
    pool = cache.cache_controller.mem_pool_host
    taken = pool.logical_size - pool.available_size()
    if taken != held:
        found.append(f"{taken} host tokens are taken, of which the tree has {held}")
    try:
        cache.sanity_check()
    except AssertionError as error:
        found.append(str(error))
    return found

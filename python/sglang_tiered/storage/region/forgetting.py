"""How the store forgets on order: one tenant, everything, or a namespace.

Each hides the pages at once, and lets nothing under way become visible; then the writer thread
makes it so on disk. Any thread but the scheduler's, as all of them wait.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglang_tiered.storage.region.jobs import ClearOrder, PurgeOrder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tiered.storage.base import Job
    from sglang_tiered.storage.region.state import StoreState

__all__ = ["clear", "purge", "set_namespace"]


def purge(state: StoreState, tenant: bytes, timeout_s: float) -> bool:
    """See ``TierEngine.purge``."""
    deadline = time.monotonic() + timeout_s
    order = PurgeOrder(tenant)
    with state.lock:
        if state.closed:
            return False
        state.forget_tenant(tenant)
        jobs = state.jobs.inflight
        state.stores.appendleft(order)
        state.store_ready.notify()
    waited = _wait(jobs, deadline)
    return order.done.wait(max(deadline - time.monotonic(), 0.0)) and order.durable and waited


def clear(state: StoreState) -> bool:
    """See ``TierEngine.clear``."""
    order = ClearOrder()
    with state.lock:
        if state.closed:
            return False
        state.num_pages_purged += len(state.index)
        state.forget_all(keep=False)
        jobs = state.jobs.inflight
        state.stores.append(order)
        state.store_ready.notify()
    _wait(jobs, None)
    order.done.wait()
    return order.durable


def set_namespace(state: StoreState, namespace: bytes, *, keep: bool) -> None:
    """See ``RegionEngine.set_namespace``."""
    with state.lock:
        state.forget_all(keep=keep)
        state.namespace = namespace
        jobs = state.jobs.inflight
    _wait(jobs, None)


def _wait(jobs: Iterable[Job], deadline: float | None) -> bool:
    for job in jobs:
        if not job.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
            return False
    return True

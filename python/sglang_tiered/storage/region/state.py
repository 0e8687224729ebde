"""What the store's threads share: books, queues and the one lock that guards them all.

The lock is never held across I/O or logging, so the scheduler thread may take it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.region.index import Index, RegionTable
from sglang_tiered.storage.region.jobs import (
    ClearOrder,
    JobBook,
    LoadSpan,
    LoadTicket,
    StoreTicket,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.base import Job
    from sglang_tiered.storage.region.index import Entry
    from sglang_tiered.storage.region.reader import Wanted

__all__ = ["StoreState"]


class StoreState:
    """Every attribute and method is guarded by ``lock``, which the caller holds."""

    def __init__(self, namespace: bytes) -> None:
        self.lock = threading.Lock()
        self.store_ready = threading.Condition(self.lock)
        self.load_ready = threading.Condition(self.lock)
        self.space_freed = threading.Condition(self.lock)
        self.namespace = namespace
        self.generation = 0  # bumped by clear and set_namespace: older stores stay invisible
        self.closed = False
        self.index = Index()
        self.regions = RegionTable()
        self.jobs = JobBook()
        self.stores: deque[StoreTicket | ClearOrder] = deque()
        self.loads: deque[LoadSpan] = deque()
        self.pending: dict[bytes, StoreTicket] = {}
        self.queued_store_bytes = 0
        self.num_pages_stored = 0
        self.bytes_stored = 0
        self.num_pages_loaded = 0
        self.bytes_loaded = 0

    def forget_all(self) -> None:
        """Empty the index; stores under way finish, but nobody will see their pages."""
        self.generation += 1
        self.index.clear()
        self.pending.clear()

    def queue_store(self, job: Job, positions: list[int], num_bytes: int) -> None:
        ticket = StoreTicket(job, self.namespace, self.generation, positions, num_bytes)
        self.pending.update((job.run.keys[position], ticket) for position in positions)
        self.queued_store_bytes += num_bytes
        self.stores.append(ticket)
        self.store_ready.notify()

    def queue_load(self, job: Job, spans: Sequence[list[Wanted]]) -> None:
        ticket = LoadTicket(job, self.namespace, len(spans))
        for wanted in spans:
            region = wanted[0].entry.region
            self.regions.pin(region)
            self.regions.touch(region)
            self.loads.append(LoadSpan(ticket, wanted))
        self.load_ready.notify(len(spans))

    def publish(
        self, ticket: StoreTicket, done: int, placed: Sequence[tuple[bytes, Entry]]
    ) -> None:
        """Make the pages just written visible; ``done`` of the ticket's pages were before."""
        for position, (key, entry) in zip(ticket.positions[done:], placed, strict=False):
            ticket.job.reasons[position] = Reason.OK
            if ticket.generation == self.generation:
                del self.pending[key]
                self.index.put(key, entry)
            self.bytes_stored += entry.length
        self.num_pages_stored += len(placed)

    def finish_store(self, ticket: StoreTicket, done: int, reason: Reason) -> None:
        """Let go of a store; its pages from ``done`` on were not stored, for this reason."""
        for position in ticket.positions[done:]:
            key = ticket.job.run.keys[position]
            if self.pending.get(key) is ticket:
                del self.pending[key]
        self.queued_store_bytes -= ticket.num_bytes
        self.jobs.finish_with(ticket.job, ticket.positions[done:], reason)

    def finish_span(self, span: LoadSpan, reasons: Sequence[Reason]) -> None:
        """Record the outcome of one span; the load is done with its last one."""
        ticket = span.ticket
        for item, reason in zip(span.wanted, reasons, strict=True):
            ticket.job.reasons[item.position] = reason
            if reason is Reason.OK:
                self.num_pages_loaded += 1
                self.bytes_loaded += item.entry.length
        ticket.num_spans_left -= 1
        if ticket.num_spans_left == 0:
            self.jobs.finish(ticket.job)

    def shed(self, store_reason: Reason) -> list[LoadSpan]:
        """Empty both queues. Queued stores are finished here; the spans are returned, because
        their regions must be unpinned, which may close a file, before they are finished."""
        kept: deque[StoreTicket | ClearOrder] = deque()
        for order in self.stores:
            if isinstance(order, StoreTicket):
                self.finish_store(order, 0, store_reason)
            else:
                kept.append(order)
        self.stores = kept
        spans = list(self.loads)
        self.loads.clear()
        return spans

    def check_integrity(self) -> None:
        idle = self.jobs.num_inflight == 0 and not self.stores
        self.index.check_integrity(self.regions)
        self.regions.check_integrity(idle=idle)
        if idle:
            assert not self.pending, f"{len(self.pending)} keys pending while idle"
            assert not self.loads, f"{len(self.loads)} spans queued while idle"
            assert self.queued_store_bytes == 0, f"{self.queued_store_bytes} bytes queued, idle"

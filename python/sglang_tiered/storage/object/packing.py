"""Pages into objects: one thread copies, encodes and checksums what was submitted.

One object at a time is open for every tenant (and, under a codec, page length). It is closed when
it is full, when it has lingered, on ``flush``, and before its time where open objects take half of
the staging memory. Pages of a run go in side by side, in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered.storage.base import NO_TENANT, JobKind, Reason
from sglang_tiered.storage.object.format import (
    TAIL_BYTES,
    manifest_bytes,
    page_checksum,
)
from sglang_tiered.storage.object.pending import OpenObject, StoreTicket

if TYPE_CHECKING:
    from sglang_tiered.storage.base import Job, Page, Run
    from sglang_tiered.storage.object.state import ObjectState, OnFault

__all__ = ["Packer", "submit_store"]

_MIN_OBJECT_OVERHEAD = manifest_bytes(1) + TAIL_BYTES


class Packer:
    """Packs stores into objects; ``run`` is the body of the packing thread."""

    def __init__(self, state: ObjectState, on_fault: OnFault) -> None:
        self._state = state
        self._on_fault = on_fault
        self._codec = state.codec

    def run(self) -> None:
        while True:
            ticket = self._next()
            if ticket is None:
                return
            self._pack(ticket)

    def _next(self) -> StoreTicket | None:
        """Return the next store; None when the engine is closed. Closes what has lingered
        meanwhile."""
        state = self._state
        linger_s = state.settings.linger_s
        with state.lock:
            state.packing = None
            while not state.closed:
                if state.stores:
                    entry = state.stores.popleft()
                    if entry is None:
                        for each in list(state.open_objects.values()):
                            self._close(each)
                        continue
                    state.packing = entry
                    return entry
                wait_s = None
                now = state.clock()
                for each in list(state.open_objects.values()):
                    left_s = each.opened_at + linger_s - now
                    if left_s <= 0:
                        self._close(each)
                    else:
                        wait_s = left_s if wait_s is None else min(wait_s, left_s)
                state.store_ready.wait(wait_s)
        return None

    def _pack(self, ticket: StoreTicket) -> None:
        run = ticket.job.run
        num_packed = 0
        reason = Reason.CANCELLED
        try:
            for position in ticket.positions:
                if ticket.dropped:
                    break
                self._pack_page(ticket, position, run.keys[position], run.pages[position])
                num_packed += 1
        except Exception:
            self._on_fault("packing pages")
            reason = Reason.IO_ERROR
        state = self._state
        with state.lock:
            state.packing = None
            state.refuse(ticket, ticket.positions[num_packed:], reason)
            self._relieve()

    def _pack_page(self, ticket: StoreTicket, position: int, key: bytes, page: Page) -> None:
        state = self._state
        length = sum(segment.nbytes for segment in page)
        try:
            parts = page if self._codec is None else (memoryview(self._codec.encode(page)),)
        except Exception:  # of a codec: the page cannot be stored, nothing else is lost
            with state.lock:
                state.refuse(ticket, [position], Reason.REJECTED)
            return
        stored = sum(part.nbytes for part in parts)
        checksum = page_checksum(ticket.namespace, key, parts)
        open_object = self._open_object(ticket, key, stored, length)
        if open_object is None:
            with state.lock:
                state.refuse(ticket, [position], Reason.CANCELLED)
            return
        offset = len(open_object.buffer)
        for part in parts:
            open_object.buffer += part
        with state.lock:
            if open_object.dropped:  # erased while it was copied: the copy goes with the object
                state.refuse(ticket, [position], Reason.CANCELLED)
                return
            if key in ticket.forgotten:  # while it was copied
                del open_object.buffer[offset:]
                state.refuse(ticket, [position], Reason.CANCELLED)
                return
            open_object.rows.append((key, offset, stored, length, checksum))
            open_object.entries.append((ticket, position, key))
            open_object.staged_bytes += length

    def _open_object(
        self, ticket: StoreTicket, key: bytes, stored: int, length: int
    ) -> OpenObject | None:
        """Return an open object with room for that page, later than it was last forgotten; None
        for a page or a ticket that was dropped."""
        state = self._state
        place = ticket.tenant, length if self._codec is not None else 0
        with state.lock:
            if ticket.dropped or key in ticket.forgotten:
                return None
            bound = state.forgotten.of(key)
            open_object = state.open_objects.get(place)
            if open_object is not None and (
                open_object.epoch != ticket.epoch
                or open_object.object_id.unix_ms <= bound
                or not open_object.has_room(stored, state.object_bytes_of(ticket.tenant))
            ):
                self._close(open_object)
                open_object = None
            if open_object is None:
                open_object = OpenObject(
                    state.next_id(ticket.tenant, bound + 1),
                    ticket.namespace,
                    ticket.epoch,
                    ticket.tenant,
                    state.clock(),
                    state.now_ms(),
                )
                state.open_objects[place] = open_object
            return open_object

    def _close(self, open_object: OpenObject) -> None:
        """Hand an object to the uploaders."""
        state = self._state
        for place, other in list(state.open_objects.items()):
            if other is open_object:
                del state.open_objects[place]
        if open_object.rows:
            state.uploads.append(open_object)
            state.upload_ready.notify()

    def _relieve(self) -> None:
        """Close the largest open objects while all of them hold back too many stores."""
        state = self._state
        limit = state.settings.staging_bytes // 2
        staged = sum(each.staged_bytes for each in state.open_objects.values())
        while staged > limit:
            largest = max(state.open_objects.values(), key=lambda each: each.staged_bytes)
            staged -= largest.staged_bytes
            self._close(largest)


def submit_store(state: ObjectState, run: Run, *, accepts: bool) -> Job:
    """Submit a store for ``ObjectEngine.submit_store``; ``accepts``: the bucket takes stores."""
    with state.lock:
        job = state.jobs.open(JobKind.STORE, run)
        if state.closed:
            state.jobs.finish(job)
            return job
        positions, num_bytes = _storable(state, job)
        if not positions or not accepts:
            state.jobs.finish_with(job, positions, Reason.REJECTED)
            return job
        ticket = StoreTicket(job, state.namespace, state.epoch, positions, len(positions))
        for position in positions:
            state.pending[run.keys[position]] = ticket
        state.staged_bytes += num_bytes
        state.stores.append(ticket)
        state.store_ready.notify()
    return job


def _storable(state: ObjectState, job: Job) -> tuple[list[int], int]:
    """Return the pages to store, and their bytes; the others get their reasons."""
    settings, run = state.settings, job.run
    share = settings.max_tenant_bytes if run.tenant != NO_TENANT else None
    positions: list[int] = []
    num_bytes = taken = 0
    room = _room(state)
    held = state.index.holds(run.keys)
    for position, (key, page) in enumerate(zip(run.keys, run.pages, strict=True)):
        length = sum(segment.nbytes for segment in page)
        if held[position] or key in state.pending:
            job.reasons[position] = Reason.DUPLICATE
        elif not state.barred.isdisjoint((key, run.tenant, None)):
            job.reasons[position] = Reason.CANCELLED
        elif length > settings.max_page_bytes:
            job.reasons[position] = Reason.NO_SPACE
        elif share is not None and taken + length + _MIN_OBJECT_OVERHEAD > share:
            job.reasons[position] = Reason.OVER_SHARE
        elif num_bytes + length > room:
            job.reasons[position] = Reason.REJECTED
            room = num_bytes  # a chain is of no use behind its first gap
        else:
            positions.append(position)
            num_bytes += length
            taken += length + _MIN_OBJECT_OVERHEAD
    return positions, num_bytes


def _room(state: ObjectState) -> float:
    """Return the bytes that staging memory and the budgets of the day have room for."""
    if state.request_budget.available < 1:
        return 0
    return min(state.settings.staging_bytes, state.write_budget.available) - state.staged_bytes

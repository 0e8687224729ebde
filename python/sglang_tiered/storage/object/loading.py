"""Pages out of objects: ranged reads over all connections, verified, copied where they belong. What
memory holds of a directory's files is read there straight away, and verified in place.

A load is cut into spans: pages of one object whose ranges lie so close together that reading the
gap is cheaper than another request. Each span is one request. Manifests are read by the same
threads, behind every load, and on half of them at most.
"""

from __future__ import annotations

import heapq
import itertools
import time
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.storage.base import JobKind, Reason
from sglang_tiered.storage.object.failures import Failure, RequestError
from sglang_tiered.storage.object.format import page_checksum
from sglang_tiered.storage.object.names import Layout
from sglang_tiered.storage.object.pending import LoadSpan, LoadTicket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.base import Job, Page, Run
    from sglang_tiered.storage.object.client import ObjectClient
    from sglang_tiered.storage.object.index import Place
    from sglang_tiered.storage.object.state import ObjectState, OnFault

__all__ = ["DeadlineClock", "Loader", "plan_spans", "submit_load"]

_MIN_SPAN_BYTES = 2 << 20
_MANY_DEADLINES = 64
_LARGE_COPY_BYTES = 64 << 10


def plan_spans(
    places: Sequence[Place], *, gap_bytes: int, max_span_bytes: int, num_connections: int
) -> list[tuple[int, int, list[Place]]]:
    """Start, end and places of every span. Pages of one object that are no further apart than
    ``gap_bytes`` share one, unless it would be longer than its share of all connections."""
    total = sum(place.stored for place in places)
    share = -(-total // num_connections)
    limit = min(max(share, _MIN_SPAN_BYTES), max_span_bytes)
    spans: list[tuple[int, int, list[Place]]] = []
    name = ""
    for place in sorted(places, key=lambda place: (place.held.name, place.offset)):
        end = place.offset + place.stored
        if spans and place.held.name == name:
            start, last, group = spans[-1]
            if place.offset - last <= gap_bytes and end - start <= limit:
                group.append(place)
                spans[-1] = start, max(end, last), group
                continue
        name = place.held.name
        spans.append((place.offset, end, [place]))
    return spans


class Loader:
    """Reads spans; ``run`` is the body of the loading threads."""

    def __init__(self, state: ObjectState, client: ObjectClient, on_fault: OnFault) -> None:
        self._state = state
        self._client = client
        self._on_fault = on_fault
        self._max_background = max(state.settings.num_connections // 2, 1)

    def run(self) -> None:
        state = self._state
        room: memoryview | None = None
        while True:
            background_read = None
            with state.lock:
                while True:
                    if state.loads:
                        span = state.loads.popleft()
                        break
                    if state.closed:
                        return
                    if state.background_reads and state.num_background_reads < self._max_background:
                        background_read = state.background_reads.popleft()
                        state.num_background_reads += 1
                        break
                    state.load_ready.wait()
            if background_read is None:
                room = self._serve(span, room)
                continue
            background_read()
            with state.lock:
                state.num_background_reads -= 1
                state.load_ready.notify()

    def _serve(self, span: LoadSpan, room: memoryview | None) -> memoryview | None:
        """Serve a span. ``room`` is what a directory is read into; returns it for the next span."""
        ticket = span.ticket
        if ticket.is_open:
            if self._state.closed:
                self._fail_span(span, Reason.CANCELLED)
            else:
                try:
                    if room is None and self._client.directory is not None:
                        room = memoryview(bytearray(self._client.max_span_bytes))
                    self._load(span, room)
                except BaseException:  # a panic of the library is no Exception
                    self._on_fault("loading")
                    self._fail_span(span, Reason.IO_ERROR)
        if ticket.settle_span():
            with self._state.lock:
                self._state.finish_load(ticket)
        return room

    def _fail_span(self, span: LoadSpan, reason: Reason) -> None:
        with span.ticket.touching() as allowed:
            if allowed:
                for place in span.places:
                    span.ticket.job.reasons[place.position] = reason

    def _load(self, span: LoadSpan, room: memoryview | None) -> None:
        ticket = span.ticket
        path = Layout(ticket.namespace).object(span.name)
        if room is not None and self._state.codec is None:
            num_loaded = self._load_cached(span, path, room)
            if num_loaded == len(span.places):
                return
            span.places = span.places[num_loaded:]
            span.start = span.places[0].offset
        try:
            data = self._client.get_range(path, span.start, span.end, until=ticket.until, into=room)
        except RequestError as error:
            self._failed(span, error.failure)
            return
        run = ticket.job.run
        for place in span.places:
            if not ticket.is_open:
                return
            key = run.keys[place.position]
            begin = place.offset - span.start
            stored = data[begin : begin + place.stored]
            is_whole = len(stored) == place.stored
            is_good = is_whole and (
                page_checksum(ticket.namespace, key, (stored,)) == place.checksum
            )
            if is_good:
                with ticket.touching() as allowed:
                    if not allowed:
                        return
                    is_good = self._deliver(stored, run.pages[place.position])
                    if is_good:
                        ticket.job.reasons[place.position] = Reason.OK
            if not is_good:
                self._corrupt(span, [place])

    def _load_cached(self, span: LoadSpan, path: str, room: memoryview) -> int:
        """Read the first pages of a span straight to where they belong, as many as can be had
        without waiting, and verify them there: the deadline waits for it. Returns how many."""
        ticket, run = span.ticket, span.ticket.job.run
        num_loaded = 0
        damaged = []
        with ticket.touching() as allowed:
            if not allowed:
                return 0
            places, buffers = _side_by_side(span, room)
            end = span.start + self._client.get_cached(path, span.start, buffers)
            for place in places:
                if place.offset + place.stored > end:
                    break
                num_loaded += 1
                key, page = run.keys[place.position], run.pages[place.position]
                if page_checksum(ticket.namespace, key, page) == place.checksum:
                    ticket.job.reasons[place.position] = Reason.OK
                else:
                    damaged.append(place)
        if damaged:
            self._corrupt(span, damaged)
        return num_loaded

    def _deliver(self, stored: memoryview, page: Page) -> bool:
        """Fill the page; false when the bytes do not decode to it."""
        codec = self._state.codec
        if codec is not None:
            try:
                codec.decode(stored, page)
            except Exception:  # whatever is wrong with verified bytes, they are not this page
                return False
            return True
        position = 0
        for segment in page:
            part = stored[position : position + segment.nbytes]
            position += segment.nbytes
            if segment.nbytes < _LARGE_COPY_BYTES:
                segment[:] = part
            else:  # numpy lets other threads run meanwhile
                np.copyto(np.frombuffer(segment, np.uint8), np.frombuffer(part, np.uint8))
        return True

    def _failed(self, span: LoadSpan, failure: Failure) -> None:
        state = self._state
        if failure is Failure.NOT_FOUND:
            with state.lock:
                state.skip(span.name)  # its manifest may still be there
                state.discovery.num_objects_vanished += span.name in state.index
                state.index.drop_objects([span.name])
            self._fail_span(span, Reason.MISS)
        elif failure is Failure.BAD_RANGE:
            self._corrupt(span, span.places)
        else:
            self._fail_span(span, Reason.IO_ERROR)

    def _corrupt(self, span: LoadSpan, places: Sequence[Place]) -> None:
        """Forget pages, then say so."""
        ticket, state = span.ticket, self._state
        with state.lock:
            if ticket.namespace == state.namespace:
                for place in places:
                    state.index.drop_page(ticket.job.run.keys[place.position], place)
        with ticket.touching() as allowed:
            if allowed:
                for place in places:
                    ticket.job.reasons[place.position] = Reason.CORRUPT


def _side_by_side(span: LoadSpan, room: memoryview) -> tuple[list[Place], list[memoryview]]:
    """Return the first places of a span, up to where two overlap, and their pages' buffers in the
    order of their bytes; what lies between two pages goes to ``room``."""
    places, buffers = [], []
    at = span.start
    for place in span.places:
        if place.offset < at:
            break
        if place.offset > at:
            buffers.append(room[: place.offset - at])
        buffers += span.ticket.job.run.pages[place.position]
        places.append(place)
        at = place.offset + place.stored
    return places, buffers


class DeadlineClock:
    """Finishes loads at their deadlines, whatever their requests do, on the thread of ``run``."""

    def __init__(self, state: ObjectState) -> None:
        self._state = state
        self._numbers = itertools.count()
        self._tickets: list[tuple[float, int, LoadTicket]] = []  # heap

    def add(self, ticket: LoadTicket) -> None:
        """Watch a load. The caller holds the state's lock."""
        if ticket.deadline is not None:
            if len(self._tickets) >= _MANY_DEADLINES:  # let go of the buffers of those long done
                self._tickets = [entry for entry in self._tickets if entry[2].is_open]
                heapq.heapify(self._tickets)
            heapq.heappush(self._tickets, (ticket.deadline, next(self._numbers), ticket))
            self._state.deadline_ready.notify()

    def run(self) -> None:
        state = self._state
        while True:
            with state.lock:
                while not (due := self._take_due()):
                    if state.closed:
                        return
                    wait_s = self._tickets[0][0] - state.clock() if self._tickets else None
                    state.deadline_ready.wait(wait_s)
            for ticket in due:
                if ticket.expire():
                    with state.lock:
                        state.finish_load(ticket)

    def _take_due(self) -> list[LoadTicket]:
        now = self._state.clock()
        due = []
        while self._tickets and (self._tickets[0][0] <= now or not self._tickets[0][2].is_open):
            due.append(heapq.heappop(self._tickets)[2])
        return due


def submit_load(
    state: ObjectState,
    run: Run,
    *,
    deadlines: DeadlineClock,
    deadline_s: float | None,
    client: ObjectClient,
    answers: bool,
) -> Job:
    """Submit a load for ``ObjectEngine.submit_load``; ``answers`` says whether the bucket does."""
    with state.lock:
        job = state.jobs.open(JobKind.LOAD, run)
        if state.closed:
            state.jobs.finish(job)
            return job
        job.reasons = [Reason.MISS] * run.num_pages
        places = _fitting(run, state.index.find(run.keys)) if answers else []
        for place in places:
            job.reasons[place.position] = Reason.IO_ERROR  # until it is served
        if not places or (deadline_s is not None and deadline_s <= 0):
            state.jobs.finish(job)
            return job
        spans = plan_spans(
            places,
            gap_bytes=client.gap_bytes,
            max_span_bytes=client.max_span_bytes,
            num_connections=state.settings.num_connections,
        )
        until = deadline = None
        if deadline_s is not None:
            until, deadline = time.monotonic() + deadline_s, state.clock() + deadline_s
        ticket = LoadTicket(job, state.namespace, len(spans), until, deadline)
        state.load_tickets[ticket] = None
        for start, end, group in spans:
            state.loads.append(LoadSpan(ticket, group[0].held.name, start, end, group))
        state.load_ready.notify(len(spans))
        deadlines.add(ticket)
    return job


def _fitting(run: Run, places: list[Place]) -> list[Place]:
    """Keep the pages that are as long as their buffers; the others are misses."""
    return [
        place
        for place in places
        if sum(segment.nbytes for segment in run.pages[place.position]) == place.length
    ]

"""Pages out of a bucket: one request each over all connections, verified, copied where they belong.
What memory holds of a directory's files is read there straight away, and verified in place."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.storage.base import JobKind, Reason
from sglang_tiered.storage.bucket.failures import Failure, RequestError
from sglang_tiered.storage.bucket.tickets import LoadTicket, PageLoad

if TYPE_CHECKING:
    from sglang_tiered.storage.base import Job, Page, Run
    from sglang_tiered.storage.bucket.requests import Requests
    from sglang_tiered.storage.bucket.state import BucketState, OnFault

__all__ = ["DeadlineClock", "Loader", "submit_load"]

_MANY_DEADLINES = 64
_LARGE_COPY_BYTES = 64 << 10


class Loader:
    """Reads pages; ``run`` is the body of the loading threads."""

    def __init__(self, state: BucketState, requests: Requests, on_fault: OnFault) -> None:
        self._state = state
        self._requests = requests
        self._on_fault = on_fault

    def run(self) -> None:
        state = self._state
        room = memoryview(bytearray(0))  # what a directory is read into
        while True:
            with state.lock:
                while not state.loads and not state.closed:
                    state.load_ready.wait()
                if not state.loads:
                    return
                load = state.loads.popleft()
            ticket = load.ticket
            if ticket.is_open and state.closed:
                load.end(Reason.CANCELLED)
            elif ticket.is_open:
                try:
                    if self._requests.directory is not None and len(room) < load.stored:
                        room = memoryview(bytearray(load.stored))
                    self._load(load, room if room else None)
                except BaseException:  # a panic of the library is no Exception
                    self._on_fault("loading")
                    load.end(Reason.IO_ERROR)
            if ticket.settle_page():
                with state.lock:
                    state.finish_load(ticket)

    def _load(self, load: PageLoad, room: memoryview | None) -> None:
        path = load.name.path(load.ticket.layout)
        if room is not None and self._state.codec is None and self._load_cached(load, path):
            return
        try:
            stored = self._requests.get(path, load.stored, into=room)
        except RequestError as error:
            self._failed(load, path, error.failure)
            return
        if len(stored) == load.stored and load.matches((stored,)):
            with load.ticket.touching() as allowed:
                if not allowed:
                    return
                if self._deliver(stored, load.page):
                    load.ticket.job.reasons[load.position] = Reason.OK
                    return
        self._corrupt(load, path)

    def _load_cached(self, load: PageLoad, path: str) -> bool:
        """Read a page straight to where it belongs if it can be had without waiting, and verify it
        there: the deadline waits for it."""
        with load.ticket.touching() as allowed:
            if not allowed:
                return True
            if self._requests.get_cached(path, load.page) < load.stored:
                return False
            if load.matches(load.page):
                load.ticket.job.reasons[load.position] = Reason.OK
                return True
        self._corrupt(load, path)
        return True

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

    def _failed(self, load: PageLoad, path: str, failure: Failure) -> None:
        if failure is Failure.NOT_FOUND:
            state = self._state
            with state.lock:
                state.num_pages_vanished += self._forget(load)
            load.end(Reason.MISS)
        elif failure is Failure.BAD_RANGE:
            self._corrupt(load, path)
        else:
            load.end(Reason.IO_ERROR)

    def _corrupt(self, load: PageLoad, path: str) -> None:
        """Forget a page, then say so."""
        with self._state.lock:
            self._state.skip(path)
            self._forget(load)
        load.end(Reason.CORRUPT)

    def _forget(self, load: PageLoad) -> bool:
        """Forget a page, unless there is another of its key. Needs the state's lock."""
        state = self._state
        is_current = load.ticket.layout == state.layout and state.index.is_at(load.name)
        return is_current and state.index.drop(load.name.key)


class DeadlineClock:
    """Finishes loads at their deadlines, whatever their requests do, on the thread of ``run``."""

    def __init__(self, state: BucketState) -> None:
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
    state: BucketState,
    run: Run,
    *,
    deadlines: DeadlineClock,
    deadline_s: float | None,
    answers: bool,
) -> Job:
    """Submit a load for ``BucketEngine.submit_load``; ``answers`` says whether the bucket does."""
    with state.lock:
        job = state.jobs.open(JobKind.LOAD, run)
        if state.closed:
            state.jobs.finish(job)
            return job
        job.reasons = [Reason.MISS] * run.num_pages
        deadline = None if deadline_s is None else state.clock() + deadline_s
        found = []
        for position, (key, page) in enumerate(zip(run.keys, run.pages, strict=True)):
            held = state.index.get(key) if answers else None
            if held is None or held.length != sum(segment.nbytes for segment in page):
                continue
            job.reasons[position] = Reason.IO_ERROR  # until it is served
            found.append((position, state.index.name_of(key, held), held.stored))
        if not found or (deadline_s is not None and deadline_s <= 0):
            state.jobs.finish(job)
            return job
        ticket = LoadTicket(job, state.layout, len(found), deadline)
        state.load_tickets[ticket] = None
        state.loads.extend(PageLoad(ticket, *each) for each in found)
        state.load_ready.notify(len(found))
        deadlines.add(ticket)
    return job

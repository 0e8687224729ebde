"""Pages out of a bucket and into it: each is an object, got or put by one request.

Loads go over all connections; pages are verified, then copied where they belong. What memory holds
of a directory's files is read there straight away, and verified in place. Nothing touches a load's
buffers once it is over: at its last page, or at its deadline. A store is a hit once it is put.
"""

from __future__ import annotations

import math
import os
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.codecs.encoded import copied, spread
from sglang_tiered.storage.base import NO_TENANT, JobKind, Reason, Tier
from sglang_tiered.storage.bucket.names import Layout, PageName, is_page, page_checksum
from sglang_tiered.storage.bucket.requests import BucketError, Failure
from sglang_tiered.storage.bucket.state import BucketLoad, PageLoad, Upload

if TYPE_CHECKING:
    from sglang_tiered.storage.base import Job, Page, Run
    from sglang_tiered.storage.bucket.requests import Requests
    from sglang_tiered.storage.bucket.state import BucketState


CLOCK_S = 600.0
_TAKEN_BYTES = 1 << 20
"""Of small pages that a thread reads at a time, as each look for work is a turn with the lock."""


class Transfers:
    """Takes jobs on any thread, and carries them out on those of its ``run`` methods. Loads come
    first, and stores leave half of the connections to them."""

    def __init__(self, state: BucketState, requests: Requests) -> None:
        self._state = state
        self._requests = requests
        self._breaker = requests.breaker
        self._clock_lock = threading.Lock()
        self._look_at = state.clock()  # at the store's clock

    # ---- Loads ----

    def submit_load(self, run: Run, deadline_s: float | None) -> Job:
        state, answers = self._state, not self._breaker.is_open
        reads_in_place = self._requests.reads_in_place
        with state.lock:
            job = state.jobs.open(JobKind.LOAD, run)
            if state.closed:
                state.jobs.finish(job)
                return job
            job.reasons = [Reason.MISS] * run.num_pages
            found = []
            for position, (key, page) in enumerate(zip(run.keys, run.pages, strict=True)):
                held = state.index.get(key) if answers else None
                asked = sum(segment.nbytes for segment in page)
                if held is None or held.length > asked:
                    continue
                is_encoded = held.length < asked
                if is_encoded and state.encoding is None:
                    continue
                job.reasons[position] = Reason.IO_ERROR  # until it is served
                found.append((position, held, reads_in_place and not is_encoded))
            if not found or (deadline_s is not None and deadline_s <= 0):
                state.jobs.finish(job)
                return job
            deadline = math.inf if deadline_s is None else state.clock() + deadline_s
            load = BucketLoad(job, state.layout, len(found), deadline)
            state.open_loads[load] = None
            state.loads.extend(PageLoad(load, *each) for each in found)
            state.transfer_ready.notify(len(found))
            if deadline_s is not None:
                state.deadline_ready.notify()
        return job

    def run(self) -> None:
        """Read and put pages: the body of each thread."""
        state = self._state
        room = memoryview(b"")  # what a directory is read into
        done: list[tuple[PageLoad, Reason | None]] = []
        while True:
            with state.lock:
                for page, reason in done:
                    self._settle(page, reason)
                pages, upload = self._take()
            done = []
            if upload is not None:
                self._run_upload(upload)
            elif not pages:
                return
            for page in pages:
                reason = Reason.CANCELLED if state.closed else Reason.IO_ERROR
                try:
                    if page.load.is_open and not state.closed and page.in_place:
                        reason = self._read_in_place(page)
                    elif page.load.is_open and not state.closed:
                        num_bytes = page.name.length
                        if self._requests.directory is not None and len(room) < num_bytes:
                            room = memoryview(bytearray(num_bytes))
                        reason = self._load(page, room if room else None)
                except BaseException:  # a panic of the library is no Exception
                    self._breaker.fault("loading")
                done.append((page, reason))

    def _take(self) -> tuple[list[PageLoad], Upload | None]:
        """Wait for pages to load, or one to upload; neither when the engine is closed. Needs the
        state's lock."""
        state, num_threads = self._state, self._state.settings.num_connections
        max_uploads = -(-num_threads // 2)
        while not state.loads:
            if state.uploads and len(state.uploading) < max_uploads:
                upload = next(iter(state.uploads))
                del state.uploads[upload]
                state.uploading[upload] = None
                return [], upload
            if state.closed:
                return [], None
            state.transfer_ready.wait()
        page = state.loads.popleft()
        pages, num_left = [page], len(state.loads) // num_threads
        room = _TAKEN_BYTES - page.name.length
        while page.in_place and num_left and state.loads[0].in_place and room > 0:
            pages.append(state.loads.popleft())
            num_left, room = num_left - 1, room - pages[-1].name.length
        return pages, None

    def _settle(self, page: PageLoad, reason: Reason | None) -> None:
        """Say what became of a page; with None it is read by way of other memory. Needs the state's
        lock."""
        state, load = self._state, page.load
        if reason is None:
            state.loads.appendleft(page._replace(in_place=False))
            state.transfer_ready.notify()
            return
        load.num_left -= 1
        if load.is_open:
            load.job.reasons[page.position] = reason
            if not load.num_left:
                state.finish_load(load)

    def _read_in_place(self, page: PageLoad) -> Reason | None:
        """Fill a page with what memory holds of a file; None where that is not all."""
        path = page.path
        fd = self._requests.open_cached(path)
        if fd is None:
            return None
        try:
            if not self._touch(page.load):
                return Reason.IO_ERROR
            try:
                if self._requests.read_cached(fd, page.page) < page.name.length:
                    return None
                is_right = is_page(path, page.name.checksum, page.page)
            finally:
                self._end_touch(page.load)
        finally:
            os.close(fd)
        return Reason.OK if is_right else self._corrupt(page)

    def _touch(self, load: BucketLoad) -> bool:
        """Begin to touch a load's buffers, for no longer than a copy takes; false where it is
        over."""
        with self._state.lock:
            load.num_touching += load.is_open
            return load.is_open

    def _end_touch(self, load: BucketLoad) -> None:
        """The last one finishes a load that is over."""
        with self._state.lock:
            load.num_touching -= 1
            if not load.is_open:
                self._state.expire(load)

    def _load(self, page: PageLoad, room: memoryview | None) -> Reason:
        """Return what became of a page."""
        path, began = page.path, time.perf_counter()
        try:
            stored = self._requests.get(path, page.name.length, into=room)
        except BucketError as error:
            if error.failure is Failure.NOT_FOUND:
                with self._state.lock:
                    self._state.forget(page.name, page.load.layout)
                return Reason.MISS
            is_short = error.failure is Failure.BAD_RANGE
            return self._corrupt(page) if is_short else Reason.IO_ERROR
        encoding = self._state.encoding
        if encoding is not None:
            asked_bytes = sum(segment.nbytes for segment in page.page)
            took_s = time.perf_counter() - began
            encoding.note_read(Tier.OBJECT, took_s, len(stored), asked_bytes)
        if len(stored) < page.name.length or not is_page(path, page.name.checksum, (stored,)):
            return self._corrupt(page)
        if not self._touch(page.load):
            return Reason.IO_ERROR
        try:
            reason = self._deliver(stored, page.page)
        finally:
            self._end_touch(page.load)
        return self._corrupt(page) if reason is Reason.CORRUPT else reason

    def _deliver(self, stored: memoryview, page: Page) -> Reason:
        """Fill the page."""
        encoding = self._state.encoding
        if encoding is not None and len(stored) < sum(segment.nbytes for segment in page):
            return encoding.decode(stored, page)
        spread([np.frombuffer(stored, np.uint8)], page)
        return Reason.OK

    def _corrupt(self, page: PageLoad) -> Reason:
        with self._state.lock:
            self._state.skip(page.path)
            self._state.forget(page.name, page.load.layout)
        return Reason.CORRUPT

    def run_deadlines(self) -> None:
        """Finish loads at their deadlines, whatever their requests do."""
        state = self._state
        with state.lock:
            while not state.closed:
                loads = [load for load in state.open_loads if load.is_open]
                first = min(loads, key=lambda load: load.deadline, default=None)
                wait_s = math.inf if first is None else first.deadline - state.clock()
                if first is not None and wait_s <= 0:
                    state.expire(first)
                else:
                    state.deadline_ready.wait(None if wait_s == math.inf else wait_s)

    # ---- Stores ----

    def submit_store(self, run: Run) -> Job:
        state, accepts = self._state, self._breaker.accepts_stores()
        with state.lock:
            job = state.jobs.open(JobKind.STORE, run)
            if state.closed:
                state.jobs.finish(job)
                return job
            uploads = self._storable(job)
            if not uploads or not accepts:
                positions = [upload.position for upload in uploads]
                state.jobs.finish_with(job, positions, Reason.REJECTED)
                return job
            for upload in uploads:
                state.add(upload)
        return job

    def _storable(self, job: Job) -> list[Upload]:
        """Return the pages to store; the others get their reasons."""
        state, settings, run = self._state, self._state.settings, job.run
        share = settings.max_tenant_bytes if run.tenant != NO_TENANT else None
        uploads: list[Upload] = []
        num_bytes = 0
        room = min(settings.staging_bytes, state.write_budget.available) - state.staged_bytes
        num_requests = state.request_budget.available - len(state.pending)
        held = state.index.holds(run.keys)
        for position, (key, page) in enumerate(zip(run.keys, run.pages, strict=True)):
            length = state.page_bytes = sum(segment.nbytes for segment in page)
            if held[position] or key in state.pending:
                job.reasons[position] = Reason.DUPLICATE
            elif length > min(settings.max_page_bytes, state.write_budget.burst):
                job.reasons[position] = Reason.NO_SPACE
            elif share is not None and num_bytes + length > share:
                job.reasons[position] = Reason.OVER_SHARE
            elif state.is_erased((key,), run.tenant):
                job.reasons[position] = Reason.CANCELLED
            elif num_bytes + length > room or len(uploads) + 1 > num_requests:
                job.reasons[position] = Reason.REJECTED
                room = num_bytes  # a chain is of no use behind its first gap
            else:
                name = PageName(key, run.tenant, length, state.seen, 0)
                uploads.append(Upload(job, position, state.namespace, name))
                num_bytes += length
        return uploads

    def _run_upload(self, upload: Upload) -> None:
        state, reason = self._state, Reason.IO_ERROR
        try:
            reason = self._upload(upload)
        except BucketError:
            self._breaker.stores.fail()
        except BaseException:  # a panic of the library is no Exception
            self._breaker.fault("uploading")
        with state.lock:
            if upload in state.uploading:  # else it was closed meanwhile
                state.settle(upload, Reason.CANCELLED if upload.dropped else reason)

    def _upload(self, upload: Upload) -> Reason:
        """Upload a page. Raises ``BucketError``."""
        state, job = self._state, upload.job
        if upload.dropped or job.cancelled or state.closed:
            return Reason.CANCELLED
        if not self._breaker.accepts_stores():
            return Reason.REJECTED
        # A copy: a request that timed out may still read it.
        data = copied(job.run.pages[upload.position]).data
        upload.is_copied = True
        layout = Layout(upload.namespace)
        self._look_at_the_clock(layout)
        name = upload.name._replace(unix_s=int(state.store_time()))
        name = name._replace(checksum=page_checksum(name.stem(layout), (data,)))
        path = name.path(layout)
        try:
            self._requests.put(path, data)
        finally:
            with state.lock:
                state.write_budget.spend(len(data))
                state.request_budget.spend(1)
        self._breaker.stores.succeed()
        with state.lock:
            state.bytes_written += len(data)
            if not upload.dropped:
                state.num_pages_stored += 1
                state.bytes_stored += name.length
                state.skipped.pop(path, None)
                if upload.namespace == state.namespace:
                    state.index.put(name)
                return Reason.OK
        self._requests.delete([path])  # whoever erased it may have looked before it was there
        return Reason.CANCELLED

    def _look_at_the_clock(self, layout: Layout) -> None:
        """Learn the store's time before the first page, and again now and then, as clocks are set:
        pages are named by it, and others list from a time on. Raises ``BucketError``."""
        state = self._state
        if state.clock() < self._look_at:
            return
        with self._clock_lock:
            if state.clock() < self._look_at:
                return
            self._requests.put(layout.clock, b"clock")
            modified = self._requests.modified(layout.clock)
            if modified is not None:
                state.skew_s = modified - state.wall_clock()
            self._look_at = state.clock() + CLOCK_S

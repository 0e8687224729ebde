"""Pages into a bucket: each is an object, put by one request, and only then a hit."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import NO_TENANT, JobKind, Reason
from sglang_tiered.storage.bucket.failures import RequestError
from sglang_tiered.storage.bucket.names import Layout, PageName, page_checksum
from sglang_tiered.storage.bucket.state import Upload

if TYPE_CHECKING:
    from sglang_tiered.storage.base import Job, Run
    from sglang_tiered.storage.bucket.limits import Breaker
    from sglang_tiered.storage.bucket.requests import Requests
    from sglang_tiered.storage.bucket.state import BucketState, OnFault

__all__ = ["Uploader", "submit_store"]

CLOCK_S = 600.0


def submit_store(state: BucketState, run: Run, *, accepts: bool) -> Job:
    """Submit a store for ``BucketEngine.submit_store``; ``accepts``: the bucket takes stores."""
    with state.lock:
        job = state.jobs.open(JobKind.STORE, run)
        if state.closed:
            state.jobs.finish(job)
            return job
        uploads = _storable(state, job)
        if not uploads or not accepts:
            positions = [upload.position for upload in uploads]
            state.jobs.finish_with(job, positions, Reason.REJECTED)
            return job
        for upload in uploads:
            state.add(upload)
    return job


def _storable(state: BucketState, job: Job) -> list[Upload]:
    """Return the pages to store; the others get their reasons."""
    settings, run = state.settings, job.run
    share = settings.max_tenant_bytes if run.tenant != NO_TENANT else None
    uploads: list[Upload] = []
    num_bytes = 0
    room = min(settings.staging_bytes, state.write_budget.available) - state.staged_bytes
    num_requests = state.request_budget.available - len(state.pending)
    held = state.index.holds(run.keys)
    for position, (key, page) in enumerate(zip(run.keys, run.pages, strict=True)):
        length = sum(segment.nbytes for segment in page)
        if held[position] or key in state.pending:
            job.reasons[position] = Reason.DUPLICATE
        elif length > settings.max_page_bytes:
            job.reasons[position] = Reason.NO_SPACE
        elif share is not None and num_bytes + length > share:
            job.reasons[position] = Reason.OVER_SHARE
        elif num_bytes + length > room or len(uploads) + 1 > num_requests:
            job.reasons[position] = Reason.REJECTED
            room = num_bytes  # a chain is of no use behind its first gap
        else:
            order = state.order_before(key, run.tenant)
            uploads.append(
                Upload(job, position, state.namespace, state.epoch, state.seen, length, order)
            )
            num_bytes += length
    return uploads


class Uploader:
    """Puts pages; ``run`` is the body of the uploading threads."""

    def __init__(
        self, state: BucketState, requests: Requests, breaker: Breaker, on_fault: OnFault
    ) -> None:
        self._state = state
        self._requests = requests
        self._breaker = breaker
        self._on_fault = on_fault
        self._clock_lock = threading.Lock()
        self._look_at = state.clock()  # at the store's clock

    def run(self) -> None:
        state = self._state
        while True:
            with state.lock:
                while not state.uploads and not state.closed:
                    state.upload_ready.wait()
                if not state.uploads:
                    return
                upload = state.uploads.popleft()
                state.uploading[upload] = None
            reason = Reason.IO_ERROR
            try:
                reason = self._upload(upload)
            except RequestError:
                self._breaker.store_failed()
            except BaseException:  # a panic of the library is no Exception
                self._on_fault("uploading")
            with state.lock:
                del state.uploading[upload]
                state.settle(upload, Reason.CANCELLED if upload.dropped else reason)
                state.upload_done.notify_all()

    def _upload(self, upload: Upload) -> Reason:
        """Upload a page. Raises ``RequestError``."""
        state, job = self._state, upload.job
        if upload.dropped or job.cancelled:
            return Reason.CANCELLED
        if not self._breaker.accepts_stores():
            return Reason.REJECTED
        page, codec = job.run.pages[upload.position], state.codec
        try:
            # A copy: a request that timed out may still read it.
            data = b"".join(page) if codec is None else bytes(codec.encode(page))
        except Exception:  # of a codec: the page cannot be stored, nothing else is lost
            return Reason.REJECTED
        upload.is_copied = True
        layout = Layout(upload.namespace)
        self._look_at_the_clock(layout)
        now = int(state.wall_clock() + state.skew_s)
        name = PageName(upload.key, job.run.tenant, upload.num_bytes, upload.stamp, now)
        name = name._replace(checksum=page_checksum(name.stem(layout), (data,)))
        path = name.path(layout)
        try:
            self._requests.put(path, data)
        finally:
            with state.lock:
                state.write_budget.spend(len(data))
                state.request_budget.spend(1)
        self._breaker.store_succeeded()
        with state.lock:
            state.bytes_written += len(data)
            if upload.dropped:
                state.doom(path)
                return Reason.CANCELLED
            state.num_pages_stored += 1
            state.bytes_stored += upload.num_bytes
            state.skipped.pop(path, None)
            if upload.epoch == state.epoch:
                state.index.put(name, len(data))
        return Reason.OK

    def _look_at_the_clock(self, layout: Layout) -> None:
        """Learn the store's time before the first page, and again now and then, as clocks are set:
        pages are named by it, and others list from a time on. Raises ``RequestError``."""
        state = self._state
        with self._clock_lock:
            if state.clock() < self._look_at:
                return
            self._requests.put(layout.clock, b"clock")
            modified = self._requests.modified(layout.clock)
            if modified is not None:
                state.skew_s = modified - state.wall_clock()
            self._look_at = state.clock() + CLOCK_S

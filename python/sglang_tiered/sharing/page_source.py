"""``PageSource``: the pages that a page server gives away, read out of a store of another owner.

A store's own readers fill buffers of this module, verified like every load: only pages that a load
here would get are given. A region store says with which checksum a page was stored, which binds it
to namespace and key from the store that wrote it to the server that uses it. For other tiers it is
computed of what was read. Ranks of one server ask for the same pages at about the same time. One
read serves all who ask before it is sent, and a load of the process itself all who ask meanwhile.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from sglang_tiered.checksummed import page_checksum
from sglang_tiered.sharing.pages.server import Place
from sglang_tiered.storage.base import Health, Job, JobKind, Reason, Run
from sglang_tiered.storage.region.device import aligned_buffer, copy_page
from sglang_tiered.storage.region.format import padded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.region.engine import RegionEngine
    from sglang_tiered.storage.region.view import StoredPage

__all__ = ["BufferPool", "PageSource"]

_SMALLEST_BYTES = 64 << 10
_OUTAGE = {Reason.IO_ERROR, Reason.CANCELLED}  # of pages that were there, and may be again


class BufferPool:
    """Keeps aligned buffers for reuse: a fresh one costs a page fault per 4 KiB. Sizes are rounded
    up by a quarter at most, so that most requests fit a free one; ``max_free_bytes`` may be idle.
    """

    def __init__(self, max_free_bytes: int) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self._free_bytes = 0
        self._max_free_bytes = max_free_bytes

    def borrow_buffer(self, nbytes: int) -> memoryview:
        step = max(_SMALLEST_BYTES, (1 << (nbytes - 1).bit_length()) // 8)
        size = -(-nbytes // step) * step
        with self._lock:
            free = self._free.get(size)
            if free:
                self._free_bytes -= size
                return free.pop()
        return aligned_buffer(size)

    def return_buffer(self, buffer: memoryview) -> None:
        with self._lock:
            if self._free_bytes + buffer.nbytes <= self._max_free_bytes:
                self._free.setdefault(buffer.nbytes, []).append(buffer)
                self._free_bytes += buffer.nbytes


class _SharedRead:
    """Pages that are being read, for all who ask for them until they were sent."""

    def __init__(
        self, namespace: Callable[[], bytes], num_pages: int, release: Callable[[], None]
    ) -> None:
        self._namespace_now, self._namespace = namespace, namespace()
        self.release = release
        self._lock = threading.Lock()
        self._places: list[Place | None] | None = None
        # Of the pages that are read: offset, length, checksum where the store knows it.
        self.spots: list[tuple[int, int, int | None] | None] = [None] * num_pages
        self.results: list[tuple[bytes, Reason]] = []  # of those
        self.is_outage = False
        self.data = memoryview(b"")
        self.waiting: list[Callable[[_SharedRead], None]] | None = []
        self.num_readers = 0

    @property
    def places(self) -> Sequence[Place | None]:
        """Where the pages are; made once, by who sends first and not under the store's lock."""
        with self._lock:
            if self._places is None:
                read = iter(self.results)
                self._places = [spot and self._place(spot, *next(read)) for spot in self.spots]
            return self._places

    def _place(self, spot: tuple[int, int, int | None], key: bytes, reason: Reason) -> Place | None:
        if reason is not Reason.OK:
            return None
        offset, length, checksum = spot
        if checksum is None:
            if self._namespace_now() != self._namespace:
                return None  # it may have been read under another
            page = self.data[offset : offset + length]
            checksum = page_checksum(self._namespace, key, (page,))
        return Place(offset, length, checksum)


@dataclass(eq=False, slots=True)
class _Own:
    """A load of the process itself, which others may join until its pages are there."""

    job: Job
    moment: object  # of what pages are, and of erasures
    joined: list[_SharedRead] = field(default_factory=list)


class PageSource:
    """A ``PageReader`` over ``submit``. It keeps ``max_free_bytes`` of memory for the next reads;
    the server bounds the memory in use.

    ``find`` returns what is stored of each key; without it all pages are asked for, and their
    checksums made with ``namespace``, as those of pages that were stored encoded. ``generation``
    changes with every erasure: who asks after one is given nothing that was read before. Without it
    every request is a read of its own.
    """

    def __init__(
        self,
        submit: Callable[[Run], Job],
        *,
        max_free_bytes: int,
        find: Callable[[Sequence[bytes]], Sequence[StoredPage | None]] | None = None,
        generation: Callable[[], int] | None = None,
        num_queued: Callable[[], int] = lambda: 0,
        namespace: Callable[[], bytes] | None = None,
        is_well: Callable[[], bool] = lambda: True,
    ) -> None:
        self._submit = submit
        self._find = find
        self._generation = generation
        self._num_queued = num_queued
        self._is_well = is_well
        self._memory = BufferPool(max_free_bytes)
        self._lock = threading.Lock()
        self._reads: dict[object, _SharedRead] = {}
        self._owns: dict[bytes, tuple[_Own, int]] = {}  # by key, with its position
        self._later: Callable[..., None] | None = None
        self.namespace = b""
        self._namespace_now = namespace or (lambda: self.namespace)

    @classmethod
    def of_region(cls, region: RegionEngine, *, max_free_bytes: int) -> PageSource:
        """Read a region store, for others: what is stored, with the checksums that it has."""
        return cls(
            partial(region.submit_load, for_request=False),
            max_free_bytes=max_free_bytes,
            find=region.view.find,
            num_queued=lambda: region.view.num_queued_reads,
            namespace=lambda: region.namespace,
            is_well=lambda: region.health is Health.RUNNING,
        )

    @property
    def is_pressed(self) -> bool:
        return self._num_queued() > 0

    def read(
        self, keys: Sequence[bytes], lengths: Sequence[int], done: Callable[[_SharedRead], None]
    ) -> None:
        """See ``PageReader.read``. ``done`` may be called under the store's lock."""
        name: object = object()
        if self._generation is not None:
            name = (self.namespace, self._generation(), tuple(keys), tuple(lengths))
        with self._lock:
            read = self._reads.get(name)
            is_first = read is None
            if read is None:
                read = _SharedRead(self._namespace_now, len(keys), partial(self._released, name))
                self._reads[name] = read
            read.num_readers += 1
            is_over = read.waiting is None
            if read.waiting is not None:
                read.waiting.append(done)
        if is_over:
            done(read)
        if is_first:
            try:
                if self._joins(read, keys, lengths):
                    return
                job = self._begin(read, keys, lengths)
            except BaseException:
                read.spots = [None] * len(keys)
                self._ended(read)  # who joined it waits for it
                raise
            if job is not None:
                job.call_at_end(partial(self._ended, read))
            else:
                self._ended(read)

    def _begin(
        self, read: _SharedRead, keys: Sequence[bytes], lengths: Sequence[int]
    ) -> Job | None:
        stored = [None] * len(keys) if self._find is None else self._find(keys)
        at = 0
        wanted: list[tuple[bytes, int, int]] = []
        for position, (key, page, length) in enumerate(zip(keys, stored, lengths, strict=True)):
            # One of fewer bytes may be encoded: the store decodes it, or finds that it is not.
            if self._find is None or (page is not None and page.length <= length):
                checksum = page.checksum if page is not None and page.length == length else None
                read.spots[position] = (at, length, checksum)
                wanted.append((key, at, length))
                at += padded(length)
        if not wanted:
            return None
        read.data = data = self._memory.borrow_buffer(at)
        pages = tuple((data[at : at + length],) for _, at, length in wanted)
        is_well = self._is_well()  # it may recover before the next look
        job = self._submit(Run(tuple(key for key, *_ in wanted), pages))
        read.is_outage = not (is_well and self._is_well())
        return job

    def _ended(self, read: _SharedRead, job: Job | None = None) -> None:
        """Hand pages to all who wait. May run under a store's lock."""
        with self._lock:
            if job is not None:
                read.results = list(zip(job.run.keys, job.reasons, strict=True))
                if self._find is not None and Reason.OK not in job.reasons:
                    read.is_outage |= not _OUTAGE.isdisjoint(job.reasons)
            waiting, read.waiting = read.waiting or [], None
        for done in waiting:
            done(read)

    # ---- Loads of the process itself ----

    def share_loads(self, later: Callable[..., None] | None) -> None:
        """Let others join ``load`` from now on, which ``later`` copies for, on a thread of its own;
        None: nobody."""
        with self._lock:
            self._later = later
            self._owns.clear()

    def load(self, run: Run, submit: Callable[[Run], Job]) -> Job:
        """Begin a load that the process wants itself. It ends once who joined it has the pages."""
        own = _Own(Job(JobKind.LOAD, run), self._moment())
        with self._lock:
            if self._later is not None:
                self._owns.update((key, (own, at)) for at, key in enumerate(run.keys))
        try:
            submit(run).call_at_end(partial(self._own_ended, own))
        except BaseException:
            self._own_ended(own, own.job)  # or who joined it would wait for ever
            raise
        return own.job

    def _moment(self) -> object:
        return self.namespace, None if self._generation is None else self._generation()

    def _joins(self, read: _SharedRead, keys: Sequence[bytes], lengths: Sequence[int]) -> bool:
        """Wait for a load of the process itself, if one brings all of the pages."""
        moment = self._moment()
        with self._lock:
            own, _ = self._owns.get(keys[0], (None, 0))
            if own is None or own.moment != moment:
                return False
            found = [self._owns.get(key, (None, 0)) for key in keys]
            pages = [own.job.run.pages[at] for each, at in found if each is own]
            if [sum(part.nbytes for part in page) for page in pages] != list(lengths):
                return False
            at = 0
            for position, length in enumerate(lengths):
                read.spots[position] = (at, length, None)
                at += padded(length)
            read.data = self._memory.borrow_buffer(at)
            read.results = [(key, Reason.MISS) for key in keys]
            own.joined.append(read)
            return True

    def _own_ended(self, own: _Own, job: Job) -> None:
        """May run under a store's lock."""
        own.job.reasons = job.reasons
        with self._lock:
            for key in job.run.keys:
                if self._owns.get(key, (None, 0))[0] is own:
                    del self._owns[key]
            if self._later is not None and own.joined:
                self._later(self._copy, own)
                return
        self._finish(own)

    def _copy(self, own: _Own) -> None:
        try:
            for read in own.joined:
                self._copy_to(read, own.job)
        finally:
            self._finish(own)

    def _copy_to(self, read: _SharedRead, job: Job) -> None:
        at = {key: position for position, key in enumerate(job.run.keys)}
        for position, ((key, _), spot) in enumerate(zip(read.results, read.spots, strict=True)):
            assert spot is not None
            read.results[position] = (key, job.reasons[at[key]])
            if job.reasons[at[key]] is Reason.OK:
                copy_page(job.run.pages[at[key]], read.data[spot[0] :])

    def _finish(self, own: _Own) -> None:
        own.job.finish()  # the pages may change from now on
        for read in own.joined:
            self._ended(read)

    def _released(self, name: object) -> None:
        with self._lock:
            read = self._reads[name]
            read.num_readers -= 1
            if read.num_readers:
                return
            del self._reads[name]
        if read.data.nbytes:
            self._memory.return_buffer(read.data)

"""``PageSource``: the pages that a page server gives away, read out of a store of another owner.

A store's own readers fill buffers of this module, verified like every load: only pages that a load
here would get are given. A region store says with which checksum a page was stored, which binds it
to namespace and key from the store that wrote it to the server that uses it; of other tiers it is
computed of what was read. Ranks of one server ask for the same pages at about the same time: one
read serves all who ask before it is sent.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

from sglang_tiered.checksummed import page_checksum
from sglang_tiered.sharing.pages.server import Place
from sglang_tiered.storage.base import Reason, Run
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import padded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.base import Job
    from sglang_tiered.storage.region.engine import RegionEngine

__all__ = ["BufferPool", "PageSource"]

_SMALLEST_BYTES = 64 << 10


class _Stored(Protocol):
    """What a store knows of a page."""

    @property
    def length(self) -> int: ...

    @property
    def checksum(self) -> int: ...


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


class _Read:
    """Pages that are being read, for all who ask for them until they were sent."""

    def __init__(self, namespace: bytes, num_pages: int, release: Callable[[], None]) -> None:
        self._namespace = namespace
        self.release = release
        self._lock = threading.Lock()
        self._places: list[Place | None] | None = None
        # Of the pages that are read: offset, length, checksum where the store knows it.
        self.spots: list[tuple[int, int, int | None] | None] = [None] * num_pages
        self.job: Job | None = None
        self.data = memoryview(b"")
        self.waiting: list[Callable[[_Read], None]] | None = []
        self.num_readers = 0

    @property
    def places(self) -> Sequence[Place | None]:
        """Where the pages are; made once, by who sends first and not under the store's lock."""
        with self._lock:
            if self._places is None:
                job = self.job
                read = iter(() if job is None else zip(job.run.keys, job.reasons, strict=True))
                self._places = [spot and self._place(spot, *next(read)) for spot in self.spots]
            return self._places

    def _place(self, spot: tuple[int, int, int | None], key: bytes, reason: Reason) -> Place | None:
        if reason is not Reason.OK:
            return None
        offset, length, checksum = spot
        if checksum is None:
            page = self.data[offset : offset + length]
            checksum = page_checksum(self._namespace, key, (page,))
        return Place(offset, length, checksum)


class PageSource:
    """A ``PageReader`` over ``submit``. It keeps ``max_free_bytes`` of memory for the next reads;
    the server bounds the memory in use.

    ``find`` returns what is stored of each key; without it all pages are asked for, and their
    checksums made with ``namespace``. ``generation`` changes with every erasure: who asks after one
    is given nothing that was read before. Without it every request is a read of its own.
    """

    def __init__(
        self,
        submit: Callable[[Run], Job],
        *,
        max_free_bytes: int,
        find: Callable[[Sequence[bytes]], Sequence[_Stored | None]] | None = None,
        generation: Callable[[], int] | None = None,
        num_queued: Callable[[], int] = lambda: 0,
    ) -> None:
        self._submit = submit
        self._find = find
        self._generation = generation
        self._num_queued = num_queued
        self._memory = BufferPool(max_free_bytes)
        self._lock = threading.Lock()
        self._reads: dict[object, _Read] = {}
        self.namespace = b""

    @classmethod
    def of_region(cls, region: RegionEngine, *, max_free_bytes: int) -> PageSource:
        """Read a region store, for others: what is stored, with the checksums that it has."""
        return cls(
            partial(region.submit_load, for_request=False),
            max_free_bytes=max_free_bytes,
            find=region.view.find,
            num_queued=lambda: region.view.num_queued_reads,
        )

    @property
    def is_pressed(self) -> bool:
        return self._num_queued() > 0

    def read(
        self, keys: Sequence[bytes], lengths: Sequence[int], done: Callable[[_Read], None]
    ) -> None:
        """See ``PageReader.read``. ``done`` may be called under the store's lock."""
        name: object = object()
        if self._generation is not None:
            name = (self.namespace, self._generation(), tuple(keys), tuple(lengths))
        with self._lock:
            read = self._reads.get(name)
            is_first = read is None
            if read is None:
                read = _Read(self.namespace, len(keys), partial(self._released, name))
                self._reads[name] = read
            read.num_readers += 1
            is_over = read.waiting is None
            if read.waiting is not None:
                read.waiting.append(done)
        if is_over:
            done(read)
        if is_first:
            try:
                job = self._begin(read, keys, lengths)
            except BaseException:
                read.spots = [None] * len(keys)
                self._ended(read, None)  # who joined it waits for it
                raise
            if job is not None:
                job.call_at_end(partial(self._ended, read))
            else:
                self._ended(read, None)

    def _begin(self, read: _Read, keys: Sequence[bytes], lengths: Sequence[int]) -> Job | None:
        stored = [None] * len(keys) if self._find is None else self._find(keys)
        at = 0
        wanted: list[tuple[bytes, int, int]] = []
        for position, (key, page, length) in enumerate(zip(keys, stored, lengths, strict=True)):
            if self._find is None or (page is not None and page.length == length):
                read.spots[position] = (at, length, None if page is None else page.checksum)
                wanted.append((key, at, length))
                at += padded(length)
        if not wanted:
            return None
        read.data = data = self._memory.borrow_buffer(at)
        pages = tuple((data[at : at + length],) for _, at, length in wanted)
        return self._submit(Run(tuple(key for key, *_ in wanted), pages))

    def _ended(self, read: _Read, job: Job | None) -> None:
        """Hand pages to all who wait. May run under a store's lock."""
        with self._lock:
            read.job = job
            waiting, read.waiting = read.waiting or [], None
        for done in waiting:
            done(read)

    def _released(self, name: object) -> None:
        with self._lock:
            read = self._reads[name]
            read.num_readers -= 1
            if read.num_readers:
                return
            del self._reads[name]
        if read.data.nbytes:
            self._memory.return_buffer(read.data)

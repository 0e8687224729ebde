"""``PageSource``: the pages that a page server gives away, read out of a store of another owner.

A store's own readers fill buffers of this module, verified like every load: only pages that a load
here would get are given. A region store says with which checksum a page was stored, which binds it
to namespace and key from the store that wrote it to the server that uses it. For other tiers it is
computed of what was read. Ranks of one server ask for the same pages at about the same time. One
read serves all who ask before it is sent.
"""

from __future__ import annotations

import functools
import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.checksummed import page_checksum
from sglang_tiered.storage.base import Reason, Run
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import padded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.base import Job
    from sglang_tiered.storage.region.engine import RegionEngine
    from sglang_tiered.storage.region.view import StoredPage


_SMALLEST_BYTES = 64 << 10


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


class Place(NamedTuple):
    """The place of one page in the memory that was read, and its checksum."""

    offset: int
    length: int
    checksum: int


class SharedRead:
    """Pages that are being read, for all who ask for them until they were sent. Each calls
    ``release`` once, after its last use of ``data``."""

    def __init__(
        self, namespace: Callable[[], bytes], num_pages: int, release: Callable[[], None]
    ) -> None:
        self._namespace_now, self._namespace = namespace, namespace()
        self.release = release
        # Of the pages that are read: offset, length, checksum where the store knows it.
        self.spots: list[tuple[int, int, int | None] | None] = [None] * num_pages
        self.job: Job | None = None  # of those, once it is over
        self.data = memoryview(b"")
        self.waiting: list[Callable[[SharedRead], None]] | None = []
        self.num_readers = 0

    @functools.cached_property
    def places(self) -> Sequence[Place | None]:
        """Where the pages are, None for those that are not held under their length; made once, by
        who sends first and not under the store's lock."""
        if self.job is None:
            return [None] * len(self.spots)
        read = zip(self.job.run.keys, self.job.reasons, strict=True)
        return [spot and self._place(spot, *next(read)) for spot in self.spots]

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


class PageSource:
    """Reads pages by ``submit``, which begins a load. It keeps ``max_free_bytes`` of memory for the
    next reads; the server bounds the memory in use.

    ``find`` returns what is stored of each key; without it all pages are asked for, and their
    checksums made with ``namespace``, as those of pages that were stored encoded. ``generation``
    changes with every erasure: who asks after one is given nothing that was read before. Without it
    every request is a read of its own.
    """

    def __init__(
        self,
        submit: Callable[[Run], Job],
        *,
        namespace: Callable[[], bytes],
        max_free_bytes: int,
        find: Callable[[Sequence[bytes]], Sequence[StoredPage | None]] | None = None,
        generation: Callable[[], int] | None = None,
        is_pressed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._submit = submit
        self._namespace = namespace
        self._find = find
        self._generation = generation
        self._is_pressed = is_pressed
        self._memory = BufferPool(max_free_bytes)
        self._lock = threading.Lock()
        self._reads: dict[object, SharedRead] = {}

    @classmethod
    def of_region(cls, region: RegionEngine, *, max_free_bytes: int) -> PageSource:
        """Read a region store, for others: what is stored, with the checksums that it has."""
        return cls(
            partial(region.submit_load, for_request=False),
            max_free_bytes=max_free_bytes,
            find=region.view.find,
            is_pressed=lambda: region.view.is_pressed,
            namespace=lambda: region.namespace,
        )

    @property
    def is_pressed(self) -> bool:
        """Whether reads queue up at the device: a server then reads one request at a time."""
        return self._is_pressed()

    def read(
        self, keys: Sequence[bytes], lengths: Sequence[int], done: Callable[[SharedRead], None]
    ) -> None:
        """Start to read pages; never blocks. ``done`` is called once, on any thread, perhaps under
        the store's lock."""
        name: object = object()
        if self._generation is not None:
            name = (self._namespace(), self._generation(), tuple(keys), tuple(lengths))
        with self._lock:
            read = self._reads.get(name)
            is_first = read is None
            if read is None:
                read = SharedRead(self._namespace, len(keys), partial(self._released, name))
                self._reads[name] = read
            read.num_readers += 1
            is_over = read.waiting is None
            if read.waiting is not None:
                read.waiting.append(done)
        if is_over:
            done(read)
        elif is_first:
            try:
                job = self._begin(read, keys, lengths)
            except BaseException:
                self._ended(read)  # who joined it waits for it
                raise
            if job is None:
                self._ended(read)
            else:
                job.call_at_end(partial(self._ended, read))

    def _begin(self, read: SharedRead, keys: Sequence[bytes], lengths: Sequence[int]) -> Job | None:
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
        return self._submit(Run(tuple(key for key, *_ in wanted), pages))

    def _ended(self, read: SharedRead, job: Job | None = None) -> None:
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

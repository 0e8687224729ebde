"""``PageSource``: a page server's pages come from the own region store.

The store's own readers read pages into buffers of this module, verified like every load. A page
leaves with the checksum it was stored with, which binds it to namespace and key from the store that
wrote it to the server that uses it. Only pages that a load here would get are served.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sglang_tiered.sharing.pages.server import Place
from sglang_tiered.storage.base import Reason, Run
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import BLOCK_BYTES, padded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.base import Job
    from sglang_tiered.storage.region.engine import RegionEngine

__all__ = ["BufferPool", "PageSource"]

_SMALLEST_BYTES = 64 << 10


class _Pages:
    """The pages that one read found. ``release`` returns ``data`` to the pool."""

    def __init__(self, pool: BufferPool, data: memoryview, places: list[Place | None]) -> None:
        self._pool = pool
        self.data = data
        self.places: Sequence[Place | None] = places

    def release(self) -> None:
        self._pool.return_buffer(self.data)


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


class PageSource:
    """A ``PageReader`` over a store that it does not own. It keeps ``max_free_bytes`` of memory for
    the next reads; the server bounds the memory in use."""

    def __init__(self, region: RegionEngine, *, max_free_bytes: int) -> None:
        self._region = region
        self._memory = BufferPool(max_free_bytes)

    @property
    def is_pressed(self) -> bool:
        return self._region.view.num_queued_reads > 0

    def read(
        self,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        done: Callable[[_Pages | None], None],
    ) -> None:
        """See ``PageReader.read``. ``done`` may be called under the store's lock."""
        places: list[Place | None] = [None] * len(keys)
        wanted: list[int] = []
        at = 0
        for position, (page, length) in enumerate(
            zip(self._region.view.find(keys), lengths, strict=True)
        ):
            if page is not None and page.length == length:
                places[position] = Place(at, length, page.checksum)
                wanted.append(position)
                at += padded(length)
        if not wanted:
            done(None)
            return
        data = self._memory.borrow_buffer(at)
        pages = _Pages(self._memory, data, places)
        run = Run(
            tuple(keys[i] for i in wanted),
            tuple((_slice(data, places[i]),) for i in wanted),
        )

        def ended(job: Job) -> None:
            for position, reason in zip(wanted, job.reasons, strict=True):
                if reason is not Reason.OK:
                    places[position] = None
            done(pages)

        self._region.submit_load(run, for_request=False).call_at_end(ended)


def _slice(data: memoryview, place: Place | None) -> memoryview:
    assert place is not None
    assert place.offset % BLOCK_BYTES == 0, "direct I/O needs whole blocks"
    return data[place.offset : place.offset + place.length]

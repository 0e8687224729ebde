"""``Encoders``: the threads that encode the pages of an extent, into memory that direct I/O takes.

Threads of the store, not a pool of ``concurrent.futures``: that takes nothing once the interpreter
ends, and a server that closes its store at exit still stores what is queued.
"""

from __future__ import annotations

import functools
import itertools
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.codecs.encoded import spread
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import padded
from sglang_tiered.storage.region.pending import page_bytes
from sglang_tiered.storage.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.storage.base import Page
    from sglang_tiered.storage.encoding import PageEncoding

    Stored = list[tuple[Page, int]]
    Share = tuple[Callable[[], Stored], Future[Stored]]

__all__ = ["Encoders"]

_NUM_THREADS = 4  # an extent has as many pages of 8 MiB
_JOIN_TIMEOUT_S = 10.0  # of threads that have nothing to do


class Encoders:
    """Encodes for one thread, which waits."""

    def __init__(self, encoding: PageEncoding) -> None:
        self._encoding = encoding
        self._shares: SimpleQueue[Share | None] = SimpleQueue()
        self._workers = Workers()
        self._workers.start("tier-encoder", self._run, _NUM_THREADS)

    def encode(self, pages: list[Page], *, is_full: bool) -> Stored:
        """Return what to store of pages, and of how many bytes. Where that fails it is the pages as
        they came, for which there is always memory."""

        def encoded(some: list[Page]) -> Stored:
            try:
                stored = [self._encoding.encode(page, is_full=is_full) for page in some]
                return _in_blocks(stored, some)
            except Exception as error:
                self._encoding.tell(error)
                return [(page, page_bytes(page)) for page in some]

        size = max(1, -(-len(pages) // _NUM_THREADS))
        under_way: list[Future[Stored]] = []
        for start in range(0, len(pages), size):
            under_way.append(Future())
            work = functools.partial(encoded, pages[start : start + size])
            self._shares.put((work, under_way[-1]))
        wait(under_way)
        return list(itertools.chain.from_iterable(each.result() for each in under_way))

    def close(self) -> None:
        for _ in range(_NUM_THREADS):
            self._shares.put(None)
        self._workers.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while (share := self._shares.get()) is not None:
            work, future = share
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del share, work, future  # the pages are the caller's memory


def _in_blocks(encoded: list[Page], pages: list[Page]) -> Stored:
    """Return pages and their lengths, those that were encoded in memory that direct I/O takes: it
    ends with their last block, in zeros. That memory is fresh, and its first touch takes most of
    the time: a copy by numpy does it without the GIL."""
    lengths = [page_bytes(page) for page in encoded]
    whole = [0 if e is p else padded(n) for e, p, n in zip(encoded, pages, lengths, strict=True)]
    if not any(whole):
        return list(zip(encoded, lengths, strict=True))
    memory = aligned_buffer(sum(whole))
    found: Stored = []
    for page, length, num_bytes in zip(encoded, lengths, whole, strict=True):
        found.append(((memory[:num_bytes],) if num_bytes else page, length))
        if num_bytes:
            spread([np.frombuffer(part, np.uint8) for part in page], (memory[:length],))
            memory = memory[num_bytes:]
    return found

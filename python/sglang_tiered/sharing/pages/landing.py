"""Fetches and the requests they are cut into: where arriving pages go, and until when.

Only the fetch determines where bytes go: a reply names a request, never a place. A fetch lives on
its client's thread, which does all the copying and also ends it: once ``done`` has been called, no
byte of its pages changes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.checksummed import begin_checksum
from sglang_tiered.errors import TransferError
from sglang_tiered.sharing.pages.messages import (
    KEY_BYTES,
    MAX_PAGE_BYTES,
    MAX_REQUEST_PAGES,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from xxhash import xxh3_64

    from sglang_tiered.sharing.pages.messages import Found

__all__ = ["PageFetch", "PageOutcome", "Page", "PageRequest", "cut_requests"]

Page = tuple[memoryview, ...]
"""The segments of one page, in order; writable, format ``B``, 1-D, C-contiguous."""

_LARGE_COPY_BYTES = 64 << 10


class PageOutcome(enum.Enum):
    """The outcome of one page."""

    OK = "ok"  # its bytes are there and verified; other pages have undefined content
    MISS = "miss"  # the holder has no page of that key and length; untouched
    DAMAGED = "damaged"  # the bytes that came did not verify
    BUSY = "busy"  # the holder has too much to do; untouched
    LOST = "lost"  # the holder is unreachable, did not answer, or broke the protocol
    LATE = "late"  # the deadline came first
    CANCELLED = "cancelled"


class PageFetch:
    """Pages asked of one holder. ``outcomes[i]`` is that of page ``i``, valid when ``done`` is
    called: once, on the client's thread, after the last touch of the pages."""

    def __init__(
        self,
        address: str,
        namespace: bytes,
        keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float | None,
        done: Callable[[PageFetch], None],
    ) -> None:
        self.address = address
        self.namespace = namespace
        self.keys = keys
        self.pages: Sequence[Page] = pages
        self.lengths = [sum(segment.nbytes for segment in page) for page in pages]
        self.deadline = deadline  # by the client's clock
        self.outcomes = [PageOutcome.LOST] * len(pages)
        self.is_open = True
        self.num_left = 0  # requests that are not settled
        self.num_heard = 0  # pages that the holder answered for
        self._done = done

    def end(self) -> None:
        """Drop the pages and call ``done``: nothing lands from here on."""
        self.is_open = False
        self.pages = ()
        self._done(self)

    def settle(self, request: PageRequest, outcome: PageOutcome) -> None:
        span = range(request.start, request.stop)
        self.outcomes[request.start : request.stop] = [outcome] * len(span)


@dataclass(eq=False, slots=True)
class PageRequest:
    """Pages [start, stop) of a fetch. Nothing may land for it once ``is_settled``."""

    number: int
    fetch: PageFetch
    start: int
    stop: int
    num_bytes: int
    is_settled: bool = False

    def joined_keys(self) -> bytes:
        return b"".join(self.fetch.keys[self.start : self.stop])

    def lengths(self) -> list[int]:
        return self.fetch.lengths[self.start : self.stop]

    def land(self, found: Found, payload: Sequence[memoryview]) -> None:
        """Copy each page to its place and verify it there. Raises ``TransferError``, before a byte
        is copied, for an answer that does not fit the request."""
        fetch = self.fetch
        lengths = self.lengths()
        if len(found.checksums) != len(lengths):
            raise TransferError(
                f"a page server answered for {len(found.checksums)} pages, asked for {len(lengths)}"
            )
        num_bytes = sum(
            length
            for length, checksum in zip(lengths, found.checksums, strict=True)
            if checksum is not None
        )
        num_sent = sum(frame.nbytes for frame in payload)
        if num_sent != num_bytes:
            raise TransferError(
                f"a page server sent {num_sent} bytes for pages that take {num_bytes}"
            )
        source = _FrameSource(payload)
        for position, checksum in enumerate(found.checksums, self.start):
            fetch.num_heard += 1
            if checksum is None:
                fetch.outcomes[position] = PageOutcome.MISS
                continue
            state = begin_checksum(fetch.namespace, fetch.keys[position])
            for segment in fetch.pages[position]:
                source.fill(segment, state)
            verified = state.intdigest() == checksum
            fetch.outcomes[position] = PageOutcome.OK if verified else PageOutcome.DAMAGED


class _FrameSource:
    """Reads the concatenation of frames."""

    def __init__(self, frames: Sequence[memoryview]) -> None:
        self._frames = iter(frames)
        self._rest: Any = memoryview(b"")

    def fill(self, segment: memoryview, state: xxh3_64) -> None:
        """Fill a segment with the next bytes, which the caller has counted. Each part is read back
        for the checksum while the processor has it at hand."""
        at = 0
        while at < segment.nbytes:
            if not self._rest.nbytes:
                self._rest = next(self._frames)
                continue
            size = min(self._rest.nbytes, segment.nbytes - at)
            target, part = segment[at : at + size], self._rest[:size]
            if size < _LARGE_COPY_BYTES:
                target[:] = part
            else:  # numpy lets other threads run meanwhile
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(part, np.uint8))
            state.update(target)
            self._rest = self._rest[size:]
            at += size


def cut_requests(fetch: PageFetch, request_bytes: int, numbers: Iterator[int]) -> list[PageRequest]:
    """Cut a fetch into requests of consecutive pages and about ``request_bytes``, or of one page. A
    page that no request can name is a miss from the start."""
    requests: list[PageRequest] = []
    for position, length in enumerate(fetch.lengths):
        if length > MAX_PAGE_BYTES or length == 0 or len(fetch.keys[position]) != KEY_BYTES:
            fetch.outcomes[position] = PageOutcome.MISS
            continue
        last = requests[-1] if requests else None
        if (
            last is not None
            and last.stop == position
            and last.num_bytes + length <= request_bytes
            and last.stop - last.start < MAX_REQUEST_PAGES
        ):
            last.stop += 1
            last.num_bytes += length
        else:
            requests.append(PageRequest(next(numbers), fetch, position, position + 1, length))
    fetch.num_left = len(requests)
    return requests

"""Fetches: where arriving pages go, and until when.

Only the fetch determines where bytes go: a reply names its number, never a place. A fetch lives on
its client's thread, which does all the copying and also ends it: once ``done`` has been called, no
byte of its pages changes.
"""

from __future__ import annotations

import enum
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
    from collections.abc import Callable, Sequence

    from xxhash import xxh3_64

    from sglang_tiered.sharing.pages.messages import Found


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
    """Pages asked of one holder, with one message. ``outcomes[i]`` is that of page ``i``, valid
    when ``done`` is called: once, on the client's thread, after the last touch of the pages."""

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
        self.num_bytes = sum(self.lengths)
        self.deadline = deadline  # by the client's clock
        self.sent_at: float | None = None
        self.outcomes = [PageOutcome.LOST] * len(pages)
        self.is_open = True
        self.is_silent = False  # nothing was heard of the holder since it was asked
        self._done = done

    @property
    def can_be_asked(self) -> bool:
        """Whether a message can name the pages."""
        return (
            0 < len(self.keys) <= MAX_REQUEST_PAGES
            and self.num_bytes <= MAX_PAGE_BYTES
            and 0 not in self.lengths
            and all(len(key) == KEY_BYTES for key in self.keys)
        )

    def end(self) -> None:
        """Drop the pages and call ``done``: nothing lands from here on."""
        self.is_open = False
        self.pages = ()
        self._done(self)

    def land(self, found: Found, payload: Sequence[memoryview]) -> None:
        """Copy each page to its place and verify it there. Raises ``TransferError``, before a byte
        is copied, for an answer that does not fit the request."""
        if len(found.checksums) != len(self.keys):
            raise TransferError(
                f"a page server answered for {len(found.checksums)} pages, asked for "
                f"{len(self.keys)}"
            )
        num_bytes = sum(
            length
            for length, checksum in zip(self.lengths, found.checksums, strict=True)
            if checksum is not None
        )
        num_sent = sum(frame.nbytes for frame in payload)
        if num_sent != num_bytes:
            raise TransferError(
                f"a page server sent {num_sent} bytes for pages that take {num_bytes}"
            )
        source = _FrameSource(payload)
        for position, checksum in enumerate(found.checksums):
            if checksum is None:
                self.outcomes[position] = PageOutcome.MISS
                continue
            state = begin_checksum(self.namespace, self.keys[position])
            for segment in self.pages[position]:
                source.fill(segment, state)
            verified = state.intdigest() == checksum
            self.outcomes[position] = PageOutcome.OK if verified else PageOutcome.DAMAGED


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

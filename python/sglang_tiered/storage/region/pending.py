"""What is under way in a region store: orders to its threads, stores and loads cut into parts, and
what of an extent is written where."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.region.format import BLOCK_BYTES, padded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Erasure, Job, Page
    from sglang_tiered.storage.region.format import Extent
    from sglang_tiered.storage.region.regions import Region


MAX_EXTENT_BYTES = 8 << 20  # of payload: one thread hashes and writes it, and others the next
# One read: an eighth of the load, so that all threads share it, but not too little for a request,
# nor so much that what is read has left the processor's cache before it is verified.
_MIN_SPAN_BYTES, _MAX_SPAN_BYTES, _SPREAD = 512 << 10, 4 << 20, 8
_nbytes = attrgetter("nbytes")


def page_bytes(page: Page) -> int:
    return sum(map(_nbytes, page))


def stored_bytes(page: Page, length: int) -> Page:
    """Return a page of that length without the rest of its last block, where that lies behind it in
    memory as it does on disk."""
    return (page[0][:length],) if len(page) == 1 else page


def stored_blocks(page: Page, padding: memoryview) -> Iterator[memoryview]:
    """Yield what is read or written of a page: whole blocks, as few segments as its memory allows.
    ``padding`` is a block that stands for the rest of the last one."""
    yield from filter(_nbytes, page)
    missing = -page_bytes(page) % BLOCK_BYTES
    if missing:
        yield padding[:missing]


@dataclass(eq=False, slots=True)
class StoreTicket:
    """A store on its way to the log: the pages that are neither held nor already coming. Pages are
    *placed* (given a place in an extent) from the front, then *settled* (published, or failed) in
    the same order. The job is done when all that is left of it is settled."""

    job: Job
    namespace: bytes
    generation: int
    positions: list[int]  # of the pages within the run; cut short when the rest is dropped
    lengths: Sequence[int]  # of all pages of the run
    num_bytes: int
    reinserted: bool = False  # pages saved from a region that was reclaimed; no caller's job
    num_placed: int = 0
    num_settled: int = 0
    forgotten: set[bytes] = field(default_factory=set)  # keys that must not become visible

    @property
    def tenant(self) -> bytes:
        return self.job.run.tenant

    @property
    def num_left(self) -> int:
        """Return how many pages have no place yet."""
        return len(self.positions) - self.num_placed

    def key(self, index: int) -> bytes:
        return self.job.run.keys[self.positions[index]]

    def page(self, index: int) -> Page:
        return self.job.run.pages[self.positions[index]]

    def length(self, index: int) -> int:
        return self.lengths[self.positions[index]]


Part = tuple[StoreTicket, range]
"""Consecutive pages of one ticket within one extent, by their indexes in its positions."""


@dataclass(eq=False, slots=True)
class ExtentWrite:
    """An extent on its way to the device: hashed and written by whichever thread is free. Guarded
    by the store's lock, but for the checksums in ``extent.pages``."""

    region: Region
    extent: Extent
    ordinal: int
    parts: list[Part]
    pages: list[Page]  # some with the rest of their last block; empty once it is let go
    memory_bytes: int  # of the pages as they came
    done: bool = False  # written, or ``error`` says why not; no thread touches its pages then
    error: OSError | None = None
    num_tries: int = 0

    @property
    def payload_bytes(self) -> int:
        return self.extent.payload_bytes


class Wanted(NamedTuple):
    """One page to load: its place in the run, where it lies, what it must hash to, and where it
    goes."""

    position: int
    key: bytes
    region: Region
    offset: int  # within the region
    length: int  # bytes, without padding
    checksum: int
    page: Page  # perhaps with room for the rest of its last block


def is_encoded(item: Wanted) -> bool:
    return item.length < page_bytes(item.page)


@dataclass(eq=False, slots=True)
class LoadTicket:
    """A load cut into spans; done when the last of them is."""

    job: Job
    namespace: bytes
    for_request: bool
    is_as_stored: bool  # each page is read into memory for all of its blocks, and not decoded
    num_spans_left: int = 0


class Note(NamedTuple):
    """What the owner of a store wants to know of an erasure after a restart, by its name."""

    id: bytes  # 16 bytes
    until_s: float  # seconds since 1970: of no use from then on
    data: bytes


class Order(NamedTuple):
    """Make the files of these pins say what the book of pins says by then. With ``what``, make an
    erasure durable, which took from those pins, and give back what it frees."""

    pins: tuple[str, ...]
    durable: Future[bool]
    what: Erasure | None = None
    ids: tuple[int, ...] = ()  # digests of names that it makes known
    notes: tuple[Note, ...] = ()


def plan_spans(wanted: Sequence[Wanted]) -> list[list[Wanted]]:
    """Group pages that follow each other on disk into single reads. Pure."""
    spans: list[list[Wanted]] = []
    share = sum(padded(item.length) for item in wanted) // _SPREAD
    limit = min(max(share, _MIN_SPAN_BYTES), _MAX_SPAN_BYTES)
    region: Region | None = None
    end = nbytes = 0
    for item in wanted:
        size = padded(item.length)
        if item.region is region and item.offset == end and nbytes + size <= limit:
            spans[-1].append(item)
            nbytes += size
        else:
            spans.append([item])
            region, nbytes = item.region, size
        end = item.offset + size
    return spans

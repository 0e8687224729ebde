"""What is under way in a region store: orders to its threads, stores and loads cut into parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Erasure, Job, Page
    from sglang_tiered.storage.region.format import Extent
    from sglang_tiered.storage.region.reader import Wanted
    from sglang_tiered.storage.region.regions import Region

__all__ = [
    "EraseOrder",
    "ExtentWrite",
    "LoadSpan",
    "LoadTicket",
    "Part",
    "Piece",
    "PinOrder",
    "StoreTicket",
]


@dataclass(eq=False, slots=True)
class StoreTicket:
    """A store on its way to the log: the pages that are neither held nor already coming. Pages are
    *placed* (given a place in an extent) from the front, then *settled* (published, or failed) in
    the same order; the job is done when all that is left of it is settled."""

    job: Job
    namespace: bytes
    generation: int
    positions: list[int]  # of the pages within the run; cut short when the rest is dropped
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


class Part(NamedTuple):
    """Consecutive pages of one ticket within one extent."""

    ticket: StoreTicket
    start: int  # index into the ticket's positions
    num_pages: int


@dataclass(eq=False, slots=True)
class ExtentWrite:
    """An extent on its way to the device: hashed and written in pieces, each by whichever extent
    writer is free, then its header by the one that was last. Guarded by the store's lock, but for
    ``extent.pages``, of which a piece being hashed owns its rows."""

    region: Region
    extent: Extent
    ordinal: int
    parts: list[Part]
    pages: list[Page]
    pieces: list[Piece] = field(default_factory=list)  # empty once it is let go
    num_left: int = 0  # pieces that are not done
    done: bool = False  # written, or ``error`` says why not; no thread touches its pages then
    error: OSError | None = None
    num_tries: int = 0


class Piece(NamedTuple):
    """Pages of an extent to hash and write together."""

    write: ExtentWrite
    start: int  # row in ``extent.pages``
    stop: int


@dataclass(eq=False, slots=True)
class LoadTicket:
    """A load cut into spans; done when the last of them is."""

    job: Job
    namespace: bytes
    num_spans_left: int
    for_request: bool


@dataclass(eq=False, slots=True)
class LoadSpan:
    ticket: LoadTicket
    wanted: list[Wanted]


class EraseOrder(NamedTuple):
    """Make an erasure durable, that it took from pins too, and give back what it frees."""

    what: Erasure
    pins: tuple[str, ...]
    ids: tuple[int, ...]  # digests of names that it makes known
    durable: Future[bool]


class PinOrder(NamedTuple):
    """Make the files of the pins of these names say what the book of pins says by then."""

    names: tuple[str, ...]
    durable: Future[bool]

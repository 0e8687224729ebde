"""What is under way in an object tier: stores, objects being filled, loads, purges, listings.

The engine's threads hand these records to each other through ``ObjectState``.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.object.format import MAX_OBJECT_PAGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Job
    from sglang_tiered.storage.object.index import Place
    from sglang_tiered.storage.object.names import ObjectId

__all__ = [
    "DiscoveryCounts",
    "OpenObject",
    "LoadSpan",
    "LoadTicket",
    "PinOrder",
    "PurgeOrder",
    "RefreshOrder",
    "StoreTicket",
]


@dataclass(eq=False, slots=True)
class StoreTicket:
    """A store on its way: the pages that were neither held nor already coming. Guarded by the
    state's lock; only the packer reads the run's buffers, and no thread once its pages are
    copied."""

    job: Job
    namespace: bytes
    epoch: int
    positions: list[int]  # of the pages within the run
    num_left: int  # pages that are not settled
    dropped: bool = False  # purged, or the engine was closed
    forgotten: set[bytes] = field(default_factory=set)  # of its keys; not to be packed any more

    @property
    def tenant(self) -> bytes:
        return self.job.run.tenant


@dataclass(eq=False, slots=True)
class OpenObject:
    """An object in staging memory. Its buffer and rows belong to the packer while it is open and
    to one uploader afterwards; the rest is guarded by the state's lock."""

    object_id: ObjectId
    namespace: bytes
    epoch: int
    tenant: bytes
    opened_at: float
    opened_ms: int  # by the clock of names; its own name may be later
    buffer: bytearray = field(default_factory=bytearray)
    rows: list[tuple[bytes, int, int, int, int]] = field(default_factory=list)
    entries: list[tuple[StoreTicket, int, bytes]] = field(default_factory=list)
    staged_bytes: int = 0  # raw, of its entries
    dropped: bool = False  # its pages are purged and must stay invisible

    def has_room(self, num_bytes: int, object_bytes: int) -> bool:
        if not self.rows:
            return True
        return len(self.buffer) + num_bytes <= object_bytes and len(self.rows) < MAX_OBJECT_PAGES


@dataclass(eq=False, slots=True)
class LoadSpan:
    """One ranged read. ``end`` is behind the last page."""

    ticket: LoadTicket
    name: str  # of the object
    start: int
    end: int
    places: list[Place]


class LoadTicket:
    """A load cut into spans. Its guard decides who may touch the run's pages: threads that copy
    report it before and after, and once the ticket is closed none begins. Exactly one thread is
    told True, and it finishes the job."""

    def __init__(
        self,
        job: Job,
        namespace: bytes,
        num_spans: int,
        until: float | None,
        deadline: float | None,
    ) -> None:
        self.job = job
        self.namespace = namespace
        self.until = until  # time.monotonic, for the client
        self.deadline = deadline  # of the state's clock
        self._guard = threading.Condition()
        self._num_left = num_spans
        self._num_touching = 0
        self._is_open = True

    @property
    def is_open(self) -> bool:
        return self._is_open

    @contextlib.contextmanager
    def touching(self) -> Iterator[bool]:
        """Guard every touch of the pages or the reasons; false when it must not be."""
        with self._guard:
            allowed = self._is_open
            self._num_touching += 1
        try:
            yield allowed
        finally:
            with self._guard:
                self._num_touching -= 1
                self._guard.notify_all()

    def settle_span(self) -> bool:
        """Note that a span is done; true for the last one of an open ticket, which closes it."""
        with self._guard:
            self._num_left -= 1
            if not self._is_open or self._num_left:
                return False
            self._is_open = False
            return True

    def expire(self) -> bool:
        """Close the ticket before its spans are done; false when it was closed. True once no thread
        touches the pages, which takes no longer than the copy of a span."""
        with self._guard:
            if not self._is_open:
                return False
            self._is_open = False
            self._guard.wait_for(lambda: not self._num_touching)
            return True


@dataclass(eq=False, slots=True)
class PurgeOrder:
    """Make a purge durable: of a tenant, of everyone (None), or of single pages. In the latter
    case ``names`` are objects that had one, ``uploading`` those that were on their way, ``local``
    says whether this server's own tier has forgotten the pages, and ``written`` what its tombstone
    is called in each namespace that has it."""

    tenant: bytes | None
    purge_id: ObjectId  # its time is the bound
    namespace: bytes
    durable: Future[bool]
    keys: tuple[bytes, ...] = ()
    names: set[str] = field(default_factory=set)
    uploading: Sequence[OpenObject] = ()
    local: Future[bool] | None = None
    written: dict[bytes, ObjectId] = field(default_factory=dict)


class PinOrder(NamedTuple):
    """Write the pin of that name, or delete it where it is gone."""

    name: str
    epoch: int  # of the namespace
    durable: Future[bool]


class RefreshOrder(NamedTuple):
    """Look for news now."""

    full: bool
    succeeded: Future[bool]


@dataclass(slots=True)
class DiscoveryCounts:
    """Counters that the discovery keeps, under the engine's lock."""

    num_passes: int = 0
    num_full_listings: int = 0
    num_manifests_seen: int = 0  # read and put into the index
    num_manifests_bad: int = 0  # did not verify
    num_manifests_foreign: int = 0  # of a newer version, another namespace or codec
    num_objects_vanished: int = 0  # 404 when read, or gone from a full listing
    last_pass_s: float = 0.0

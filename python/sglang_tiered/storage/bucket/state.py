"""What the threads of a bucket's engine share, and the one lock that guards it. No I/O under it."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.budgets import DailyBudget
from sglang_tiered.storage.base import Erasure, Reason
from sglang_tiered.storage.bucket.erased import BucketErasures
from sglang_tiered.storage.bucket.index import BucketIndex
from sglang_tiered.storage.bucket.names import Layout
from sglang_tiered.storage.bucket.pins import BucketPins
from sglang_tiered.storage.jobs import JobBook, selects
from sglang_tiered.storage.promises import Promises

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sglang_tiered.remote_config import ObjectConfig
    from sglang_tiered.storage.base import Job, Page
    from sglang_tiered.storage.bucket.erased import Record
    from sglang_tiered.storage.bucket.names import PageName
    from sglang_tiered.storage.encoding import PageEncoding

__all__ = [
    "BucketLoad",
    "BucketState",
    "OnErased",
    "PageLoad",
    "PendingErasure",
    "Upload",
]

_MAX_SKIPPED = 8192
_MAX_DOOMED = 65_536
_MAX_HEARD = 65_536  # what is forgotten and told again is done again, which is safe and costs pages

OnErased = Callable[[Sequence[Erasure]], None]
"""What the owner of an engine wants to be told of."""


@dataclass(eq=False, slots=True)
class PendingErasure:
    """An erasure of this server that is to be made durable. ``number``: of its record, 0 before it
    has one, or of a later one of this server. ``turn``: later ones have higher ones. ``pages``:
    paths of what was held of it."""

    what: Erasure
    namespace: bytes
    durable: Future[bool]
    turn: int
    pages: list[str] = field(default_factory=list)
    number: int = 0


@dataclass(eq=False, slots=True)
class Upload:
    """A page on its way. Its buffer is the caller's until ``BucketState.settle``. ``awaits``: it
    was submitted behind an erasure that names it, and gets the number of that as its stamp."""

    job: Job
    position: int
    namespace: bytes
    epoch: int
    stamp: int
    num_bytes: int
    awaits: PendingErasure | None = None
    dropped: bool = False  # erased meanwhile
    is_copied: bool = False  # its buffer is not touched any more
    is_settled: bool = False

    @property
    def key(self) -> bytes:
        return self.job.run.keys[self.position]


@dataclass(eq=False, slots=True)
class BucketLoad:
    """A load, page by page. The state's lock guards it."""

    job: Job
    layout: Layout
    num_left: int
    num_touching: int = 0  # pages that are being copied into its buffers
    is_open: bool = True


class PageLoad(NamedTuple):
    """One page to read: where it goes, and what it is called."""

    load: BucketLoad
    position: int
    name: PageName

    @property
    def page(self) -> Page:
        return self.load.job.run.pages[self.position]

    @property
    def path(self) -> str:
        return self.name.path(self.load.layout)


def _named(what: Erasure) -> Iterable[bytes | None]:
    """Return the keys, or the tenant, or None for everything: no two are of one length."""
    return (what.tenant,) if what.keys is None else what.keys


class BucketState:
    """What the threads share. Everything is guarded by ``lock`` but for what never changes."""

    num_passes = 0
    num_full_listings = 0
    last_pass_s = 0.0
    num_pages_stored = 0
    num_pages_loaded = 0
    num_pages_erased = 0
    num_pages_vanished = 0
    bytes_stored = 0
    bytes_written = 0
    bytes_loaded = 0

    def __init__(
        self,
        settings: ObjectConfig,
        namespace: bytes,
        encoding: PageEncoding | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.encoding = encoding
        self.clock = clock
        self.wall_clock = wall_clock
        self.lock = threading.Lock()
        self.transfer_ready = threading.Condition(self.lock)
        self.upload_done = threading.Condition(self.lock)
        self.discovery_ready = threading.Condition(self.lock)
        self.keeper_ready = threading.Condition(self.lock)
        self.deadline_ready = threading.Condition(self.lock)
        self.closed = False
        self.namespace = namespace
        self.epoch = 0  # of the namespace
        self.listed_epoch = -1  # of which a pass was whole
        self.index = BucketIndex(
            settings.max_pages,
            settings.capacity_bytes,
            settings.max_tenant_bytes,
            lambda key: self.pins.is_wanted(key),  # noqa: PLW0108 made in the next line
        )
        self.pins = BucketPins(settings.capacity_bytes, wall_clock, self.index)
        self.jobs = JobBook()
        self.promises = Promises()
        # Stores
        self.pending: dict[bytes, Upload] = {}
        self.uploads: dict[Upload, None] = {}
        self.uploading: dict[Upload, None] = {}
        self._left: dict[Job, int] = {}  # pages of stores that are not settled
        self.staged_bytes = 0
        self.write_budget = DailyBudget(settings.writes_per_day, clock)
        self.request_budget = DailyBudget(settings.requests_per_day, clock)
        self.skew_s = 0.0  # of the store's clock, ahead of this one's
        self.page_bytes = 0  # of the last page that was to be stored
        # Loads
        self.loads: deque[PageLoad] = deque()
        self.open_loads: dict[BucketLoad, None] = {}
        self.skipped: OrderedDict[str, None] = OrderedDict()  # pages that are damaged
        # Erasures
        self.erased = BucketErasures()
        self.seen = 0  # all records up to this one are applied, by the owner's other tiers too
        self.orders: dict[PendingErasure, None] = {}  # not durable yet
        self._last_orders: dict[
            bytes | None, PendingErasure
        ] = {}  # by key, by tenant, of everything
        self._num_orders = 0
        self.is_asked = False  # the keeper, for what it has not tried yet
        # Ids of the pieces of erasures that are done here; true: of this server's.
        self.heard: dict[bytes, bool] = {}
        self.doomed: dict[str, None] = {}  # paths of pages that are dead and must go
        self.on_erased: OnErased | None = None
        self.untold: deque[Erasure] = deque()
        self.elsewhere: dict[bytes, list[Erasure]] = {}  # of everything, by other namespaces
        self.refreshes: list[tuple[bool, Future[bool]]] = []  # whether full, and how it ended

    @property
    def layout(self) -> Layout:
        return Layout(self.namespace)

    def notify_all(self) -> None:
        for ready in (
            self.transfer_ready,
            self.upload_done,
            self.discovery_ready,
            self.keeper_ready,
            self.deadline_ready,
        ):
            ready.notify_all()

    def skip(self, path: str) -> None:
        """Do not find a page again while its path is remembered."""
        self.skipped[path] = None
        if len(self.skipped) > _MAX_SKIPPED:
            self.skipped.popitem(last=False)

    def doom(self, path: str) -> None:
        """Have a page deleted."""
        if len(self.doomed) < _MAX_DOOMED:
            self.doomed[path] = None
            self.keeper_ready.notify()

    # ---- Erasing ----

    def hear(self, pieces: Iterable[Erasure], *, is_own: bool) -> None:
        """Remember erasures by their ids, as many as there is room for."""
        self.heard.update((each.id, is_own) for each in pieces)
        while len(self.heard) > _MAX_HEARD:
            del self.heard[next(iter(self.heard))]

    def hide(self, what: Erasure | None) -> None:
        """Hide what an erasure of this namespace names, on its way or held."""
        self.drop_uploads(what)
        index = self.index
        if what is None or what.is_everything:
            num_pages = index.clear()
        elif what.keys is not None:
            num_pages = sum(index.drop(key) for key in what.keys)
        else:
            assert what.tenant is not None
            num_pages = index.drop_tenant(what.tenant)
        self.num_pages_erased += num_pages
        self.discovery_ready.notify_all()  # it sweeps

    def apply(self, record: Record) -> None:
        """Hide what a record of one piece names and was stored without knowing it, and have the
        owner told."""
        self.erased.add(record)
        what = record.what
        if what is not None and (what.is_empty or self.heard.get(what.id)):
            return  # done, and what is held behind it is younger
        if what is not None and what.is_everything and record.namespace != self.namespace:
            self.elsewhere.setdefault(record.namespace, []).append(what)
            return
        if what is not None:
            self.hear([what], is_own=False)
            self.untold.append(what)
        self.pins.erase(what, record.number)
        if what is None or what.keys is None:
            self.hide(what)  # what is alive is listed again
            return
        self.drop_uploads(what)
        for key in what.keys:
            held = self.index.get(key)
            if held is not None and held.stamp < record.number:
                self.num_pages_erased += self.index.drop(key)

    def drop_uploads(self, what: Erasure | None) -> None:
        """Keep what is on its way of an erasure invisible. An uploader that has a page deletes it
        again."""
        names = selects(what)
        if not any(names(job.run.keys, job.run.tenant) for job in self._left):
            return
        namespace = self.namespace if what is not None and what.is_everything else None

        def is_gone(upload: Upload) -> bool:
            if namespace not in (None, upload.namespace):
                return False
            return names((upload.key,), upload.job.run.tenant)

        for upload in self.uploading:
            if is_gone(upload):
                upload.dropped = True
                self._no_longer_pending(upload)
        self.cancel([upload for upload in self.uploads if is_gone(upload)])

    def cancel(self, uploads: Iterable[Upload], reason: Reason = Reason.CANCELLED) -> None:
        """End what waits for its upload."""
        for upload in uploads:
            del self.uploads[upload]
            self.settle(upload, reason)

    def take_upload(self) -> Upload | None:
        """Return what to upload next: nothing that awaits a record."""
        for upload in self.uploads:
            if upload.awaits is None or upload.awaits.number:
                del self.uploads[upload]
                self.uploading[upload] = None
                return upload
        return None

    def ask_keeper(self) -> None:
        """Have the keeper try at once, whatever it waits for."""
        self.is_asked = True
        self.keeper_ready.notify()

    def order(self, what: Erasure) -> PendingErasure:
        """Have the keeper make an erasure of at most one record durable."""
        self._num_orders += 1
        order = PendingErasure(what, self.namespace, self.promises.make(), self._num_orders)
        self.orders[order] = None
        self._last_orders.update(dict.fromkeys(_named(what), order))
        return order

    def release(self, orders: Sequence[PendingErasure]) -> None:
        """Let go of the stores behind erasures: these have records now, or can have none."""
        done = set(orders)
        waiting = [upload for upload in self.uploads if upload.awaits in done]
        self.cancel([u for u in waiting if u.awaits and not u.awaits.number], Reason.REJECTED)
        self.transfer_ready.notify_all()

    def end(self, orders: Sequence[PendingErasure]) -> None:
        """Forget orders, whose erasures are durable."""
        for order in orders:
            del self.orders[order]
            for name in _named(order.what):
                if self._last_orders.get(name) is order:
                    del self._last_orders[name]

    def order_before(self, key: bytes, tenant: bytes) -> PendingErasure | None:
        """Return the last erasure that names a page, if it has no record yet: those before it have
        none either."""
        found = (self._last_orders.get(name) for name in (key, tenant, None))
        waiting = (order for order in found if order is not None and not order.number)
        return max(waiting, key=lambda order: order.turn, default=None)

    def awaits_record(self, keys: Iterable[bytes], tenant: bytes) -> bool:
        """Return whether an erasure that names one of these pages has no record yet."""
        return bool(self.orders) and any(self.order_before(key, tenant) for key in keys)

    # ---- Ends of stores and loads ----

    def add(self, upload: Upload) -> None:
        self.pending[upload.key] = upload
        self.staged_bytes += upload.num_bytes
        self._left[upload.job] = self._left.get(upload.job, 0) + 1
        self.uploads[upload] = None
        self.transfer_ready.notify()

    def settle(self, upload: Upload, reason: Reason) -> None:
        """Say what became of a page, whose buffer no thread touches any more."""
        if upload.is_settled:
            return
        upload.is_settled = True
        self._no_longer_pending(upload)
        self.staged_bytes -= upload.num_bytes
        job = upload.job
        job.reasons[upload.position] = reason
        self._left[job] -= 1
        if not self._left[job]:
            del self._left[job]
            self.jobs.finish(job)

    def _no_longer_pending(self, upload: Upload) -> None:
        if self.pending.get(upload.key) is upload:
            del self.pending[upload.key]

    def finish_load(self, load: BucketLoad) -> None:
        load.is_open = False
        del self.open_loads[load]
        job = load.job
        for is_ok, page in zip(job.ok, job.run.pages, strict=True):
            if is_ok:
                self.num_pages_loaded += 1
                self.bytes_loaded += sum(segment.nbytes for segment in page)
        self.jobs.finish(job)

    def expire(self, load: BucketLoad) -> None:
        """Finish a load before its pages are done: now, or with the last touch of its buffers."""
        load.is_open = False
        if load in self.open_loads and not load.num_touching:
            self.finish_load(load)

"""What the threads of a bucket's engine share, and the one lock that guards it. No I/O under it."""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.budgets import DailyBudget
from sglang_tiered.storage.base import Erasure, Reason
from sglang_tiered.storage.bucket.erased import MAX_NUMBER, BucketErasures
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


_MAX_SKIPPED = 8192
_MAX_HEARD = 65_536  # what is forgotten and told again is done again, which is safe and costs pages

_MAX_TOLD = 1024  # each of 1,024 keys at most
_TOLD_S = 120.0

OnErased = Callable[[Sequence[Erasure]], None]
"""What the owner of an engine wants to be told of."""


@dataclass(eq=False, slots=True)
class PendingErasure:
    """An erasure of this server that is to be made durable. ``number``: of its record, 0 before it
    has one, or of a later one of this server. ``pages``: paths of what was held of it."""

    what: Erasure
    namespace: bytes
    durable: Future[bool]
    pages: list[str] = field(default_factory=list)
    number: int = 0

    @property
    def named(self) -> Iterable[bytes]:
        """Return keys, or the tenant, or for everything the namespace: none is another's."""
        if self.what.keys is not None:
            return self.what.keys
        return (self.what.tenant or self.namespace,)


@dataclass(eq=False, slots=True)
class Upload:
    """A page on its way. Its buffer is the caller's until ``BucketState.settle``."""

    job: Job
    position: int
    namespace: bytes
    name: PageName  # but for what is known once its bytes are put
    dropped: bool = False  # erased meanwhile
    is_copied: bool = False  # its buffer is not touched any more


@dataclass(eq=False, slots=True)
class BucketLoad:
    """A load, page by page. The state's lock guards it."""

    job: Job
    layout: Layout
    num_left: int
    deadline: float
    num_touching: int = 0  # pages that are being read, or copied, into its buffers
    is_open: bool = True


class PageLoad(NamedTuple):
    """One page to read: where it goes, and what it is called."""

    load: BucketLoad
    position: int
    name: PageName
    in_place: bool = False  # straight into its buffers, if that takes no waiting

    @property
    def page(self) -> Page:
        return self.load.job.run.pages[self.position]

    @property
    def path(self) -> str:
        return self.name.path(self.load.layout)


class BucketState:
    """What the threads share. Everything is guarded by ``lock`` but for what never changes."""

    num_pages_stored = 0
    num_pages_loaded = 0
    num_pages_erased = 0
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
        self.listed_epoch = -1  # of the last pass that was whole
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
        self.learned = 0  # all records up to this one are applied
        self.seen = 0  # by the owner's other tiers too: the stamp of what it stores
        self.orders: dict[PendingErasure, None] = {}  # not durable yet
        self._unrecorded: Counter[bytes] = Counter()  # what orders without a number name
        # By id, those of others without a record so far: namespace, how long it has, and behind
        # which record it will be.
        self._told: dict[bytes, tuple[Erasure, bytes, float, int]] = {}
        self.is_asked = False  # the keeper, for what it has not tried yet
        # Ids of the pieces of erasures that are done here; true: of this server's.
        self.heard: dict[bytes, bool] = {}
        self.on_erased: OnErased | None = None
        self.untold: deque[Erasure] = deque()
        self.refreshes: list[tuple[bool, Future[bool]]] = []  # whether full, and how it ended

    @property
    def layout(self) -> Layout:
        return Layout(self.namespace)

    def store_time(self) -> float:
        """Return what time it is by the store's clock, in seconds since 1970."""
        return self.wall_clock() + self.skew_s

    def notify_all(self) -> None:
        for ready in (
            self.transfer_ready,
            self.upload_done,
            self.discovery_ready,
            self.keeper_ready,
            self.deadline_ready,
        ):
            ready.notify_all()

    def forget(self, name: PageName, layout: Layout) -> None:
        """Forget an object, unless there is another of its key."""
        if layout == self.layout and self.index.get(name.key) == name:
            self.index.drop(name.key)

    def skip(self, path: str) -> None:
        """Do not find a page again while its path is remembered."""
        self.skipped[path] = None
        if len(self.skipped) > _MAX_SKIPPED:
            self.skipped.popitem(last=False)

    # ---- Erasing ----

    def hear(self, pieces: Iterable[Erasure], *, is_own: bool) -> None:
        """Remember erasures by their ids, as many as there is room for."""
        self.heard.update((each.id, is_own) for each in pieces)
        while len(self.heard) > _MAX_HEARD:
            del self.heard[next(iter(self.heard))]

    def hide(self, what: Erasure | None, number: int) -> None:
        """Hide what an erasure of this namespace names (None: everything), on its way or held, and
        was stored without knowing a record of that number."""
        self.pins.erase(what, number)
        self.drop_uploads(what)
        index = self.index
        if what is None or what.is_everything:
            num_pages = index.clear()
        elif what.tenant is not None:
            num_pages = index.drop_tenant(what.tenant)
        else:
            held = map(index.get, what.keys or ())
            num_pages = sum(index.drop(each.key) for each in held if each and each.stamp < number)
        self.num_pages_erased += num_pages
        self.discovery_ready.notify_all()  # it sweeps

    def hide_unrecorded(self, what: Erasure) -> None:
        """Hide what has no record so far, whatever its writer knew."""
        self.erased.expect(what, self.namespace)
        self.hide(what, MAX_NUMBER + 1)

    def hide_told(self, what: Erasure) -> None:
        """Hide what another server told, unless that was done by its record."""
        if what.id in self.heard:
            return
        self.hide_unrecorded(what)
        until_s = self.clock() + _TOLD_S * random.uniform(1.0, 2.0)  # not all servers at once
        self._told[what.id] = what, self.namespace, until_s, self.erased.top
        if len(self._told) > _MAX_TOLD:
            del self._told[next(iter(self._told))]

    def adopt(self) -> None:
        """Have the keeper write what was told long ago and has no record: who told it may have no
        bucket, or none that it may write to. Nothing that it names would be stored again."""
        now = self.clock()
        for what, namespace, until_s, after in list(self._told.values()):
            if until_s > now:
                continue
            del self._told[what.id]
            if after == self.erased.top:  # else a later record lets such stores go on
                # What it hid is hidden; pins of what is stored again stay.
                self._add_order(PendingErasure(what, namespace, self.promises.make()))
                self.ask_keeper()

    def apply(self, record: Record) -> bool:
        """Hide what a record of one piece names, and have the owner told. Returns whether that is
        done, whatever namespace comes."""
        self.erased.add(record)
        what = record.what
        if what is not None and (what.is_empty or self.heard.get(what.id)):
            return True  # done, and what is held behind it is younger
        if what is not None and what.is_everything and record.namespace != self.namespace:
            return False
        if what is not None:
            self.hear([what], is_own=False)
            self.untold.append(what)
        self.hide(what, record.number)  # what is alive is listed again
        return True

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
            return names((upload.name.key,), upload.name.tenant)

        for upload in self.uploading:
            if is_gone(upload):
                upload.dropped = True
                self._no_longer_pending(upload)
        self.cancel([upload for upload in self.uploads if is_gone(upload)])

    def cancel(self, uploads: Iterable[Upload]) -> None:
        """End what waits for its upload."""
        for upload in uploads:
            del self.uploads[upload]
            self.settle(upload, Reason.CANCELLED)

    def ask_keeper(self) -> None:
        """Have the keeper try at once, whatever it waits for."""
        self.is_asked = True
        self.keeper_ready.notify()

    def order(self, what: Erasure) -> PendingErasure:
        """Hide an erasure of at most one record, and have the keeper make it durable."""
        order = PendingErasure(what, self.namespace, self.promises.make())
        for key in what.keys or ():
            held = self.index.get(key)
            if held is not None:
                order.pages.append(held.path(self.layout))
        self._add_order(order)
        self.hide_unrecorded(what)
        return order

    def _add_order(self, order: PendingErasure) -> None:
        self.orders[order] = None
        self._unrecorded.update(order.named)
        self.hear(order.what.pieces, is_own=True)

    def set_numbers(self, orders: Iterable[PendingErasure], number: int) -> None:
        """Note that the records of orders are there and applied, all up to that one."""
        for order in orders:
            order.number = number
            for each in order.named:
                self._unrecorded[each] -= 1
                if not self._unrecorded[each]:
                    del self._unrecorded[each]

    def awaits_record(self, keys: Iterable[bytes], tenant: bytes) -> bool:
        """Return whether an erasure of this server that names one of these pages has no record yet.
        Whatever their writer knew, they may be from before."""
        if not self._unrecorded:
            return False
        return any(each in self._unrecorded for each in (tenant, self.namespace, *keys))

    def is_erased(self, keys: Iterable[bytes], tenant: bytes) -> bool:
        """Return whether any of these pages would be dead if it were stored now. The record of what
        names it is not there yet, or the owner has not been told."""
        page = self.namespace, tenant
        dead = any(self.erased.hides(*page, key, self.seen) for key in keys)
        return dead or self.awaits_record(keys, tenant)

    # ---- Ends of stores and loads ----

    def add(self, upload: Upload) -> None:
        self.pending[upload.name.key] = upload
        self.staged_bytes += upload.name.length
        self._left[upload.job] = self._left.get(upload.job, 0) + 1
        self.uploads[upload] = None
        self.transfer_ready.notify()

    def settle(self, upload: Upload, reason: Reason) -> None:
        """Say what became of a page, once, whose buffer no thread touches any more."""
        if self.uploading.pop(upload, True) is None:
            self.upload_done.notify_all()
        self._no_longer_pending(upload)
        self.staged_bytes -= upload.name.length
        job = upload.job
        job.reasons[upload.position] = reason
        self._left[job] -= 1
        if not self._left[job]:
            del self._left[job]
            self.jobs.finish(job)

    def _no_longer_pending(self, upload: Upload) -> None:
        if self.pending.get(upload.name.key) is upload:
            del self.pending[upload.name.key]

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

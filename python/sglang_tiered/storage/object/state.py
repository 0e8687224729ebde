"""What the threads of an engine share, and the one lock that guards it. No I/O under it."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import NO_TENANT, Erasure, Reason
from sglang_tiered.storage.jobs import JobBook
from sglang_tiered.storage.object.budgets import DailyBudget
from sglang_tiered.storage.object.forgotten import Forgotten
from sglang_tiered.storage.object.names import Layout, ObjectId, tenant_tag
from sglang_tiered.storage.object.pending import DiscoveryCounts
from sglang_tiered.storage.object.pinning.pins import ObjectPins
from sglang_tiered.storage.promises import Promises

if TYPE_CHECKING:
    from sglang_tiered.codecs.base import PageCodec
    from sglang_tiered.storage.object.format import Manifest
    from sglang_tiered.storage.object.index import ObjectIndex
    from sglang_tiered.storage.object.pending import (
        LoadSpan,
        LoadTicket,
        OpenObject,
        PurgeOrder,
        RefreshOrder,
        StoreTicket,
    )
    from sglang_tiered.storage.object.settings import ObjectSettings

__all__ = ["Bounds", "ObjectState", "OnErased", "OnFault"]

_MAX_PURGES = 16_384
_MAX_SKIPPED = 8192
_MAX_SEQUENCE = 1 << 24
_MAX_SKEW_MS = 60_000


OnErased = Callable[[Sequence[Erasure]], None]
"""What the owner of an engine wants to be told of."""

OnFault = Callable[[str], None]
"""A thread calls it with what it was doing when an unforeseen exception ended that; the thread goes
on, or jobs would wait for it forever. Called without the lock held."""


class Bounds:
    """Up to when objects are dead, by tenant. The owner's lock guards every call."""

    def __init__(self) -> None:
        self.everyone = -1
        self._collapsed = -1  # of tenants no longer remembered one by one
        self._tenants: OrderedDict[bytes, int] = OrderedDict()

    def add(self, tenant: bytes | None, bound_ms: int) -> bool:
        """Add a bound; returns whether it says anything new."""
        if bound_ms <= self.of(tenant):
            return False
        if tenant is None:
            self.everyone = bound_ms
            return True
        self._tenants[tenant] = bound_ms
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _MAX_PURGES:  # rather forget pages than a purge
            for _ in range(_MAX_PURGES // 2):
                self.collapse(self._tenants.popitem(last=False)[1])
        return True

    def collapse(self, bound_ms: int) -> None:
        """Add a bound of everyone that stays whatever the namespace."""
        self._collapsed = max(self._collapsed, bound_ms)
        self.everyone = max(self.everyone, bound_ms)

    def change_namespace(self) -> None:
        """Drop the purge of everyone, which is of one namespace; that of a tenant is of all."""
        self.everyone = self._collapsed

    def of(self, tenant: bytes | None) -> int:
        """Return up to when the tenant's objects are dead; -1 where nothing of it is."""
        if tenant is None:
            return self.everyone
        return max(self.everyone, self._tenants.get(tenant, -1))


class ObjectState:
    """What the threads share. Everything is guarded by ``lock`` but for what never changes."""

    def __init__(
        self,
        settings: ObjectSettings,
        namespace: bytes,
        codec: PageCodec | None,
        index: ObjectIndex,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.codec = codec
        self.clock = clock
        self.wall_clock = wall_clock
        self.lock = threading.Lock()
        self.load_ready = threading.Condition(self.lock)
        self.store_ready = threading.Condition(self.lock)
        self.upload_ready = threading.Condition(self.lock)
        self.upload_done = threading.Condition(self.lock)
        self.discovery_ready = threading.Condition(self.lock)
        self.deadline_ready = threading.Condition(self.lock)
        self.closed = False
        self.namespace = namespace
        self.epoch = 0  # of the namespace
        self.index = index
        self.jobs = JobBook()
        self.promises = Promises()
        # Stores
        self.pending: dict[bytes, StoreTicket] = {}
        self.stores: deque[StoreTicket | None] = deque()  # None: close what is being filled
        self.packing: StoreTicket | None = None
        # Open ones, by tenant and page length.
        self.open_objects: dict[tuple[bytes, int], OpenObject] = {}
        self.uploads: deque[OpenObject] = deque()
        self.uploading: dict[OpenObject, None] = {}
        self.staged_bytes = 0  # raw bytes of pages submitted and not settled
        self.write_budget = DailyBudget(settings.writes_per_day, clock)
        self.request_budget = DailyBudget(settings.requests_per_day, clock)
        # Loads, and reads of manifests, which go behind them
        self.loads: deque[LoadSpan] = deque()
        self.load_tickets: dict[LoadTicket, None] = {}  # whose jobs are not done
        self.background_reads: deque[Callable[[], None]] = deque()
        self.num_background_reads = 0
        # Purges and names
        self.bounds = Bounds()
        self.forgotten = Forgotten()
        self.pins = ObjectPins(settings.capacity_bytes, index, wall_clock)
        self.purge_orders: deque[PurgeOrder] = deque()
        self.on_erased: OnErased | None = None
        self.untold: deque[Erasure] = deque()
        # Keys and tenants of those (None: everyone's), not stored until the owner knows.
        self.barred: set[bytes | None] = set()
        self.refresh_orders: list[RefreshOrder] = []
        self.skipped: OrderedDict[str, None] = OrderedDict()  # names not to read again
        self.suspects: OrderedDict[str, None] = OrderedDict()  # whose manifests did not verify once
        self.writer = secrets.randbits(32)
        self._last_ms = self._sequence = 0
        # Counters
        self.discovery = DiscoveryCounts()
        self.num_pages_stored = 0
        self.num_pages_loaded = 0
        self.num_pages_erased = 0
        self.num_objects_stored = 0
        self.bytes_stored = 0
        self.bytes_written = 0
        self.bytes_loaded = 0

    @property
    def layout(self) -> Layout:
        return Layout(self.namespace)

    def now_ms(self) -> int:
        """Return the time for names: it never falls."""
        self._last_ms = max(self._last_ms, int(self.wall_clock() * 1000))
        return self._last_ms

    def next_id(self, tenant: bytes, not_before: int = 0) -> ObjectId:
        """Return a name for an object opened now: later than every purge that concerns it. What is
        stored again after it was forgotten has its own time, ``not_before``."""
        opened = max(self.now_ms(), self.bounds.of(tenant) + 1)
        # A purge by a clock that is far ahead must not take the time of all our names with it.
        if opened <= self._last_ms + _MAX_SKEW_MS:
            self._last_ms = opened
        self._sequence = (self._sequence + 1) % _MAX_SEQUENCE
        opened = max(opened, not_before)
        return ObjectId(opened, self.writer, self._sequence, tenant_tag(tenant))

    def suspect(self, name: str) -> None:
        """Note a manifest that does not verify. It may have been damaged on its way: it is read
        once more, and skipped the second time."""
        if name in self.suspects:
            del self.suspects[name]
            self.skip(name)
            return
        self.suspects[name] = None
        if len(self.suspects) > _MAX_SKIPPED:
            self.suspects.popitem(last=False)

    def skip(self, name: str) -> None:
        """Do not read the manifest again while the name is remembered."""
        self.skipped[name] = None
        if len(self.skipped) > _MAX_SKIPPED:
            self.skipped.popitem(last=False)

    def object_bytes_of(self, tenant: bytes) -> int:
        """Return the payload of a full object: at most a quarter of a tenant's share, or no object
        could go for the next."""
        share = self.settings.max_tenant_bytes
        if share is None or tenant == NO_TENANT:
            return self.settings.object_bytes
        return min(self.settings.object_bytes, share // 4)

    def in_staging(self) -> list[OpenObject]:
        """Return every object that is being filled, waits or is uploaded."""
        return [*self.open_objects.values(), *self.uploads, *self.uploading]

    def learn(self, manifest: Manifest) -> bool:
        """Point to the pages of an object that were not forgotten; false where all were."""
        dead = self.forgotten.dead(manifest)
        if dead.all():
            return False
        if len(self.pins):
            keys = [bytes(key) for key in manifest.pages["key"][~dead]]
            self.pins.learns(str(manifest.object_id), keys)
        self.index.put(manifest, dead)
        return True

    # ---- Ends of stores ----

    def settle(self, open_object: OpenObject, reason: Reason) -> None:
        """Finish what is in an object, whatever became of it."""
        opened = open_object.object_id.unix_ms
        for ticket, position, key in open_object.entries:
            is_dead = reason is Reason.OK and self.forgotten.of(key) >= opened
            ticket.job.reasons[position] = Reason.CANCELLED if is_dead else reason
            self.settle_pages(ticket, [key], freed_bytes=0)
        self.staged_bytes -= open_object.staged_bytes
        open_object.staged_bytes = 0
        open_object.entries = []

    def settle_pages(self, ticket: StoreTicket, keys: list[bytes], freed_bytes: int) -> None:
        """Settle pages whose reasons are set; ``freed_bytes`` of staging are free."""
        self.staged_bytes -= freed_bytes
        for key in keys:
            if self.pending.get(key) is ticket:
                del self.pending[key]
        ticket.num_left -= len(keys)
        if ticket.num_left == 0:
            self.jobs.finish(ticket.job)

    def refuse(self, ticket: StoreTicket, positions: list[int], reason: Reason) -> None:
        """Settle pages of a ticket that were not copied and never will be."""
        if not positions:
            return
        run = ticket.job.run
        sizes = 0
        for position in positions:
            ticket.job.reasons[position] = reason
            sizes += sum(segment.nbytes for segment in run.pages[position])
        self.settle_pages(ticket, [run.keys[p] for p in positions], sizes)

    def finish_load(self, ticket: LoadTicket) -> None:
        """Finish a load; called by the thread that its ticket told to."""
        job = ticket.job
        del self.load_tickets[ticket]
        for is_ok, page in zip(job.ok, job.run.pages, strict=True):
            if is_ok:
                self.num_pages_loaded += 1
                self.bytes_loaded += sum(segment.nbytes for segment in page)
        self.jobs.finish(job)

"""``ObjectEngine``: the tier engine over a bucket or a shared directory.

Threads: one packs stores into objects, ``num_connections // 4`` upload them, ``num_connections``
read, one finishes loads at their deadlines, one looks for what other servers did and makes
erasures durable. What they share, and its one lock, is in ``state``.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError
from sglang_tiered.storage.base import (
    NO_TENANT,
    BucketTier,
    Health,
    Job,
    JobKind,
    LookupResult,
    Reason,
    Run,
    Stop,
)
from sglang_tiered.storage.object.breaker import Breaker
from sglang_tiered.storage.object.client import open_client
from sglang_tiered.storage.object.discovery import Discovery
from sglang_tiered.storage.object.dropping import drop_stores
from sglang_tiered.storage.object.forgetting import set_owner
from sglang_tiered.storage.object.format import NAMESPACE_BYTES, NO_CODEC
from sglang_tiered.storage.object.index import ObjectIndex
from sglang_tiered.storage.object.loading import DeadlineClock, Loader, submit_load
from sglang_tiered.storage.object.packing import Packer, submit_store
from sglang_tiered.storage.object.pending import RefreshOrder
from sglang_tiered.storage.object.pinning.keeper import pin, unpin
from sglang_tiered.storage.object.purging import Purger, erase
from sglang_tiered.storage.object.state import ObjectState
from sglang_tiered.storage.object.stats import ObjectStats, engine_stats, object_stats
from sglang_tiered.storage.object.uploading import Uploader
from sglang_tiered.storage.promises import all_true, is_true
from sglang_tiered.storage.region.pinning.pins import Pin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.codecs.base import PageCodec
    from sglang_tiered.storage.base import EngineStats, Erasure, TenantUsage
    from sglang_tiered.storage.object.failures import RequestError
    from sglang_tiered.storage.object.settings import ObjectSettings
    from sglang_tiered.storage.region.pinning.pins import PinInfo, PinRefusal

__all__ = ["ObjectEngine"]

logger = logging.getLogger(__name__)

_MAX_CLOSE_S = 10.0


class ObjectEngine(BucketTier):
    """Pages in the objects of one namespace under one URL, shared with every engine that has both.

    Opening touches nothing and returns at once: what is in the bucket becomes known in the
    background, and a bucket that cannot be reached is ``MISS_ONLY``. Raises ``ConfigError`` for an
    invalid URL or without obstore, ``ValueError`` for a namespace of the wrong length.

    ``namespace`` digests everything that gives the bytes their meaning. With ``page_codec``, which
    must be the one that the settings name, pages are encoded, and live under a namespace of their
    own. ``clock`` times lingering, deadlines and pauses, ``wall_clock`` the names of objects.
    """

    def __init__(
        self,
        settings: ObjectSettings,
        *,
        namespace: bytes,
        page_codec: PageCodec | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        name = NO_CODEC if page_codec is None else page_codec.name
        if name != settings.codec:
            raise ConfigError(f"the object tier is set to codec {settings.codec}, not {name}")
        self._codec = page_codec
        self._settings = settings
        self._breaker = breaker = Breaker(clock)
        self._client = client = open_client(settings, on_outcome=self._note)
        index = ObjectIndex(settings.max_pages, settings.capacity_bytes, settings.max_tenant_bytes)
        self._state = state = ObjectState(
            settings, self._own(namespace), page_codec, index, clock, wall_clock
        )
        self._deadlines = DeadlineClock(state)
        fault = self._fault
        discovery = Discovery(state, client, breaker, Purger(state, client))
        uploader, loader = Uploader(state, client, breaker, fault), Loader(state, client, fault)
        num_uploaders = max(settings.num_connections // 4, 1)
        self._threads = [
            _thread("object-packer", Packer(state, fault).run),
            _thread("object-deadlines", self._deadlines.run),
            _thread("object-discovery", discovery.run),
            *(_thread(f"object-uploader-{i}", uploader.run) for i in range(num_uploaders)),
            *(_thread(f"object-loader-{i}", loader.run) for i in range(settings.num_connections)),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def namespace(self) -> bytes:
        """Return the namespace of what is in the bucket: for the collector."""
        return self._state.namespace

    @property
    def health(self) -> Health:
        return self._diagnosis()[0]

    def _own(self, namespace: bytes) -> bytes:
        """Return the namespace in the bucket: encoded bytes never share one with exact ones."""
        if len(namespace) != NAMESPACE_BYTES:
            raise ValueError(f"a namespace has {len(namespace)} bytes, must be {NAMESPACE_BYTES}")
        if self._codec is None:
            return namespace
        return hashlib.sha256(namespace + self._codec.name.encode("ascii")).digest()

    def _note(self, error: RequestError | None) -> None:
        """Note the outcome of a request that reads."""
        was_open = self._breaker.is_open
        if error is None:
            self._breaker.succeeded()
            if was_open:
                logger.info("%s answers again", self._settings.url)
            return
        self._breaker.failed(error.clause)
        if self._breaker.is_open and not was_open:
            with self._state.lock:  # its probes are the discovery's
                self._state.discovery_ready.notify_all()
            logger.warning(
                "%s: %s; every lookup misses until it works again",
                self._settings.url,
                error.clause,
            )

    def _fault(self, what: str) -> None:
        """Report an exception of one of the engine's threads, which goes on."""
        logger.exception(
            "%s: internal error while %s; every lookup misses until the bucket has answered",
            self._settings.url,
            what,
        )
        self._breaker.fault(f"internal error while {what}")
        with self._state.lock:  # its probes are the discovery's
            self._state.discovery_ready.notify_all()

    # ---- Lookups ----

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        state = self._state
        if state.closed or self._breaker.is_open:
            return LookupResult(0, Stop.UNHEALTHY)
        with state.lock:
            num_hits = state.index.num_leading(keys)
            if num_hits == len(keys):
                return LookupResult(num_hits, Stop.END)
            stop = Stop.PENDING if keys[num_hits] in state.pending else Stop.MISS
            return LookupResult(num_hits, stop)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self._state.closed or self._breaker.is_open:
            return [False] * len(keys)
        with self._state.lock:
            return self._state.index.holds(keys)

    def some_keys(self, limit: int) -> list[bytes]:
        if self._state.closed or self._breaker.is_open:
            return []
        with self._state.lock:
            return self._state.index.some_keys(limit)

    # ---- Stores ----

    def submit_store(self, run: Run) -> Job:
        """Store as the contract says. The job is done when the object that holds its pages and the
        manifest are in the bucket, ``linger_s`` later if that object does not fill up before."""
        return submit_store(self._state, run, accepts=self._breaker.accepts_stores())

    def flush(self, timeout_s: float) -> bool:
        """Flush as the contract says, and announce it: objects that are being filled are closed."""
        state = self._state
        with state.lock:
            if state.closed:
                return False
            jobs = [job for job in state.jobs.inflight if job.kind is JobKind.STORE]
            self._close_fillings()
        failed = {Reason.IO_ERROR, Reason.REJECTED}
        return is_true(all_true([], jobs), timeout_s) and not any(
            failed & set(job.reasons) for job in jobs
        )

    def _close_fillings(self) -> None:
        self._state.stores.append(None)
        self._state.store_ready.notify()

    # ---- Loads ----

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        return submit_load(
            self._state,
            run,
            deadlines=self._deadlines,
            deadline_s=deadline_s,
            client=self._client,
            answers=not self._breaker.is_open,
        )

    # ---- Others ----

    def refresh(self, timeout_s: float, *, full: bool = False) -> bool:
        """Look for other writers' manifests now; with ``full`` also for what was deleted. True
        when done; false when the time ran out, the bucket refused or the engine is closed."""
        state = self._state
        order = RefreshOrder(full, state.promises.make())
        with state.lock:
            if state.closed:
                return False
            state.refresh_orders.append(order)
            state.discovery_ready.notify_all()
        return is_true(order.succeeded, timeout_s)

    def set_namespace(self, namespace: bytes) -> None:
        own, state = self._own(namespace), self._state
        with state.lock:
            if own == state.namespace:
                return
            state.namespace = own
            state.epoch += 1
            state.index.clear()
            state.pending.clear()
            state.skipped.clear()
            state.bounds.change_namespace()
            state.pins.clear()
            self._close_fillings()
            state.discovery_ready.notify_all()

    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        """Erase as the contract says: everything is what this namespace has."""
        return erase(self._state, what, local)

    def report_erased(self, told: Callable[[Sequence[Erasure]], None]) -> None:
        set_owner(self._state, told)

    # ---- Pins ----

    def pin(
        self,
        name: str,
        keys: Iterable[bytes],
        tenant: bytes = NO_TENANT,
        until_s: float | None = None,
        data: bytes = b"",
    ) -> Future[bool] | PinRefusal:
        return pin(self._state, Pin.checked(name, keys, tenant, until_s, data))

    def unpin(self, name: str) -> Future[bool]:
        return unpin(self._state, name)

    def has_pin(self, name: str) -> bool:
        state = self._state
        with state.lock:
            state.pins.expire()
            return state.pins.book.get(name) is not None

    def pin_notes(self, tenant: bytes) -> list[tuple[str, bytes]]:
        with self._state.lock:
            return self._state.pins.book.notes_of(tenant)

    def pins(self) -> list[PinInfo]:
        state = self._state
        with state.lock:
            state.pins.expire()
            names = state.pins.book.of_tenant(None)
        infos = []
        for name in names:
            with state.lock:
                info = state.pins.info(name)
            if info is not None:
                infos.append(info)
        return infos

    @property
    def pinned_bytes(self) -> int:
        with self._state.lock:
            return self._state.pins.pinned_bytes

    @property
    def pin_bound_bytes(self) -> int:
        return self._state.pins.bound_bytes

    # ---- What there is ----

    def tenants(self, limit: int) -> list[TenantUsage]:
        with self._state.lock:
            usage = self._state.index.usage()
        return sorted(usage, key=lambda entry: -entry.physical_bytes)[:limit]

    def stats(self) -> EngineStats:
        return engine_stats(self._state, *self._diagnosis())

    def object_stats(self) -> ObjectStats:
        """Return what ``stats`` has no place for: requests, the breaker, objects, discovery."""
        return object_stats(self._state, self._client, self._breaker)

    def _diagnosis(self) -> tuple[Health, str]:
        if self._state.closed:
            return Health.FAILED, "closed"
        return self._breaker.diagnosis()

    def close(self) -> None:
        """Close as the contract says; ``flush`` before it keeps what is being filled. Requests
        under way are waited for, ten seconds at most, then left to their threads."""
        state = self._state
        with state.lock:
            if state.closed:
                return
            state.closed = True
            uploading = list(state.uploading)
            if state.packing is not None:
                state.packing.dropped = True
            drop_stores(state, None, None, but=uploading)
            for ready in (
                state.load_ready,
                state.store_ready,
                state.upload_ready,
                state.upload_done,
                state.discovery_ready,
                state.deadline_ready,
            ):
                ready.notify_all()
        state.promises.close()
        deadline = time.monotonic() + min(self._settings.request_timeout_s, _MAX_CLOSE_S)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if not any(thread.is_alive() for thread in self._threads):
            return
        logger.warning(
            "%s does not answer; the engine is closed without waiting for it", self._settings.url
        )
        with state.lock:
            drop_stores(state, None, None)
            tickets = list(state.load_tickets)
        for ticket in tickets:
            if ticket.expire():
                with state.lock:
                    state.finish_load(ticket)

    def check_integrity(self) -> None:
        state = self._state
        with state.lock:
            state.index.check_integrity()
            left = state.jobs.num_inflight
            assert bool(state.pending) <= bool(left), f"{len(state.pending)} pending, no job"
            assert left or not state.staged_bytes, f"{state.staged_bytes} bytes staged, no job"
            assert left or not state.load_tickets, f"{len(state.load_tickets)} loads, no job"


def _thread(name: str, target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)

"""``BucketEngine``: the tier engine over a bucket or a shared directory.

Threads: ``num_connections`` load pages, half as many store them, and one finishes loads at their
deadlines. One looks for what other servers did, one makes erasures and pins durable, and on demand
one collects. What they share, and its one lock, is in ``state``.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import (
    NO_TENANT,
    Health,
    JobKind,
    Reason,
    Tier,
    TierEngine,
    TierStats,
)
from sglang_tiered.storage.bucket.collect import Collector
from sglang_tiered.storage.bucket.names import NAMESPACE_BYTES
from sglang_tiered.storage.bucket.requests import BucketError, Requests
from sglang_tiered.storage.bucket.state import BucketState
from sglang_tiered.storage.bucket.sync import Discovery, Keeper
from sglang_tiered.storage.bucket.transfers import Transfers
from sglang_tiered.storage.jobs import Workers, call_each
from sglang_tiered.storage.promises import all_true, ended, is_true
from sglang_tiered.storage.region.pins import Pin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.remote_config import ObjectConfig
    from sglang_tiered.storage.base import (
        Erasure,
        Job,
        PinInfo,
        PinRefusal,
        Run,
    )
    from sglang_tiered.storage.bucket.names import PageName
    from sglang_tiered.storage.encoding import PageEncoding


logger = logging.getLogger(__name__)

_MAX_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class BucketStats:
    """Counters since the engine was opened, and gauges of now. Reading them takes no I/O."""

    requests: dict[str, int]  # by kind: put, get, list, delete, head
    trouble: str  # why writes or deletes fail now; empty where they work
    refused: dict[str, int]  # 1 for each of put and delete that failed last, 0 for others
    listed_bytes: int | None  # by this server's last collection; None before one


class BucketEngine(TierEngine):
    """The pages of one namespace under one URL, shared with every engine that has both.

    Opening touches nothing and returns at once: what is in the bucket becomes known in the
    background, and a bucket that cannot be reached is ``MISS_ONLY``. Raises ``ConfigError``
    without obstore, ``ValueError`` for a namespace of the wrong length.

    ``namespace`` digests everything that gives the bytes their meaning. Pages are put as they come,
    encoded or not; ``encoding`` decodes those that are loaded as longer ones. ``clock`` times
    deadlines and pauses, ``wall_clock`` the names of pages.
    """

    tier = Tier.OBJECT

    def __init__(
        self,
        settings: ObjectConfig,
        *,
        namespace: bytes,
        encoding: PageEncoding | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        _check(namespace)
        self._settings = settings
        self._requests = requests = Requests(
            settings.url,
            timeout_s=settings.request_timeout_s,
            clock=clock,
            on_open=self._wake_discovery,
        )
        self._state = state = BucketState(settings, namespace, encoding, clock, wall_clock)
        self._transfers = transfers = Transfers(state, requests)
        self._collector: Collector | None = None
        self._stop = threading.Event()
        discovery = Discovery(state, requests)
        self._workers = workers = Workers()
        workers.start("bucket-deadlines", transfers.run_deadlines)
        workers.start("bucket-discovery", discovery.run)
        workers.start("bucket-keeper", Keeper(state, requests, discovery).run)
        workers.start("bucket-transfer", transfers.run, max(settings.num_connections, 2))

    @property
    def namespace(self) -> bytes:
        """Return the namespace of what is in the bucket."""
        return self._state.namespace

    @property
    def health(self) -> Health:
        return self._diagnosis()[0]

    def start_collecting(self) -> None:
        """Keep the namespace in bounds from now on, in turn with the other servers that have it."""
        capacity_bytes, ttl_s = self._settings.capacity_bytes, self._settings.ttl_s
        self._collector = Collector(self._requests, capacity_bytes=capacity_bytes, ttl_s=ttl_s)
        run = partial(self._collector.run_in_background, self._stop, lambda: self.namespace)
        self._workers.start("bucket-collector", run)

    def _wake_discovery(self) -> None:
        """Let the discovery probe a bucket that does not answer."""
        with self._state.lock:
            self._state.discovery_ready.notify_all()

    # ---- Lookups ----

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self._state.closed or self._requests.breaker.is_open:
            return [False] * len(keys)
        with self._state.lock:
            return self._state.index.holds(keys)

    def confirm(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Ask the bucket whether it has each page that is known here, and forget it where not: for
        up to ten minutes nobody hears of what others delete. What is not answered in time is false.
        Blocks."""
        state = self._state
        with state.lock:
            layout, names = state.layout, [state.index.get(key) for key in keys]

        def is_there(name: PageName | None) -> bool:
            if name is None:
                return False
            try:
                if self._requests.modified(name.path(layout)) is not None:
                    return True
            except BucketError:
                return False
            with state.lock:
                state.forget(name, layout)
            return False

        asked = call_each(is_there, names, self._settings.num_connections)
        wait(asked, timeout_s)
        # What is still asked ends with its own timeout.
        return [not each.cancel() and each.done() and each.result() for each in asked]

    # ---- Jobs ----

    def submit_store(self, run: Run) -> Job:
        return self._transfers.submit_store(run)

    def flush(self, timeout_s: float) -> bool:
        state = self._state
        with state.lock:
            if state.closed:
                return False
            jobs = [job for job in state.jobs.inflight if job.kind is JobKind.STORE]
        failed = {Reason.IO_ERROR, Reason.REJECTED}
        return is_true(all_true([], jobs), timeout_s) and not any(
            failed & set(job.reasons) for job in jobs
        )

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        return self._transfers.submit_load(run, deadline_s)

    # ---- Others ----

    @property
    def takes_stores(self) -> bool:
        """Whether stores succeeded lately, and the daily budgets have room for a page like the last
        one. Memory only."""
        state = self._state
        has_room = state.write_budget.holds(state.page_bytes) and state.request_budget.holds(1)
        return has_room and self._requests.breaker.accepts_stores()

    @property
    def has_listed(self) -> bool:
        """Return whether it is known what the namespace held."""
        with self._state.lock:
            return self._state.listed_epoch == self._state.epoch

    def refresh(self, timeout_s: float, *, full: bool = False) -> bool:
        """Look for what others did now; with ``full`` also for what was deleted. True when done;
        false when the time ran out, the bucket refused or the engine is closed."""
        state = self._state
        succeeded = state.promises.make()
        with state.lock:
            if state.closed:
                return False
            state.refreshes.append((full, succeeded))
            state.discovery_ready.notify_all()
        return is_true(succeeded, timeout_s)

    def set_namespace(self, namespace: bytes, *, keep: bool = True) -> None:
        _check(namespace)
        state = self._state
        with state.lock:
            if namespace == state.namespace:
                return
            state.namespace = namespace
            state.epoch += 1
            state.learned = state.seen = 0  # of the new one other erasures count, too
            state.index.clear()
            state.pending.clear()
            state.skipped.clear()
            state.pins.clear()
            state.discovery_ready.notify_all()

    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        """Erase as the contract says: everything is what this namespace has. What another server
        told, that makes durable, or after some minutes this one."""
        state = self._state
        with state.lock:
            if state.closed or what.is_empty:
                return ended(what.is_empty)
            if not what.spread:
                for each in what.pieces:
                    state.hide_told(each)
                return ended(True)
            jobs = state.jobs.about(what)
            orders = [state.order(each) for each in what.records]
            state.ask_keeper()
        return state.promises.watch(all_true([order.durable for order in orders], jobs))

    def report_erased(self, told: Callable[[Sequence[Erasure]], None]) -> None:
        state = self._state
        with state.lock:
            state.on_erased = told
            if state.untold:
                state.seen = 0  # what the owner stores may be from before any of them
            state.discovery_ready.notify_all()

    # ---- Pins ----

    def pin(
        self,
        name: str,
        keys: Iterable[bytes],
        tenant: bytes = NO_TENANT,
        until_s: float | None = None,
        data: bytes = b"",
        *,
        only_asks: bool = False,
    ) -> Future[bool] | PinRefusal:
        state, wanted = self._state, Pin.checked(name, keys, tenant, until_s, data)
        with state.lock:
            if state.closed:
                return ended(False)
            state.pins.expire()
            refusal = state.pins.refusal(wanted)
            if refusal is not None or only_asks:
                return refusal or ended(True)
            return self._change_pin(name, wanted)

    def unpin(self, name: str) -> Future[bool]:
        with self._state.lock:
            return ended(False) if self._state.closed else self._change_pin(name, None)

    def _change_pin(self, name: str, pin: Pin | None) -> Future[bool]:
        durable = self._state.promises.make()
        self._state.pins.change(name, pin, durable)
        self._state.ask_keeper()
        return durable

    def has_pin(self, name: str) -> bool:
        with self._state.lock:
            self._state.pins.expire()
            return self._state.pins.book.get(name) is not None

    def pin_notes(self, tenant: bytes) -> list[tuple[str, bytes]]:
        with self._state.lock:
            return self._state.pins.book.notes_of(tenant)

    def pins(self) -> list[PinInfo]:
        state = self._state
        with state.lock:
            state.pins.expire()
            names = state.pins.book.of_tenant(None)
        infos = []
        for name in names:  # lookups wait for one at a time
            with state.lock:
                infos.append(state.pins.info(name))
        return [info for info in infos if info is not None]

    @property
    def pinned_bytes(self) -> int:
        with self._state.lock:
            return self._state.index.pinned_bytes

    @property
    def pin_bound_bytes(self) -> int:
        return self._state.pins.book.bound_bytes

    # ---- What there is ----

    def stats(self) -> TierStats:
        state = self._state
        health, reason = self._diagnosis()
        with state.lock:
            index = state.index
            return TierStats(
                health=health,
                health_reason=reason,
                num_pages=index.num_pages,
                stored_bytes=index.stored_bytes,
                physical_bytes=index.stored_bytes,
                capacity_bytes=self._settings.capacity_bytes,
                num_pages_stored=state.num_pages_stored,
                num_pages_loaded=state.num_pages_loaded,
                num_pages_evicted=index.num_pages_evicted,
                bytes_stored=state.bytes_stored,
                bytes_written=state.bytes_written,
                bytes_loaded=state.bytes_loaded,
                num_inflight_jobs=state.jobs.num_inflight,
                queued_store_bytes=state.staged_bytes,
                num_tenants=index.num_tenants,
                num_pages_erased=state.num_pages_erased,
                reasons=dict(state.jobs.outcomes),
                store_durations=state.jobs.store_durations.take(),
            )

    def object_stats(self) -> BucketStats:
        troubles = self._requests.troubles
        collected = None if self._collector is None else self._collector.last
        return BucketStats(
            requests=self._requests.requests,
            trouble="; ".join(troubles.values()),
            refused={kind: int(kind in troubles) for kind in ("put", "delete")},
            listed_bytes=None if collected is None else collected.page_bytes,
        )

    def _diagnosis(self) -> tuple[Health, str]:
        if self._state.closed:
            return Health.FAILED, "closed"
        return self._requests.breaker.diagnosis()

    def close(self) -> None:
        """Close as the contract says. Requests under way are waited for, ten seconds at most, then
        left to their threads."""
        state = self._state
        with state.lock:
            if state.closed:
                return
            state.closed = True
            state.cancel(list(state.uploads))
            state.notify_all()
        self._stop.set()
        self._requests.close()
        state.promises.close()
        if self._workers.join(min(self._settings.request_timeout_s, _MAX_CLOSE_S)):
            return
        logger.warning(
            "%s does not answer; the engine is closed without waiting for it", self._settings.url
        )
        with state.lock:
            for upload in [each for each in state.uploading if each.is_copied]:
                state.settle(upload, Reason.CANCELLED)
            for load in list(state.open_loads):
                state.expire(load)

    def check_integrity(self) -> None:
        state = self._state
        with state.lock:
            state.index.check_integrity()
            left = state.jobs.num_inflight
            assert bool(state.pending) <= bool(left), f"{len(state.pending)} pending, no job"
            assert left or not state.staged_bytes, f"{state.staged_bytes} bytes staged, no job"
            assert left or not state.open_loads, f"{len(state.open_loads)} loads, no job"


def _check(namespace: bytes) -> None:
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"a namespace has {len(namespace)} bytes, must be {NAMESPACE_BYTES}")

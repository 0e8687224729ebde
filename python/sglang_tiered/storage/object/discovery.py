"""How an engine learns of what others store, purge and delete: one thread that lists and reads.

A pass lists the purges and then the manifests from a cursor on: the time of the latest manifest
seen, less a look-back for objects that take long from their opening to their manifest and for
clocks that differ. A full listing now and then finds what came later still, and notices what is
gone. Manifests are read over the connections of loads, behind these, the newest first.

The same thread makes purges durable, and its passes are the probes of an open breaker.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.object.failures import Failure, RequestError
from sglang_tiered.storage.object.forgetting import apply_forget, note, tell
from sglang_tiered.storage.object.format import (
    MAX_MANIFEST_BYTES,
    MAX_PURGE_BYTES,
    NO_CODEC,
    Purge,
    other_version,
    unpack_manifest,
    unpack_purge,
)
from sglang_tiered.storage.object.names import parse_path
from sglang_tiered.storage.object.pinning.keeper import PinKeeper
from sglang_tiered.storage.object.purging import apply_remote_purge
from sglang_tiered.storage.promises import keep

if TYPE_CHECKING:
    from sglang_tiered.storage.object.breaker import Breaker
    from sglang_tiered.storage.object.client import ObjectClient
    from sglang_tiered.storage.object.names import Layout
    from sglang_tiered.storage.object.pending import RefreshOrder
    from sglang_tiered.storage.object.purging import Purger
    from sglang_tiered.storage.object.state import ObjectState

__all__ = ["Discovery"]

logger = logging.getLogger(__name__)

FULL_LISTING_S = 600.0
_SKEW_MS = 60_000
_BATCH = 64
_MAX_PURGES_SEEN = 65_536
_KEEP_MS = 7 * 86_400_000  # a tombstone that is younger has not gone, whatever a listing shows


class _PassOver(Exception):  # noqa: N818
    """Raised when the namespace changed or the engine was closed: what was found does not count."""


class Discovery:
    """Looks for what other servers did; ``run`` is the body of the discovery thread."""

    def __init__(
        self, state: ObjectState, client: ObjectClient, breaker: Breaker, purger: Purger
    ) -> None:
        self._state = state
        self._client = client
        self._breaker = breaker
        self._purger = purger
        self._pins = PinKeeper(state, client)
        settings = state.settings
        self._look_back_ms = _SKEW_MS + int(
            1000 * (2 * settings.linger_s + 4 * settings.request_timeout_s)
        )
        self._epoch = -1  # of the namespace that the cursor is of
        self._cursor_ms = 0
        self._last_full = 0.0
        self._next_at = state.clock()
        self._purges_seen: OrderedDict[str, None] = OrderedDict()

    def run(self) -> None:
        while True:
            orders = self._await_work()
            if orders is None:
                return
            self._serve_purges()
            started = time.monotonic()
            succeeded = False
            try:
                self._pass(any(order.full for order in orders))
                succeeded = True
                self._purger.retry()
                self._pins.retry()
            except (RequestError, _PassOver):
                pass  # counted by the client; the breaker knows
            except BaseException:  # a panic of the library is no Exception
                logger.exception("internal error while listing manifests; known pages stay")
            for order in orders:
                keep(order.succeeded, succeeded)
            with self._state.lock:
                self._state.discovery.num_passes += 1
                self._state.discovery.last_pass_s = time.monotonic() - started
            self._next_at = self._state.clock() + self._state.settings.refresh_s

    def _await_work(self) -> list[RefreshOrder] | None:
        """Return the orders that the pass now due is for; None when the engine is closed."""
        state = self._state
        while True:
            with state.lock:
                if state.closed:
                    return None
                wait_s = self._next_at - state.clock()
                if self._breaker.is_open:
                    wait_s = self._breaker.wait_s()
                elif self._epoch != state.epoch:
                    wait_s = 0.0
                if state.refresh_orders or wait_s <= 0:
                    orders = state.refresh_orders
                    state.refresh_orders = []
                    return orders
                is_told = not state.untold or state.on_erased is None
                if is_told and not state.purge_orders and not state.pins.orders:
                    state.discovery_ready.wait(wait_s)
                    continue
            self._serve_purges()

    def _serve_purges(self) -> None:
        while True:
            with self._state.lock:
                if self._state.closed or not self._state.purge_orders:
                    break
                order = self._state.purge_orders.popleft()
            self._purger.serve(order)
        tell(self._state)
        while True:
            with self._state.lock:
                if self._state.closed or not self._state.pins.orders:
                    return
                pin_order = self._state.pins.orders.popleft()
            self._pins.serve(pin_order)

    # ---- A pass ----

    def _pass(self, full: bool) -> None:
        state = self._state
        with state.lock:
            epoch, layout = state.epoch, state.layout
            now_ms = int(state.wall_clock() * 1000)
        full = full or epoch != self._epoch
        full = full or state.clock() - self._last_full >= FULL_LISTING_S
        after = None if full else f"{max(self._cursor_ms - self._look_back_ms, 0):012x}"
        self._purger.sweep()
        if epoch != self._epoch:
            self._purges_seen.clear()  # those of everyone are not kept over a change of namespace
        self._read_purges(layout, after, epoch, now_ms)
        self._pins.look(layout, epoch)
        latest_ms = self._read_manifests(layout, after, epoch, now_ms)
        self._epoch = epoch
        self._cursor_ms = max(min(latest_ms, now_ms), 0 if full else self._cursor_ms)
        if full:
            self._last_full = state.clock()
            with state.lock:
                state.pins.look_again()
                state.discovery.num_full_listings += 1

    def _check(self, epoch: int) -> None:
        """End the pass when the namespace changed or the engine was closed. Needs the lock."""
        if self._state.closed or self._state.epoch != epoch:
            raise _PassOver

    def _read_purges(self, layout: Layout, after: str | None, epoch: int, now_ms: int) -> None:
        bounds: set[int] = set()
        for chunk in self._client.listing(layout.purges, after=after):
            for listed in chunk:
                named = parse_path(listed.path)
                if named is None:
                    continue
                bounds.add(named.unix_ms)
                if listed.path in self._purges_seen:
                    continue
                try:
                    data = self._client.get(listed.path, MAX_PURGE_BYTES)
                except RequestError as error:
                    if error.failure is Failure.NOT_FOUND:
                        continue
                    raise
                purge = unpack_purge(data)
                is_damaged = purge is None or purge.namespace != layout.namespace
                if purge is None or is_damaged:
                    # Its name still says when: rather forget too much than serve what was purged.
                    purge = Purge(layout.namespace, None, named.unix_ms)
                with self._state.lock:
                    self._check(epoch)
                    if purge.keys:
                        apply_forget(self._state, purge.keys, purge.bound_ms)
                    else:
                        apply_remote_purge(self._state, purge)
                    if named.writer != self._state.writer and not is_damaged:
                        keys, name = purge.keys or None, str(named).encode()
                        note(self._state, Erasure(keys, purge.tenant, name, spread=False))
                tell(self._state, only_many=True)
                self._purges_seen[listed.path] = None
                if len(self._purges_seen) > _MAX_PURGES_SEEN:
                    self._purges_seen.popitem(last=False)
        tell(self._state)
        if after is None:
            with self._state.lock:  # no listing is as old as that
                self._state.forgotten.keep_only(bounds, now_ms - _KEEP_MS)

    def _read_manifests(self, layout: Layout, after: str | None, epoch: int, now_ms: int) -> int:
        """Read manifests; returns the time of the latest one."""
        state = self._state
        full = after is None
        ttl_s = state.settings.ttl_s
        oldest = "" if ttl_s is None else f"{max(now_ms - int(ttl_s * 1000), 0):012x}"
        with state.lock:
            state.index.drop_objects(state.index.expired(oldest))
            # What is young may be missing from a listing that is not up to date.
            young = f"{max(now_ms - self._look_back_ms, 0):012x}"
            unseen = {name for name in state.index.names() if name < young} if full else set()
            limit = state.index.max_objects
            # What is too old, or older than all that the index has room for, may be pinned.
            seeks_pinned = full and state.pins.lack_pages()
        newest: list[str] = []  # heap of at most so many names as can be held
        latest_ms = 0
        for chunk in self._client.listing(layout.manifests, after=after):
            with state.lock:
                self._check(epoch)
                for listed in chunk:
                    named = parse_path(listed.path)
                    name = str(named)
                    if named is None:
                        continue
                    if named.unix_ms <= now_ms:  # no clock that is ahead may move the cursor
                        latest_ms = max(latest_ms, named.unix_ms)
                    unseen.discard(name)
                    is_over = name < oldest and not seeks_pinned
                    if is_over or named.unix_ms <= state.bounds.everyone:
                        continue
                    accepted = state.index.accepts(name, seeks_pinned)
                    if name in state.skipped or not accepted:
                        continue
                    if listed.size > MAX_MANIFEST_BYTES:
                        state.discovery.num_manifests_bad += 1
                        state.skip(name)
                    elif len(newest) < limit:
                        heapq.heappush(newest, name)
                    else:
                        heapq.heappushpop(newest, name)
        if unseen:
            with state.lock:
                self._check(epoch)
                state.discovery.num_objects_vanished += len(unseen)
                state.index.drop_objects(unseen)
        newest.sort(reverse=True)
        for start in range(0, len(newest), _BATCH):
            self._serve_purges()
            if not self._read_batch(
                layout, newest[start : start + _BATCH], epoch, oldest, seeks_pinned
            ):
                break  # full: the rest is older still
        return latest_ms

    def _read_batch(
        self, layout: Layout, names: list[str], epoch: int, oldest: str, seeks_pinned: bool
    ) -> bool:
        """Read manifests into the index; false when it took none of them."""
        state = self._state
        with state.lock:
            self._check(epoch)
            wanted = [name for name in names if state.index.accepts(name, seeks_pinned)]
            batch = _Batch(len(wanted))
            state.background_reads.extend(
                _ManifestRead(
                    state, self._client, layout, name, epoch, oldest, seeks_pinned, batch
                ).run
                for name in wanted
            )
            state.load_ready.notify_all()
            state.discovery_ready.wait_for(lambda: batch.num_left == 0 or state.closed)
            self._check(epoch)
        if batch.error is not None:
            raise batch.error
        return bool(wanted)


@dataclass(eq=False, slots=True)
class _Batch:
    """Manifests that are read together. Guarded by the state's lock."""

    num_left: int
    error: BaseException | None = None


@dataclass(eq=False, slots=True)
class _ManifestRead:
    """Reads one manifest; run by a loading thread."""

    state: ObjectState
    client: ObjectClient
    layout: Layout
    name: str
    epoch: int
    oldest: str  # by the time to live
    seeks_pinned: bool  # it may be none that the index has room for
    batch: _Batch

    def run(self) -> None:
        error: BaseException | None = None
        try:
            self._read()
        except RequestError as failed:
            if failed.failure is not Failure.NOT_FOUND:
                error = failed
        except BaseException as fault:  # the pass that waits for it says so
            error = fault
        with self.state.lock:
            self.batch.error = error or self.batch.error
            self.batch.num_left -= 1
            if not self.batch.num_left:
                self.state.discovery_ready.notify_all()

    def _read(self) -> None:
        data = self.client.get(self.layout.manifest(self.name))
        with self.state.lock:
            if self.state.epoch == self.epoch:
                self._take(data)

    def _take(self, data: memoryview) -> None:
        state, counts = self.state, self.state.discovery
        manifest = unpack_manifest(data)
        codec = NO_CODEC if state.codec is None else state.codec.name
        if manifest is None:
            if other_version(data) is None:
                counts.num_manifests_bad += 1
                state.suspect(self.name)
            else:
                counts.num_manifests_foreign += 1
                state.skip(self.name)
        elif str(manifest.object_id) != self.name:
            counts.num_manifests_bad += 1
            state.skip(self.name)
        elif (manifest.namespace, manifest.codec) != (self.layout.namespace, codec):
            counts.num_manifests_foreign += 1
            state.skip(self.name)
        elif manifest.object_id.unix_ms <= state.bounds.of(manifest.tenant):
            state.skip(self.name)
        elif state.index.accepts(self.name) and self.name >= self.oldest:
            counts.num_manifests_seen += 1
            if not state.learn(manifest):
                state.skip(self.name)
        elif state.pins.want(manifest):
            counts.num_manifests_seen += 1
            state.learn(manifest)
        elif self.seeks_pinned:
            state.skip(self.name)

"""What the syncer thread does: makes what is published durable, beside the stores. And the barrier
that every sync passes.

Durable means against loss of power; death of the process loses nothing that was written. Periodic
syncs and barriers happen here, so the writer never waits for a flush.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from typing import TYPE_CHECKING

from sglang_tiered.storage.promises import keep
from sglang_tiered.storage.region.part import StorePart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tiered.storage.region.device import FileDevice
    from sglang_tiered.storage.region.health import HealthMonitor
    from sglang_tiered.storage.region.part import Common
    from sglang_tiered.storage.region.regions import Region


logger = logging.getLogger(__name__)


class Barrier:
    """Syncs for every thread of a store. After a failed sync the next one succeeds, and what the
    first lost stays lost: its region is ``suspect`` from then on, and is never durable again."""

    def __init__(self, device: FileDevice, health: HealthMonitor) -> None:
        self._device = device
        self._health = health
        # The system tells a failure to one of two that sync a file at once.
        self._lock = threading.Lock()

    def sync(self, region: Region) -> None:
        """Make all that was written to a region durable. Raises ``OSError``, also for a region
        whose sync has failed before."""
        with self._lock:
            if region.suspect:
                raise OSError(errno.EIO, f"a sync of {region.name} has failed before")
            try:
                with self._health.watch():
                    self._device.sync(region.fd)
            except OSError:
                region.suspect = True
                raise

    def sync_names(self, regions: Iterable[Region]) -> None:
        """Make durable which files there are, those of these regions among them. Raises
        ``OSError``."""
        try:
            with self._health.watch():
                self._device.sync_directory()
        except OSError:
            for region in regions:
                region.suspect = region.suspect or not region.has_name
            raise


class SyncWorker(StorePart):
    """Makes pages durable; its ``run`` is the syncer thread. ``interval_s`` bounds how long a
    published page waits for its sync, beyond the time a sync takes. The thread does not end by an
    exception: without it nothing becomes durable, and no error would show it."""

    def __init__(self, common: Common, barrier: Barrier, interval_s: float) -> None:
        super().__init__(common)
        self._barrier = barrier
        self._interval_s = interval_s

    def run(self) -> None:
        """Sync until the store is closed and all that was written is sealed."""
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Wait for work and do it; false when it was the last."""
        state = self._state
        with state.lock:
            last = self._wait()
            orders, state.syncs = state.syncs, []
            dirty = [region for region in state.regions if region.dirty]
            state.any_dirty = False
            state.syncing = True
            for region in dirty:
                region.dirty = False
        durable = False
        try:
            durable = self._sync_all([region for region in dirty if not region.suspect])
        except Exception:
            logger.exception(
                "%s: internal error while syncing; lookups miss for a while, and it is tried again",
                self._directory,
            )
            self._health.fault("internal error while syncing")
            with state.lock:
                for region in dirty:  # next time
                    region.dirty = state.any_dirty = True
        with state.lock:
            state.syncing = False
        for order in orders:
            keep(order, durable)
        return not last

    def _wait(self) -> bool:
        """Wait until it is time to sync; returns whether it is the last time. The caller holds the
        lock."""
        state = self._state
        due: float | None = None
        while not state.written_all and not state.syncs:
            now = time.monotonic()
            if not state.any_dirty:
                due = None
            elif due is None:
                due = now + self._interval_s
            elif now >= due:
                break
            state.sync_ready.wait(None if due is None else due - now)
        return state.written_all

    def _sync_all(self, regions: list[Region]) -> bool:
        """Sync the regions and their names; true when all that is published is durable now."""
        state = self._state
        failure: OSError | None = None
        synced = []
        for region in regions:
            try:
                if self._sync(region):
                    synced.append(region)
            except OSError as error:
                failure = error
        names_synced = True
        if regions:
            try:
                self._barrier.sync_names(synced)
            except OSError as error:
                failure, names_synced = error, False
        with state.lock:
            for region in synced:
                if names_synced:
                    region.has_name = True
                elif not region.suspect:
                    region.dirty = state.any_dirty = True
            any_suspect = any(r.suspect and state.index.num_live(r.slot) for r in state.regions)
        if failure is not None:
            # Stores go on: what cannot be written says so itself, and a page that is not durable
            # is still a hit.
            self._log.report(
                "sync",
                "%s cannot be synced (%s); pages stored lately may not survive loss of power",
                self._directory,
                failure,
            )
        elif regions:
            self._log.settle("sync")
        return failure is None and not any_suspect

    def _sync(self, region: Region) -> bool:
        """Sync a region, unless it has gone meanwhile. It is pinned for no longer: after a start
        all regions are synced, and reclaim waits for the room of those that are pinned."""
        with self._state.lock:
            if region.retired:
                return False
            region.syncing = True
            self._state.regions.pin(region)
        try:
            self._barrier.sync(region)
        finally:
            with self._state.lock:
                region.syncing = False
            self.unpin(region)
        return True

"""What the syncer thread does: makes what is published durable, beside the stores.

Durable means against loss of power; death of the process loses nothing that was written. Sealing,
periodic syncs and barriers all happen here, so the writer never waits for a flush.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from sglang_tiered.storage.promises import keep
from sglang_tiered.storage.region.format import Contents
from sglang_tiered.storage.region.part import StorePart
from sglang_tiered.storage.region.writer import write_footer

if TYPE_CHECKING:
    from sglang_tiered.storage.region.health import Barrier
    from sglang_tiered.storage.region.part import Common
    from sglang_tiered.storage.region.regions import Region

__all__ = ["SyncWorker"]

logger = logging.getLogger(__name__)


class SyncWorker(StorePart):
    """Makes pages durable; its ``run`` is the syncer thread. ``interval_s`` bounds how long a
    published page waits for its sync, beyond the time a sync takes. The thread does not end by an
    exception: without it nothing becomes durable, and no error would show it."""

    def __init__(self, common: Common, barrier: Barrier, interval_s: float) -> None:
        super().__init__(common)
        self._barrier = barrier
        self._interval_s = interval_s
        self._due: float | None = None  # when what is dirty must be synced

    def run(self) -> None:
        """Sync until the store is closed and all that was written is sealed."""
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Wait for work and do it; false when it was the last."""
        state = self._state
        with state.lock:
            last, due = self._wait()
            seals = [region for region in state.to_seal if not region.retired]
            state.to_seal.clear()
            orders, state.syncs = state.syncs, []
            dirty = [region for region in state.regions if region.dirty] if due else []
            state.any_dirty = state.any_dirty and not due
            state.syncing = True
            for region in dirty:
                region.dirty = False
            busy = set(seals) | set(dirty)
            for region in busy:
                region.syncing = True
                state.regions.pin(region)
        durable = False
        try:
            for region in seals:
                self._seal(region)
            durable = self._sync_all([region for region in dirty if not region.suspect])
        except Exception:
            logger.exception(
                "%s: internal error while syncing; lookups miss for a while, and it is tried again",
                self._directory,
            )
            self._health.fault("internal error while syncing")
            with state.lock:
                for region in seals:
                    region.extents = []
                for region in busy:  # next time
                    region.dirty = state.any_dirty = True
        for region in busy:
            with state.lock:
                region.syncing = False
            self.unpin(region)
        with state.lock:
            state.syncing = False
        for order in orders:
            keep(order, durable)
        return not last

    def _wait(self) -> tuple[bool, bool]:
        """Wait for something to do; returns whether it is the last, and whether it is time to sync.
        Footers alone are written as they come: a flush for each would hold the writes up. The
        caller holds the lock."""
        state = self._state
        while True:
            if state.written_all:
                return True, True
            now = time.monotonic()
            if not state.any_dirty:
                self._due = None
            elif self._due is None:
                self._due = now + self._interval_s
            if state.syncs or (self._due is not None and now >= self._due):
                self._due = None
                return False, True
            if state.to_seal:
                return False, False
            state.sync_ready.wait(None if self._due is None else self._due - now)

    def _sync_all(self, regions: list[Region]) -> bool:
        """Sync the regions and their names; true when all that is published is durable now."""
        state = self._state
        failure: OSError | None = None
        synced = []
        for region in regions:
            try:
                self._barrier.sync(region)
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

    def _seal(self, region: Region) -> None:
        """Write the footer, unless what it would list may be lost. Without one the region is
        served all the same, and the next recovery walks it."""
        contents = Contents.of(region.extents)
        written = 0
        try:
            if not region.suspect:
                with self._health.watch():
                    written = write_footer(self._device, region, contents)
        except OSError as error:
            logger.warning(
                "%s could not be sealed (%s); the next start walks it",
                self._directory / region.name,
                error,
            )
        with self._state.lock:
            region.extents = []
            region.dirty = self._state.any_dirty = True
            self._state.bytes_written += written

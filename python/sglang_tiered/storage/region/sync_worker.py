"""What the syncer thread does: makes what is published durable, beside the stores.

Durable means against loss of power; death of the process loses nothing that was written. Sealing,
periodic syncs, barriers and checkpoints all happen here, so the writer never waits for a flush.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from sglang_tiered.storage.region import checkpoint
from sglang_tiered.storage.region.format import Contents
from sglang_tiered.storage.region.writer import write_footer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_tiered.storage.region.device import Device
    from sglang_tiered.storage.region.health import HealthMonitor, OnceLog
    from sglang_tiered.storage.region.reclaim import Reclaimer
    from sglang_tiered.storage.region.regions import Region
    from sglang_tiered.storage.region.state import StoreState

__all__ = ["SyncWorker"]

logger = logging.getLogger(__name__)

_CHECKPOINT_INTERVAL_S = 30.0  # or with the next seal, whichever comes first


class SyncWorker:
    """Its ``run`` is the syncer thread. ``interval_s`` bounds how long a published page waits for
    its sync, beyond the time a sync takes."""

    def __init__(
        self,
        directory: Path,
        state: StoreState,
        health: HealthMonitor,
        log: OnceLog,
        device: Device,
        reclaimer: Reclaimer,
        interval_s: float,
    ) -> None:
        self._directory = directory
        self._state = state
        self._health = health
        self._log = log
        self._device = device
        self._reclaimer = reclaimer
        self._interval_s = interval_s
        self._checkpoint_at = 0.0

    def run(self) -> None:
        """Until the store is closed and all that was written is sealed."""
        state = self._state
        while True:
            with state.lock:
                last = self._wait()
                seals = [region for region in state.to_seal if not region.retired]
                state.to_seal.clear()
                orders, state.syncs = state.syncs, []
                dirty = [r for r in state.regions if r.dirty and r not in seals]
                state.any_dirty = False
                state.syncing = True
                tails = {region: region.published_tail for region in (*seals, *dirty)}
                for region in tails:
                    region.dirty = False
                    region.syncing = True
                    state.regions.pin(region)
            durable = self._work(seals, tails)
            self._checkpoint(force=last or bool(seals))
            with state.lock:
                state.syncing = False
            for order in orders:
                order.durable = durable
                order.done.set()
            if last:
                return

    def _wait(self) -> bool:
        """Until there is something to do; true when it is the last. The lock is held."""
        state = self._state
        due = None
        while True:
            if state.written_all:
                return True
            if state.to_seal or state.syncs:
                return False
            if state.any_dirty and due is None:
                due = time.monotonic() + self._interval_s
            left = None if due is None else due - time.monotonic()
            if left is not None and left <= 0:
                return False
            state.sync_ready.wait(left)

    def _work(self, seals: Sequence[Region], tails: dict[Region, int]) -> bool:
        """Seal and sync; true when all that is published is durable now."""
        state = self._state
        failure: OSError | None = None
        for region in seals:
            failure = self._seal(region) or failure
        for region in tails:
            failure = self._sync(region) or failure
        if tails:
            failure = self._sync_names() or failure
        with state.lock:
            for region, tail in tails.items():
                if failure is None:
                    region.durable_tail = max(region.durable_tail, tail)
                elif not region.doubtful:
                    region.dirty = state.any_dirty = True
            # After a failed fsync the next one succeeds, and what the first lost stays lost.
            in_doubt = any(r.doubtful and state.index.num_live(r.slot) for r in state.regions)
        for region in tails:
            self._unpin(region)
        if failure is None:
            self._log.settle("sync")
        else:
            # Stores go on: what cannot be written says so itself, and a page that is not durable
            # is still a hit.
            self._log.report(
                "sync",
                "%s cannot be synced (%s); pages stored lately may not survive loss of power",
                self._directory,
                failure,
            )
        return failure is None and not in_doubt

    def _seal(self, region: Region) -> OSError | None:
        contents = Contents.of(region.extents)
        written = 0
        try:
            if not region.doubtful:
                with self._health.watch():
                    written = write_footer(self._device, region, contents)
        except OSError as error:
            return error
        finally:
            with self._state.lock:
                region.extents = []
                self._state.bytes_written += written
        return None

    def _sync(self, region: Region) -> OSError | None:
        try:
            with self._health.watch():
                self._device.sync(region.fd)
        except OSError as error:
            region.doubtful = True
            return error
        return None

    def _sync_names(self) -> OSError | None:
        try:
            with self._health.watch():
                self._device.sync_directory()
        except OSError as error:
            return error
        return None

    def _unpin(self, region: Region) -> None:
        with self._state.lock:
            region.syncing = False
            unused = self._state.regions.unpin(region)
        if unused:
            self._reclaimer.dispose(region)

    def _checkpoint(self, *, force: bool) -> None:
        now = time.monotonic()
        if not force and now < self._checkpoint_at:
            return
        self._checkpoint_at = now + _CHECKPOINT_INTERVAL_S
        with self._state.lock:
            data = checkpoint.pack(
                checkpoint.CheckpointEntry(r.sequence, r.nonce, r.durable_tail)
                for r in self._state.regions
            )
        try:
            with self._health.watch():
                self._device.replace_file(checkpoint.CHECKPOINT_NAME, data)
        except OSError as error:
            logger.debug("%s: no checkpoint (%s)", self._directory, error)
            return
        with self._state.lock:
            self._state.bytes_written += len(data)

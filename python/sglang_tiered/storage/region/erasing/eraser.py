"""Makes erasures durable and gives back what they free. Used on the writer thread, without the
lock.

The order of its steps is what makes it safe to lose power at any of them: first the file PURGES
says what is dead, then files go. What they held is hidden from lookups since ``erase`` was called.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglang_tiered.storage.region.erasing import erased
from sglang_tiered.storage.region.files import PURGES_NAME
from sglang_tiered.storage.region.writer import NO_SPACE_ERRNOS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_tiered.storage.backoff import OnceLog
    from sglang_tiered.storage.base import Erasure
    from sglang_tiered.storage.region.device import Device
    from sglang_tiered.storage.region.erasing.erased import Bound, Purges
    from sglang_tiered.storage.region.health import HealthMonitor
    from sglang_tiered.storage.region.reclaim import Reclaimer
    from sglang_tiered.storage.region.state import StoreState

__all__ = ["Eraser"]

_SWEPT_ROWS = 1 << 12  # at a time, as a lookup waits for it
_PAUSE_S = 0.001  # a lock that is taken again at once never reaches those that wait for it


class Eraser:
    """Owns the file PURGES while the store is open."""

    def __init__(
        self,
        directory: Path,
        state: StoreState,
        health: HealthMonitor,
        log: OnceLog,
        device: Device,
        reclaimer: Reclaimer,
        purges: Purges,
    ) -> None:
        self._directory = directory
        self._state = state
        self._health = health
        self._log = log
        self._device = device
        self._reclaimer = reclaimer
        self._purges = purges

    def erase(self, whats: Sequence[Erasure], bound: Bound) -> bool:
        """Erase up to the present end of the log, with nothing under way before it. True when that
        is durable, and all that was asked before."""
        keys = [key for what in whats for key in what.keys or ()]
        if keys:
            self._purges.forget(keys, bound)
        tenants = [what.tenant for what in whats if what.keys is None]
        for tenant in tenants:
            self._purges.add(tenant, bound)
        durable = self._record()
        if None in tenants:
            with self._state.lock:
                regions = list(self._state.regions)
            for region in regions:
                self._reclaimer.remove(region)
        elif tenants:
            self._sweep()
        self._reclaimer.remove_useless()
        return durable

    def _record(self) -> bool:
        """Write what was erased; what cannot be written is written with the next."""
        try:
            self._write()
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS or not self._write_with_room():
                self._log.report(
                    "purge",
                    "%s cannot be written (%s): what was purged is hidden, but a restart may "
                    "bring it back; purge again",
                    self._directory / PURGES_NAME,
                    error,
                )
                return False
        self._log.settle("purge")
        return True

    def _write(self) -> None:
        with self._health.watch():
            erased.compact(self._device, self._purges)
            data = erased.pack(self._purges)
            self._device.replace_file(PURGES_NAME, data)
        with self._state.lock:
            self._state.bytes_written += len(data)

    def _write_with_room(self) -> bool:
        try:
            if self._reclaimer.evict_one():
                self._write()
                return True
        except OSError:
            pass
        return False

    def _sweep(self) -> None:
        while True:
            with self._state.lock:
                if self._state.index.sweep(_SWEPT_ROWS):
                    return
            time.sleep(_PAUSE_S)

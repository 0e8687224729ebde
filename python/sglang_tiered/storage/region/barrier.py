"""``Barrier``: makes regions and their names durable, and remembers which it failed on."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tiered.storage.region.device import Device
    from sglang_tiered.storage.region.health import HealthMonitor
    from sglang_tiered.storage.region.regions import Region

__all__ = ["Barrier"]


class Barrier:
    """Syncs for every thread of a store. After a failed sync the next one succeeds, and what the
    first lost stays lost: its region is ``suspect`` from then on, and is never durable again."""

    def __init__(self, device: Device, health: HealthMonitor) -> None:
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
                region.suspect = region.suspect or not region.durable_tail
            raise

"""Which region to give up, and giving it up. Evicts before anything is created, so the cap holds
at every moment."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tiered.storage.region.device import Device
    from sglang_tiered.storage.region.health import HealthMonitor
    from sglang_tiered.storage.region.index import Region
    from sglang_tiered.storage.region.state import StoreState

__all__ = ["Reclaimer", "choose_victim"]


def choose_victim(regions: Iterable[Region]) -> Region | None:
    """The sealed region hit longest ago; among those never hit, the oldest. A region that is
    being read frees nothing until the read ends, so such regions go last."""
    sealed = [region for region in regions if region.sealed]
    return min(sealed, key=lambda r: (r.pins > 0, r.last_hit, r.sequence), default=None)


class Reclaimer:
    """Makes room under the cap. Called by the writer thread only, without the lock held.

    ``pin_timeout_s`` bounds the wait for readers of a region that is already unlinked.
    """

    def __init__(
        self,
        device: Device,
        health: HealthMonitor,
        state: StoreState,
        capacity_bytes: int,
        pin_timeout_s: float,
    ) -> None:
        self._device = device
        self._health = health
        self._state = state
        self._capacity_bytes = capacity_bytes
        self._pin_timeout_s = pin_timeout_s
        self.num_pages_evicted = 0

    def reserve(self, nbytes: int) -> bool:
        """Reserve room for a new region, evicting as needed; false when nothing can go.
        Raises ``OSError`` when a victim's file cannot be removed."""
        while True:
            with self._state.lock:
                over = self._state.regions.physical_bytes + nbytes - self._capacity_bytes
                if over <= 0:
                    self._state.regions.reserve(nbytes)
                    return True
                if over <= self._state.regions.retiring_bytes:
                    if not self._state.space_freed.wait(self._pin_timeout_s):
                        return False
                    continue
            if not self.evict_one():
                return False

    def unreserve(self, nbytes: int) -> None:
        with self._state.lock:
            self._state.regions.unreserve(nbytes)

    def adopt(self, region: Region) -> None:
        """Put a region created on reserved room into service."""
        with self._state.lock:
            self._state.regions.add(region)

    def evict_one(self) -> bool:
        """Remove the best victim; false when there is none. Raises ``OSError`` when its file
        cannot be removed, in which case the region stays in service."""
        with self._state.lock:
            victim = choose_victim(self._state.regions)
        if victim is None:
            return False
        self.remove(victim)
        return True

    def remove(self, region: Region) -> None:
        """Unlink the file, forget its keys; loads running from it still finish."""
        with self._health.watch(), contextlib.suppress(FileNotFoundError):
            self._device.unlink(region.name)
        with self._state.lock:
            self.num_pages_evicted += self._state.index.drop_region(region)
            unused = self._state.regions.retire(region)
        if unused:
            self.dispose(region)

    def dispose(self, region: Region) -> None:
        """Close a retired region that nobody pins. Any thread, without the lock held."""
        with contextlib.suppress(OSError):
            self._device.close(region.fd)
        with self._state.lock:
            self._state.regions.closed(region)
            self._state.space_freed.notify_all()

"""What every part of a store has at hand, and does in the same way. Without the lock held."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.region.device import write_fully

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sglang_tiered.storage.backoff import OnceLog
    from sglang_tiered.storage.region.device import FileDevice
    from sglang_tiered.storage.region.health import HealthMonitor
    from sglang_tiered.storage.region.regions import Region
    from sglang_tiered.storage.region.state import StoreState


class Common(NamedTuple):
    """One store's. ``is_held`` asks the filesystem whether its lock still keeps others away."""

    directory: Path
    device: FileDevice
    health: HealthMonitor
    state: StoreState
    log: OnceLog
    is_held: Callable[[], bool]


class StorePart:
    """Base of what works on a store."""

    def __init__(self, common: Common) -> None:
        self._directory, self._device, self._health, self._state, self._log, self._is_held = common

    def is_ours(self) -> bool:
        """Return whether the directory is still this store's alone; misses from now on if not."""
        return self._health.check_lock(self._is_held)

    def write(self, fd: int, segments: Sequence[memoryview], offset: int) -> None:
        """Write whole blocks and count them. Raises ``OSError``."""
        with self._health.watch():
            written = write_fully(self._device, fd, segments, offset)
        with self._state.lock:
            self._state.bytes_written += written

    def replace(self, name: str, data: bytes) -> None:
        """Make a small file hold these bytes, durably and in one step. Raises ``OSError``: it holds
        what it did, then."""
        with self._health.watch():
            self._device.replace_file(name, data)
        with self._state.lock:
            self._state.bytes_written += len(data)

    def unpin(self, region: Region) -> None:
        """Let a region go that this thread kept open."""
        with self._state.lock:
            unused = self._state.regions.unpin(region)
        if unused:
            self.dispose(region)

    def dispose(self, region: Region) -> None:
        """Close a retired region that no thread pins."""
        with contextlib.suppress(OSError):
            self._device.close(region.fd)
        with self._state.lock:
            region.fd = -1
            self._state.regions.closed(region)
            self._state.space_freed.notify_all()

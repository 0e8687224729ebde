"""Keeps the files of pins as the book says. On the writer thread, without the lock held."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from sglang_tiered.storage.region.pinning.pins import file_of, pack

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_tiered.storage.backoff import OnceLog
    from sglang_tiered.storage.region.device import Device
    from sglang_tiered.storage.region.health import HealthMonitor
    from sglang_tiered.storage.region.reclaim import Reclaimer
    from sglang_tiered.storage.region.state import StoreState

__all__ = ["PinFiles"]


class PinFiles:
    """Owns the files ``PIN-*`` while the store is open."""

    def __init__(
        self,
        directory: Path,
        state: StoreState,
        health: HealthMonitor,
        log: OnceLog,
        device: Device,
        reclaimer: Reclaimer,
    ) -> None:
        self._directory = directory
        self._state = state
        self._health = health
        self._log = log
        self._device = device
        self._reclaimer = reclaimer
        self._unsettled: set[str] = set()

    @property
    def is_settled(self) -> bool:
        """Return whether all that was ever asked is durable."""
        return not self._unsettled

    def settle(self, names: tuple[str, ...]) -> bool:
        """Write the pins of these names, or remove the files of those that are gone; true when that
        is durable. What failed before is tried again."""
        self._unsettled.update(names)
        failed: set[str] = set()
        failure: OSError | None = None
        removed = False
        for name in self._unsettled:
            try:
                settle = functools.partial(self._settle, name)
                removed = self._reclaimer.with_room(settle) or removed
            except OSError as error:
                failed.add(name)
                failure = error
        try:
            if removed:
                with self._health.watch():
                    self._device.sync_directory()
            self._unsettled = failed
        except OSError as error:
            failure = error
        if failure is None:
            self._log.settle("pin")
        else:
            self._log.report(
                "pin",
                "%s: the file of a pin cannot be changed (%s); until it is tried again a restart "
                "finds the pins as they were",
                self._directory,
                failure,
            )
        return self._unsettled.isdisjoint(names)

    def _settle(self, name: str) -> bool:
        """Returns whether the directory must be synced: its file was removed, now or before."""
        with self._state.lock:
            pin = self._state.pins.get(name)
        file = file_of(name)
        with self._health.watch():
            if pin is None:
                with contextlib.suppress(FileNotFoundError):
                    self._device.unlink(file)
                return True
            data = pack(pin)
            self._device.replace_file(file, data)
        with self._state.lock:
            self._state.bytes_written += len(data)
        return False

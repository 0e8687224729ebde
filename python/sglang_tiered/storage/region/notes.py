"""``Notes``: small files that the owner of a store keeps beside its regions.

Outside the byte cap, never read by the store itself, as private as the pages are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_tiered.storage.region.device import Device

__all__ = ["Notes"]


class Notes:
    """Any thread; both calls wait for the disk."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def read(self, name: str) -> bytes:
        """What was written last; empty where there is none or it cannot be read."""
        try:
            return self._device.read_file(name)
        except OSError:
            return b""

    def write(self, name: str, data: bytes) -> None:
        """Replace a note whole, flushed. Raises ``OSError``."""
        self._device.replace_file(name, data)

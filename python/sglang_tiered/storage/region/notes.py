"""``Notes``: small files that the owner of a store keeps beside its regions.

Outside the byte cap, never read by the store itself, as private as the pages are.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from sglang_tiered.storage.region.device import read_small_file
from sglang_tiered.storage.region.files import NOTE_NAMES, TEMPORARY_SUFFIX

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_tiered.storage.region.device import Device

__all__ = ["Notes", "read_note"]


def read_note(shard: Path, name: str) -> bytes:
    """Read a note as ``Notes.read`` does, of a shard that need not be open."""
    try:
        return read_small_file(shard / name)
    except OSError:
        return b""


class Notes:
    """Small files of one shard. Any thread; all calls wait for the disk."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def read(self, name: str) -> bytes:
        """Return what was written last; empty where the note is missing or cannot be read."""
        try:
            return self._device.read_file(name)
        except OSError:
            return b""

    def write(self, name: str, data: bytes) -> None:
        """Replace a note whole, flushed. Raises ``OSError``, and ``ValueError`` for a name that is
        not in the list of a shard's files, by which files are recognized."""
        if name not in NOTE_NAMES:
            raise ValueError(f"{name!r} is not in NOTE_NAMES")
        self._device.replace_file(name, data)

    def remove(self, name: str) -> None:
        """Remove a note durably, with what a write that was cut off left of it. Raises
        ``OSError``."""
        is_gone = False
        for file in (name, name + TEMPORARY_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                self._device.unlink(file)
                is_gone = True
        if is_gone:
            self._device.sync_directory()

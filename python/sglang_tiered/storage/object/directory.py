"""What a bucket that is a directory can do besides: reads without a copy, and durable writes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Directory"]


class Directory:
    """The files under one root, by the paths of their objects. Raises ``OSError``. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._synced: set[Path] = set()

    def read(self, path: str, room: memoryview, start: int) -> int:
        """Fill the room as far as the file goes; returns how far. Plain reads into memory that is
        used again take less than half the processor time of the library's into fresh memory."""
        fd = os.open(self.root / path, os.O_RDONLY)
        try:
            filled = 0
            while filled < len(room) and (
                num_read := os.preadv(fd, [room[filled:]], start + filled)
            ):
                filled += num_read
        finally:
            os.close(fd)
        return filled

    def sync(self, path: str) -> None:
        """Make a file and its name survive loss of power, and the folders it is in, once."""
        file = self.root / path
        _fsync(file)
        _fsync(file.parent)
        if file.parent not in self._synced:
            for folder in file.parent.parents:
                _fsync(folder)
                if folder == self.root:
                    break
            self._synced.add(file.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

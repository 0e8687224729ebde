"""What a bucket that is a directory can do besides: reads without a copy, and durable writes."""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING

from sglang_tiered.storage.filesystem import NOT_OFFERED_ERRNOS, sync_names

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Directory"]

logger = logging.getLogger(__name__)

# Not through a link, and never waiting for the writer of a named pipe: objects are files.
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ESPIPE)
_MAX_BUFFERS = 1024  # of one call (IOV_MAX)
_NO_WAIT = getattr(os, "RWF_NOWAIT", None)  # Linux has it


class Directory:
    """The files under one root, by the paths of their objects. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._synced: set[Path] = set()
        self._offers_cached = _NO_WAIT is not None
        self._syncs_names = True

    def read(self, path: str, room: memoryview, start: int) -> int:
        """Fill the room as far as the file goes; returns how far. Plain reads into memory that is
        used again take less than half the processor time of the library's into fresh memory.
        Raises ``OSError``; what is no file is not found."""
        try:
            fd = os.open(self.root / path, _OPEN)
            try:
                filled = 0
                while filled < len(room) and (
                    num_read := os.preadv(fd, [room[filled:]], start + filled)
                ):
                    filled += num_read
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise FileNotFoundError(errno.ENOENT, "not a file") from None
            raise
        return filled

    def read_cached(self, path: str, buffers: Sequence[memoryview], start: int) -> int:
        """Fill buffers with what the page cache holds of a file, up to the first byte that would
        have to be waited for; returns how many bytes. Never raises: any error is 0, and so are file
        systems that do not offer it (NFS, FUSE)."""
        if not self._offers_cached:
            return 0
        assert _NO_WAIT is not None
        filled = 0
        try:
            fd = os.open(self.root / path, _OPEN)
            try:
                for at in range(0, len(buffers), _MAX_BUFFERS):
                    part = buffers[at : at + _MAX_BUFFERS]
                    num_read = os.preadv(fd, part, start + filled, _NO_WAIT)
                    filled += num_read
                    if num_read < sum(buffer.nbytes for buffer in part):
                        break
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in NOT_OFFERED_ERRNOS:
                self._offers_cached = False
        return filled

    def sync(self, path: str) -> None:
        """Make a file and its name survive loss of power, and the folders it is in, once. Where
        names cannot be synced (SMB, 9p, drvfs) the file alone, with a line in the log. Raises
        ``OSError``."""
        file = self.root / path
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        self._sync_names(file.parent)
        if file.parent not in self._synced:
            for folder in file.parent.parents:
                self._sync_names(folder)
                if folder == self.root:
                    break
            self._synced.add(file.parent)

    def _sync_names(self, folder: Path) -> None:
        if not self._syncs_names:
            return
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._syncs_names = sync_names(fd)
        finally:
            os.close(fd)
        if not self._syncs_names:
            logger.warning(
                "%s cannot make names durable, as its filesystem does not offer it: loss of power "
                "may take objects that were just stored",
                self.root,
            )

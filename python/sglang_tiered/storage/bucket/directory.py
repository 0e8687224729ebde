"""A bucket that is a directory: durable writes, reads without a copy, listings in order."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import os
import secrets
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.filesystem import NOT_OFFERED_ERRNOS, sync_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["STAGED", "Directory", "Listed"]

logger = logging.getLogger(__name__)

# Not through a link, and never waiting for the writer of a named pipe: objects are files.
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_MAX_TRIES = 3
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ESPIPE)
_MAX_BUFFERS = 1024  # of one call (IOV_MAX)
_NO_WAIT = getattr(os, "RWF_NOWAIT", None)  # Linux has it
_LISTED_AT_ONCE = 1000
STAGED = "#"
"""In the name of a file that is still being written, or whose writer died."""


class Listed(NamedTuple):
    """One object of a listing."""

    path: str
    size: int
    modified: float  # seconds since 1970, as the store says
    tag: str  # another one whenever the object was written


class Directory:
    """The files under one root, by the paths of their objects. Thread-safe. Raises ``OSError``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._synced: set[Path] = set()
        self._offers_cached = _NO_WAIT is not None
        self._syncs_names = True

    def read(self, path: str, room: memoryview) -> int:
        """Fill the room as far as the file goes; returns how far. What is no file is not found."""
        try:
            fd = os.open(self.root / path, _OPEN)
            try:
                filled = 0
                while filled < len(room) and (num_read := os.preadv(fd, [room[filled:]], filled)):
                    filled += num_read
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise FileNotFoundError(errno.ENOENT, "not a file") from None
            raise
        return filled

    def read_cached(self, path: str, buffers: Sequence[memoryview]) -> int:
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
                    num_read = os.preadv(fd, part, filled, _NO_WAIT)
                    filled += num_read
                    if num_read < sum(buffer.nbytes for buffer in part):
                        break
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in NOT_OFFERED_ERRNOS:
                self._offers_cached = False
        return filled

    def write(self, path: str, data: bytes) -> None:
        """Write a file, whole or not at all; durable, with its name and the folders it is in. Where
        names cannot be synced (SMB, 9p, drvfs) the file alone, with a line in the log."""
        file = self.root / path
        staged = file.with_name(f"{file.name}{STAGED}{secrets.token_hex(8)}")
        try:
            with self._new_file(staged) as stream:
                view = memoryview(data)
                while view:
                    view = view[stream.write(view) :]
                os.fsync(stream.fileno())
            os.rename(staged, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(staged)
            raise
        self._sync_names(file.parent)
        if file.parent not in self._synced:
            for folder in file.parent.parents:
                self._sync_names(folder)
                if folder == self.root:
                    break
            self._synced.add(file.parent)

    def _new_file(self, path: Path) -> io.FileIO:
        """Make a file that others may read as far as the umask says: servers of other users share
        them. Its folder may be missing, or be removed by another server as it was empty."""
        for _ in range(_MAX_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return io.FileIO(os.open(path, _CREATE, 0o666), "wb")
            self._synced.discard(path.parent)
            with contextlib.suppress(FileNotFoundError):
                path.parent.mkdir(parents=True, exist_ok=True)
        return io.FileIO(os.open(path, _CREATE, 0o666), "wb")

    def remove(self, path: str) -> None:
        """Remove a file, and the folder that it leaves empty."""
        file = self.root / path
        os.unlink(file)
        with contextlib.suppress(OSError):
            os.rmdir(file.parent)
            self._synced.discard(file.parent)

    def listing(self, folder: str, after: str | None) -> Iterator[list[Listed]]:
        """Yield the files in a folder and below it in the order of their paths, in parts, from the
        path behind ``after`` on. Those being written are there too."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)  # one that is gone is an error
        files = self._walk(folder, after or "")
        while chunk := list(itertools.islice(files, _LISTED_AT_ONCE)):
            yield chunk

    def _walk(self, folder: str, after: str) -> Iterator[Listed]:
        try:
            with os.scandir(self.root / folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in entries:
            path = f"{folder}/{entry.name}"
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if entry.is_dir(follow_symlinks=False):
                    if path >= after[: len(path)]:
                        yield from self._walk(path, after)
                elif path > after and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    tag = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
                    yield Listed(path, status.st_size, status.st_mtime, tag)

    def folders(self, folder: str) -> list[str]:
        """Return the paths of the folders in a folder."""
        try:
            with os.scandir(self.root / folder) as found:
                return sorted(f"{folder}/{each.name}" for each in found if each.is_dir())
        except FileNotFoundError:
            return []

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

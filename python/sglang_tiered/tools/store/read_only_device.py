"""Files of a directory, opened for reading only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING

from sglang_tiered.storage.region.device import Files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["ReadOnlyDevice"]

_MAX_SMALL_FILE_BYTES = 64 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ReadOnlyDevice(Files):
    """Files of a directory, opened for reading only. Bypasses the page cache, or drops from it
    what was read, so that looking at a store does not push out what others have cached."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError`` when the directory cannot be opened."""
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._direct = bool(_DIRECT)

    def release(self) -> None:
        directory, self._directory = self._directory, -1
        if directory >= 0:
            os.close(directory)

    def list_names(self) -> list[str]:
        return os.listdir(self._directory)

    def status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._directory, follow_symlinks=False)

    def open(self, name: str) -> int:
        mode = self.status(name).st_mode
        if not stat.S_ISREG(mode):  # asked first: opening some device nodes does something
            raise OSError(errno.ENXIO, f"{_kind(mode)}, not a regular file")
        if self._direct:
            try:
                return os.open(name, _READ | _DIRECT, dir_fd=self._directory)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False
        return os.open(name, _READ, dir_fd=self._directory)

    def readv(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        try:
            done = os.preadv(fd, segments, offset)
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & _DIRECT:
                raise
            # Some filesystems open with O_DIRECT and refuse it only now.
            self._direct = False
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_DIRECT)
            done = os.preadv(fd, segments, offset)
        if not self._direct and done:
            os.posix_fadvise(fd, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def read_file(self, name: str) -> bytes:
        fd = self.open(name)
        with contextlib.closing(os.fdopen(fd, "rb", buffering=0)) as file:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_DIRECT)
            if os.fstat(fd).st_size > _MAX_SMALL_FILE_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            return file.readall() or b""

    def close(self, fd: int) -> None:
        os.close(fd)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device node")

"""Small files, read or replaced whole, and what filesystems differ in: calls that some do not
offer, and where their bytes lie."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
"""Kinds of filesystem whose files are memory."""

NOT_OFFERED_ERRNOS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Answers of a filesystem that has no such call, which say nothing about a file or permissions."""

FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""No room: on the filesystem, or within the user's quota."""

_MAX_SMALL_BYTES = 1 << 30
"""Above every small file of ours. A foreign one of a terabyte, sparse, must not take all memory."""
_MOUNTS = "/proc/self/mountinfo"


def sync_names(directory: int) -> bool:
    """Make the names in an open directory durable; false where its filesystem has no such call
    (SMB, 9p, drvfs). Raises ``OSError``."""
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in NOT_OFFERED_ERRNOS:
            raise
        return False
    return True


def regular(fd: int, name: str) -> int:
    """Return the descriptor, if it is that of a regular file: a FIFO under one of our names must
    not hang a thread. Raises ``OSError`` otherwise, with the descriptor closed."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, f"{name} is not a regular file")
    return fd


def read_small_file(
    path: Path | str, directory: int | None = None, most: int = _MAX_SMALL_BYTES
) -> bytes:
    """Read a regular file, at most so many bytes of it, in an open directory if one is given; never
    follows a symlink. Raises ``OSError``."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, dir_fd=directory)
    with open(regular(fd, os.path.basename(path)), "rb") as file:
        return file.read(min(most, os.fstat(fd).st_size))


def replace_file(
    path: Path | str,
    data: bytes | memoryview,
    temporary: Path | str,
    directory: int | None = None,
    *,
    is_synced: bool = True,
    mode: int = 0o600,
) -> None:
    """Make a file hold these bytes in one step, in an open directory if one is given: whatever
    happens, it holds the old or the new bytes. ``temporary`` is beside it, and nobody else's. What
    the file holds is made durable, but not its name. Raises ``OSError``."""
    with contextlib.suppress(FileNotFoundError):  # of a process that died in it
        os.unlink(temporary, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(temporary, flags, mode, dir_fd=directory)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            if is_synced:
                os.fsync(fd)
        os.replace(temporary, path, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise


def filesystem_type(path: Path) -> str:
    """Return the kind of filesystem that an existing path lies on, as mounts name it (``ext4``,
    ``tmpfs``); empty where the system does not say. Raises ``OSError`` for the path."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[2] == number and "-" in fields:
                    return fields[fields.index("-") + 1]
    except OSError:
        pass
    return ""

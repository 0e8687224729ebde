"""What filesystems differ in: calls that some do not offer, and where their bytes lie."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "FULL_ERRNOS",
    "MEMORY_FILESYSTEMS",
    "NOT_OFFERED_ERRNOS",
    "filesystem_type",
    "sync_names",
]

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
"""Kinds of filesystem whose files are memory."""

NOT_OFFERED_ERRNOS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Answers of a filesystem that has no such call, which say nothing about a file or permissions."""

FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""No room: on the filesystem, or within the user's quota."""

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

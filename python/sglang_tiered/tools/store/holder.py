"""Finds the process that uses a directory, without touching its lock.

Asking by taking the lock, however briefly, could refuse a server that starts at that moment. The
kernel lists its locks in ``/proc/locks``; those of processes in other containers are not in it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

from sglang_tiered.storage.region.files import LOCK_NAME

__all__ = ["Holder", "find_holder"]

_LOCKS = Path("/proc/locks")
_MOUNTS = Path("/proc/self/mountinfo")


class Holder(NamedTuple):
    """``held`` is ``None`` where the system does not tell; ``pid`` is then, as for a free lock,
    that of the last holder."""

    held: bool | None
    pid: int | None

    @property
    def may_write(self) -> bool:
        """Whether the directory may be changing."""
        return self.held is not False

    def __str__(self) -> str:
        if self.held:
            return "in use" if self.pid is None else f"in use by process {self.pid}"
        state = "perhaps in use" if self.held is None else "not in use"
        return state if self.pid is None else f"{state}, last by process {self.pid}"


def find_holder(directory: Path) -> Holder:
    """Return who holds ``directory/LOCK``."""
    file = directory / LOCK_NAME
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return Holder(False, None)
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return Holder(False, None)
    except OSError:
        return Holder(None, None)
    try:
        status = os.fstat(fd)
        devices = {_numbers(status.st_dev), _filesystem_device(fd)}
        text = os.pread(fd, 32, 0).strip()
    finally:
        os.close(fd)
    last = int(text) if text.isdigit() else None
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return Holder(None, last)
    for line in lines:
        # "1: FLOCK  ADVISORY  WRITE 7585 fe:00:2179841 0 EOF", "->" in it for who waits
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK":
            continue
        major, minor, inode = fields[5].split(":")
        if int(inode) == status.st_ino and (int(major, 16), int(minor, 16)) in devices:
            pid = int(fields[4])
            return Holder(True, pid if pid > 0 else last)
    return Holder(False, last)


def _numbers(device: int) -> tuple[int, int]:
    return os.major(device), os.minor(device)


def _filesystem_device(fd: int) -> tuple[int, int] | None:
    """Return the device as the kernel lists it, which differs on filesystems with volumes."""
    with contextlib.suppress(OSError, ValueError):
        information = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        mount = next(line.split()[1] for line in information if line.startswith("mnt_id:"))
        for line in _MOUNTS.read_text(errors="replace").splitlines():
            fields = line.split()
            if fields[0] == mount:
                major, minor = fields[2].split(":")
                return int(major), int(minor)
    return None

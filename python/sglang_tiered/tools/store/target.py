"""Says what DIR is, a tier directory with its shards or one shard, and which process uses it.

Opens only the manifest, and touches no lock: asking by taking one, however briefly, could refuse a
server that starts at that moment. The kernel lists its locks in ``/proc/locks``; those of processes
in other containers are not in it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.errors import StoreError, StoreFormatError
from sglang_tiered.storage.region.directory import DirectoryState, inspect, manifest_version
from sglang_tiered.storage.region.files import (
    ERASED_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    SHARD_PREFIX,
    is_shard_file,
)
from sglang_tiered.storage.region.format import parse_region_name

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Holder", "Shard", "StoreTarget", "find_holder", "resolve"]

_LOCKS = Path("/proc/locks")
_MOUNTS = Path("/proc/self/mountinfo")

_WAY_OUT = "pass the --tier-dir of a server, or one of its shard-* directories"


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


@dataclass(frozen=True)
class Shard:
    name: str
    path: Path

    def holder(self) -> Holder:
        return find_holder(self.path)


@dataclass(frozen=True)
class StoreTarget:
    """Describes DIR. ``manifest`` is the format version it states; ``None`` without a valid one."""

    path: Path
    is_tier: bool
    shards: Sequence[Shard]
    manifest: int | None = None
    notes: list[str] = field(default_factory=list)

    def holder(self) -> Holder:
        return find_holder(self.path)


def resolve(path: Path) -> StoreTarget:
    """Find out what DIR is. Raises ``StoreError`` and its kinds for what cannot be read."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist; {_WAY_OUT}") from None
    except NotADirectoryError:
        raise StoreError(f"{path} is not a directory; {_WAY_OUT}") from None
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read ({error.strerror}); fix its permissions or {_WAY_OUT}"
        ) from error
    if _is_shard(path, names):
        return StoreTarget(path, False, [Shard(path.resolve().name, path)])
    try:
        state = inspect(path)
    except StoreFormatError:
        raise
    except StoreError as error:
        # Its own way out is meant for a server that wants a directory to write to.
        what = str(error).partition("; ")[0]
        raise type(error)(f"{what}; {_WAY_OUT}") from error
    if state in (DirectoryState.ABSENT, DirectoryState.EMPTY):
        raise StoreError(f"{path} is empty; {_WAY_OUT}")
    notes = []
    manifest = None
    if state is DirectoryState.OURS:
        manifest = manifest_version(path)
    else:
        notes.append(
            f"{MANIFEST_NAME} is missing or does not verify; the next server start writes it again"
        )
    shards = []
    for name in sorted(name for name in names if name.startswith(SHARD_PREFIX)):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR((path / name).lstat().st_mode):
                shards.append(Shard(name, path / name))
            else:
                notes.append(f"{name!a} is not a directory and is left alone")
    return StoreTarget(path, True, shards, manifest, notes)


def _is_shard(path: Path, names: Sequence[str]) -> bool:
    if MANIFEST_NAME in names or any(name.startswith(SHARD_PREFIX) for name in names):
        return False
    if any(name == ERASED_NAME or parse_region_name(name) is not None for name in names):
        return True
    return path.resolve().name.startswith(SHARD_PREFIX) and all(map(is_shard_file, names))


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

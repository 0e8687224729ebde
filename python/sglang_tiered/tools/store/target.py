"""Says what DIR is, a tier directory with its shards or one shard, and which process uses it.

Opens only the manifest, and touches no lock: asking by taking one, however briefly, could refuse a
server that starts at that moment. The kernel lists its locks in ``/proc/locks``; those of processes
in other containers are not in it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.errors import StoreError, StoreFormatError
from sglang_tiered.storage.filesystem import regular
from sglang_tiered.storage.region.directory import DirectoryState, inspect, manifest_version
from sglang_tiered.storage.region.format import (
    ERASED_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    SHARD_PREFIX,
    is_shard_file,
    parse_region_name,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


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
class StoreTarget:
    """Describes DIR. ``manifest`` is the format version it states; ``None`` without a valid one."""

    path: Path
    is_tier: bool
    shards: Sequence[Path]
    manifest: int | None = None
    notes: list[str] = field(default_factory=list)


def resolve(path: Path) -> StoreTarget:
    """Find out what DIR is. Raises ``StoreError`` and its kinds for what cannot be read."""
    try:
        names = os.listdir(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}); {_WAY_OUT}") from error
    if _is_shard(path, names):
        return StoreTarget(path, False, [path.resolve()])
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
    if state is not DirectoryState.OURS:
        notes.append(
            f"{MANIFEST_NAME} is missing or does not verify; the next server start writes it again"
        )
    named = [path / name for name in sorted(names) if name.startswith(SHARD_PREFIX)]
    shards = [shard for shard in named if shard.is_dir() and not shard.is_symlink()]
    return StoreTarget(path, True, shards, manifest_version(path), notes)


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
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(regular(fd, file.name), "rb") as lock:
            inode, devices = os.fstat(fd).st_ino, _devices(fd)
            text = lock.read(32).strip()
    except FileNotFoundError:
        return Holder(False, None)
    except OSError:
        return Holder(None, None)
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
        major, minor, number = fields[5].split(":")
        # Fresh disks give their first files the same numbers.
        if int(number) == inode and f"{int(major, 16)}:{int(minor, 16)}" in devices:
            pid = int(fields[4])
            return Holder(True, pid if pid > 0 else last)
    return Holder(False, last)


def _devices(fd: int) -> set[str]:
    """Return the numbers that the kernel may list a file's device by: that of the file, and that of
    its mount, which is another one on filesystems with volumes."""
    device = os.fstat(fd).st_dev
    found = {f"{os.major(device)}:{os.minor(device)}"}
    with contextlib.suppress(OSError):
        information = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        mounts = [line.split()[1] for line in information if line.startswith("mnt_id:")]
        rows = map(str.split, _MOUNTS.read_text(errors="replace").splitlines())
        found.update(row[2] for row in rows if row[0] in mounts)
    return found

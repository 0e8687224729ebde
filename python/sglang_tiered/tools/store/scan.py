"""Says what DIR is, a tier directory with its shards or one shard, and which process uses it. Reads
its regions as recovery does, several at a time, without owning them.

Nothing is locked, written, sealed or removed. Asking who holds a lock by taking it, however
briefly, could refuse a server that starts at that moment. The kernel lists its locks in
``/proc/locks``; those of processes in other containers are not in it.

A region may be written, sealed or unlinked while it is read. A page that was placed and not synced
yet is no damage when it does not verify, and a file that was unlinked meanwhile is reported as
gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered.errors import ConfigError, StoreError, StoreFormatError
from sglang_tiered.storage.filesystem import regular
from sglang_tiered.storage.region import erase_log, pins
from sglang_tiered.storage.region.device import FileReader
from sglang_tiered.storage.region.directory import DirectoryState, inspect, manifest_version
from sglang_tiered.storage.region.format import (
    ERASED_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    SHARD_PREFIX,
    Contents,
    is_shard_file,
    parse_region_name,
    region_name,
)
from sglang_tiered.storage.region.walk import Problem, RegionScan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang_tiered.storage.region.format import RegionHeader


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


# They say something about this process, not about the file.
_OWN_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class ScannedRegion(RegionScan):
    """What one region file says of itself. ``gone``: it was unlinked before it was read, or
    meanwhile."""

    def __init__(self, device: FileReader, name: str) -> None:
        self._reads: list[int] = []
        super().__init__(device, -1, 0, advance=self._reads.append)
        sequence = parse_region_name(name)
        assert sequence is not None, f"{name!r} does not name a region"
        self.name, self.sequence, self.gone = name, sequence, False
        self.header: RegionHeader | None = None
        self.contents = Contents.of([])

    @property
    def bytes_read(self) -> int:
        return sum(self._reads)

    def scan(self, *, full: bool, may_be_new: bool) -> None:
        """Read what recovery would look at; all of it with ``full``. ``may_be_new``: a server may
        be creating this file right now. Raises ``OSError`` only for conditions of this process,
        such as too many open files."""
        what = "opened"
        try:
            self._fd = self._device.open(self.name)
            what = "read"
            try:
                self.file_bytes = os.fstat(self._fd).st_size
                self.header = self.read_header(self.sequence)
                if self.header is not None:
                    self.contents = self.read_contents(full=full)
                elif may_be_new and self.is_new:
                    self.problems.clear()
                self.gone = os.fstat(self._fd).st_nlink == 0
            finally:
                self._device.close(self._fd)
        except FileNotFoundError:
            self.gone = True
        except OSError as error:
            if error.errno in _OWN_ERRNOS:
                raise
            self.report("file", 0, 0, f"cannot be {what} ({error.strerror})")
        self.drop_buffers()

    @property
    def state(self) -> str:
        """Return ``other_format``, ``damaged``, ``sealed`` or ``open``."""
        if self.version is not None:
            return "other_format"
        if self.problems:
            return "damaged"
        return "sealed" if self.is_sealed else "open"

    @property
    def tail(self) -> int:
        """Return where the last extent that counts ends."""
        return 0 if self.header is None else self.contents.end

    @property
    def payload_bytes(self) -> int:
        return int(self.contents.pages["length"].sum(dtype=np.int64))


class ShardReader:
    """The region files a shard has now, or one of them. Raises ``StoreError`` when the shard cannot
    be read."""

    def __init__(self, shard: Path, only: int | None) -> None:
        self.shard = shard
        self.num_gone = 0
        try:
            self.device = FileReader(shard)
            self.holder = find_holder(shard)
            names = sorted(self.device.list_names())
            self.erased = erase_log.read(self.device)
            if self.erased.damaged and self.holder.may_write:
                self.erased = erase_log.read(self.device)  # a server may have been writing it
            self.pins = pins.read_all(self.device, names)
        except OSError as error:
            raise StoreError(
                f"{shard} cannot be read ({error.strerror}); check the disk and its permissions"
            ) from error
        regions = [name for name in names if parse_region_name(name) is not None]
        self._newest = regions[-1] if regions else ""
        self.regions = [name for name in regions if only is None or name == region_name(only)]

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Yield what is wrong beside the regions, and in which file."""
        if self.erased.damaged:
            what = "does not verify: the next start removes all pages"
            yield ERASED_NAME, Problem("file", 0, 0, what)
        for file in self.pins.damaged:
            what = "does not verify: the next start removes it, and what it pinned may go"
            yield file, Problem("file", 0, 0, what)
        for file in self.pins.unread:
            what = "cannot be read: what it pins may go until a start can read it"
            yield file, Problem("file", 0, 0, what)

    def region_bytes(self) -> int:
        """Return the size of the region files that are still there."""
        nbytes = 0
        for name in self.regions:
            with contextlib.suppress(OSError):
                nbytes += self.device.status(name).st_size
        return nbytes

    def views(self, *, full: bool, jobs: int) -> Iterator[ScannedRegion]:
        """Yield the regions in order of their sequence; count those that were unlinked
        meanwhile."""
        with ThreadPoolExecutor(jobs, thread_name_prefix="store-scan") as pool:
            try:
                for view in pool.map(lambda name: self._view(name, full), self.regions):
                    if view.gone:
                        self.num_gone += 1
                    else:
                        yield view
            finally:
                pool.shutdown(cancel_futures=True)

    def _view(self, name: str, full: bool) -> ScannedRegion:
        may_be_new = name == self._newest and self.holder.may_write

        def scanned() -> ScannedRegion:
            view = ScannedRegion(self.device, name)
            view.scan(full=full, may_be_new=may_be_new)
            return view

        view = scanned()
        # A server may have been sealing it just then; what is still wrong now is wrong.
        return scanned() if view.problems and not view.gone else view


def open_shards(target: StoreTarget, only: int | None) -> list[ShardReader]:
    """Return what reads the shards. Raises ``ConfigError`` when none has the region ``only``."""
    readers = [ShardReader(shard, only) for shard in target.shards]
    if only is not None and not any(reader.regions for reader in readers):
        raise ConfigError(
            f"--region {only} ({region_name(only)}) is not in {target.path}; stat and dump list "
            "what is"
        )
    return readers

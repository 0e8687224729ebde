"""Reads the regions of a shard, several at a time, without owning them: nothing is locked, written,
sealed or removed.

For tools that run beside a server. A region may be written, sealed or unlinked while it is read. A
page that was placed and not synced yet is no damage when it does not verify, and a file that was
unlinked meanwhile is reported as gone. A view lists the pages that recovery would find.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sglang_tiered.errors import ConfigError, StoreError
from sglang_tiered.storage.region import erase_log, pins
from sglang_tiered.storage.region.device import Files, aligned_buffer
from sglang_tiered.storage.region.files import CHECKPOINT_NAME
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    Contents,
    Extent,
    RegionHeader,
    extent_header_bytes,
    footer_bytes,
    other_version,
    parse_region_name,
    region_name,
    unpack_checkpoint,
    unpack_region_header,
)
from sglang_tiered.storage.region.walk import UNREADABLE, Problem, RegionScan, is_blank
from sglang_tiered.tools.store.target import Holder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    import numpy.typing as npt

    from sglang_tiered.tools.store.target import Shard, StoreTarget

__all__ = [
    "CheckpointState",
    "ByteMeter",
    "ReadOnlyDevice",
    "ScannedRegion",
    "ShardReader",
    "check_regions",
    "identities",
    "inspect_region",
    "totals",
]

_DIRECT = getattr(os, "O_DIRECT", 0)
_MAX_SMALL_FILE_BYTES = 64 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# They say something about this process, not about the file.
_OWN_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(slots=True)
class ScannedRegion:
    """Holds what one region file says of itself."""

    name: str
    sequence: int
    file_bytes: int = 0
    header: RegionHeader | None = None
    version: int | None = None  # of another format version; nothing else is known then
    sealed: bool = False
    gone: bool = False  # unlinked before or while it was read
    contents: Contents = field(default_factory=lambda: Contents.of([]))
    torn_bytes: int = 0  # behind the tail, placed but not verifying: in flight, or cut by a crash
    problems: list[Problem] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Return ``other format``, ``damaged``, ``sealed`` or ``open``."""
        if self.version is not None:
            return "other format"
        if self.problems:
            return "damaged"
        return "sealed" if self.sealed else "open"

    @property
    def tail(self) -> int:
        """Return where the last extent that counts ends."""
        return 0 if self.header is None else self.contents.end

    @property
    def payload_bytes(self) -> int:
        return int(self.contents.pages["length"].sum(dtype=np.int64))

    def page_ordinals(self) -> npt.NDArray[np.int64]:
        """Return the extent that each page is in."""
        counts = self.contents.extents["num_pages"].astype(np.int64)
        return np.repeat(np.arange(len(counts), dtype=np.int64), counts)


class CheckpointState(NamedTuple):
    present: bool
    valid: bool
    num_regions: int


class ByteMeter:
    """Counts the bytes read, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes_read = 0

    def read(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes

    def skip(self, nbytes: int) -> None:
        """Note bytes that were expected and need no reading."""


class ShardReader:
    """The region files a shard has now, or one of them. A context; ``owned`` when the caller
    holds the shard's lock. Raises ``StoreError`` when the shard cannot be read."""

    def __init__(self, shard: Shard, only: int | None = None, *, owned: bool = False) -> None:
        self.shard = shard
        self.num_gone = 0
        try:
            self.device = ReadOnlyDevice(shard.path)
        except OSError as error:
            raise StoreError(
                f"{shard.path} cannot be read ({error.strerror}); fix its permissions"
            ) from error
        self.holder = Holder(False, None) if owned else shard.holder()
        self.checkpoint, self._durable_tails = self._read_checkpoint()
        try:
            self.erased = erase_log.read(self.device)
            self.names = sorted(self.device.list_names())
            self.pins = pins.read_all(self.device, self.names)
        except BaseException as error:
            self.device.release()
            if isinstance(error, OSError):
                raise StoreError(
                    f"{shard.path} cannot be read ({error.strerror}); check the disk and its "
                    "permissions"
                ) from error
            raise
        self.regions = [name for name in self.names if parse_region_name(name) is not None]
        self._newest = self.regions[-1] if self.regions else ""
        if only is not None:
            self.regions = [name for name in self.regions if name == region_name(only)]

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.device.release()

    def region_bytes(self) -> int:
        """Return the size of the region files that are still there."""
        nbytes = 0
        for name in self.regions:
            with contextlib.suppress(OSError):
                nbytes += self.device.status(name).st_size
        return nbytes

    def views(
        self, *, full: bool, jobs: int, meter: ByteMeter | None = None
    ) -> Iterator[ScannedRegion]:
        """Yield the regions in order of their sequence; count those that were unlinked
        meanwhile."""
        meter = meter or ByteMeter()
        with ThreadPoolExecutor(jobs, thread_name_prefix="store-scan") as pool:
            try:
                for view in pool.map(lambda name: self._view(name, full, meter), self.regions):
                    if view.gone:
                        self.num_gone += 1
                    else:
                        yield view
            finally:
                pool.shutdown(cancel_futures=True)

    def _view(self, name: str, full: bool, meter: ByteMeter) -> ScannedRegion:
        before = self._modified(name)
        view = self._inspect(name, full, meter)
        if view.problems and not view.gone:
            # A server may have been sealing it just then; what is still wrong now is wrong.
            changed = self._modified(name) != before
            if changed or self.holder.may_write or self.shard.holder().may_write:
                view = self._inspect(name, full, meter)
        return view

    def _inspect(self, name: str, full: bool, meter: ByteMeter) -> ScannedRegion:
        num_read = 0

        def advance(nbytes: int) -> None:
            nonlocal num_read
            num_read += nbytes
            meter.read(nbytes)

        view = inspect_region(
            self.device,
            name,
            full=full,
            durable_tails=self._durable_tails,
            may_be_new=name == self._newest and self.holder.may_write,
            advance=advance,
        )
        meter.skip(max(view.file_bytes - num_read, 0))
        return view

    def _modified(self, name: str) -> int | None:
        try:
            return self.device.status(name).st_mtime_ns
        except OSError:
            return None

    def _read_checkpoint(self) -> tuple[CheckpointState, dict[tuple[int, bytes], int]]:
        try:
            entries = unpack_checkpoint(self.device.read_file(CHECKPOINT_NAME))
        except FileNotFoundError:
            return CheckpointState(False, False, 0), {}
        except OSError:
            entries = None
        if entries is None:
            return CheckpointState(True, False, 0), {}
        tails = {(entry.sequence, entry.nonce): entry.durable_tail for entry in entries}
        return CheckpointState(True, True, len(entries)), tails


def inspect_region(
    device: Files,
    name: str,
    *,
    full: bool,
    durable_tails: Mapping[tuple[int, bytes], int],
    may_be_new: bool,
    advance: Callable[[int], None] = lambda _: None,
) -> ScannedRegion:
    """Read one region file through a device whose descriptors are the system's.

    ``full`` checks every extent header and every page; without it only what recovery would look
    at. ``durable_tails`` is the checkpoint by sequence and nonce; ``may_be_new``: a server may be
    creating this file right now. ``advance`` hears of bytes read. Raises ``OSError`` only for
    conditions of this process, such as too many open files.
    """
    sequence = parse_region_name(name)
    assert sequence is not None, f"{name!r} does not name a region"
    view = ScannedRegion(name, sequence)
    try:
        fd = device.open(name)
    except FileNotFoundError:
        view.gone = True
        return view
    except OSError as error:
        if error.errno in _OWN_ERRNOS:
            raise
        view.problems.append(Problem("file", 0, 0, f"cannot be opened ({error.strerror})"))
        return view
    try:
        view.file_bytes = os.fstat(fd).st_size
        scan = RegionScan(device, fd, view.file_bytes, advance=advance)
        view.problems = scan.problems
        view.header = _read_header(scan, view, may_be_new)
        if view.header is not None:
            _read_contents(scan, view, view.header, full, durable_tails)
        view.gone = os.fstat(fd).st_nlink == 0
    except OSError as error:
        if error.errno in _OWN_ERRNOS:
            raise
        view.problems.append(Problem("file", 0, 0, f"cannot be read ({error.strerror})"))
    finally:
        device.close(fd)
    return view


def _read_header(scan: RegionScan, view: ScannedRegion, may_be_new: bool) -> RegionHeader | None:
    block = scan.read(0, aligned_buffer(BLOCK_BYTES))
    if may_be_new and (view.file_bytes == 0 or (block is not None and is_blank(block))):
        return None
    if block is None:
        what = "is empty" if view.file_bytes == 0 else f"has only {view.file_bytes} bytes"
        if view.file_bytes < BLOCK_BYTES:
            scan.report("file", 0, view.file_bytes, what)
        else:
            scan.report("header", 0, BLOCK_BYTES, UNREADABLE)
        return None
    view.version = other_version(block)
    if view.version is not None:
        return None
    header = unpack_region_header(block)
    if header is None:
        what = "is all zeros" if is_blank(block) else "does not verify"
        scan.report("header", 0, BLOCK_BYTES, what)
    elif header.sequence != view.sequence:
        name = region_name(header.sequence)
        scan.report("header", 0, BLOCK_BYTES, f"belongs to {name}: the file was renamed")
        return None
    return header


def _read_contents(
    scan: RegionScan,
    view: ScannedRegion,
    header: RegionHeader,
    full: bool,
    durable_tails: Mapping[tuple[int, bytes], int],
) -> None:
    scan.nbytes, scan.nonce = header.nbytes, header.nonce
    if header.nbytes != view.file_bytes:
        what = f"has {view.file_bytes} bytes, should {header.nbytes}"
        scan.report("file", 0, view.file_bytes, what)
    listed = scan.footer()
    view.sealed = scan.is_sealed
    if listed is not None:
        view.contents = listed
        if full:
            _check_sealed(scan, listed)
    else:
        # Whatever was sealed had been written; so had what the checkpoint says was synced.
        was_sealed = view.sealed or any(p.part == "trailer" for p in view.problems)
        durable = durable_tails.get((header.sequence, header.nonce), 0)
        written = view.file_bytes if was_sealed else durable
        view.contents = scan.walk(durable, written, full=full)
        view.torn_bytes = scan.torn_bytes


def _check_sealed(scan: RegionScan, contents: Contents) -> None:
    nbytes = footer_bytes(len(contents.extents), len(contents.pages))
    place = scan.nbytes - BLOCK_BYTES - nbytes, nbytes
    for ordinal, extent in enumerate(_extents(contents)):
        found = scan.extent_at(extent.offset, ordinal)
        if isinstance(found, Extent):
            same = (found.namespace, found.tenant) == (extent.namespace, extent.tenant)
            if not same or found.pages.tobytes() != extent.pages.tobytes():
                what = f"disagrees with the header of extent {ordinal} at {extent.offset}"
                scan.report("footer", *place, what)
        else:
            length = extent_header_bytes(len(extent.pages))
            what = f"header {found or 'is missing'}"
            scan.report("extent", extent.offset, length, what, ordinal)
        scan.report_pages(ordinal, extent, scan.bad_pages(extent))
    unlisted = scan.extent_at(contents.end, len(contents.extents))
    if isinstance(unlisted, Extent) and not scan.bad_pages(unlisted):
        scan.report("footer", *place, f"does not list the extent at {contents.end}")


def _extents(contents: Contents) -> Iterator[Extent]:
    start = 0
    for row in contents.extents:
        stop = start + int(row["num_pages"])
        names = row["namespace"].tobytes(), row["tenant"].tobytes()
        yield Extent(int(row["offset"]), names[0], contents.pages[start:stop], names[1])
        start = stop


def check_regions(target: StoreTarget, only: int | None) -> None:
    """Raise ``ConfigError`` when no shard has that region."""
    if only is None:
        return
    for shard in target.shards:
        with contextlib.suppress(OSError):
            (shard.path / region_name(only)).lstat()
            return
    raise ConfigError(
        f"--region {only} ({region_name(only)}) is not in {target.path}; stat and dump list what is"
    )


def totals(
    views: Sequence[ScannedRegion], field: str = "namespace"
) -> dict[bytes, tuple[int, int]]:
    """Return pages and payload bytes by namespace, or by ``tenant``."""
    counted: dict[bytes, tuple[int, int]] = {}
    for view in views:
        extents, pages = view.contents
        namespaces, inverse = np.unique(extents[field], return_inverse=True)
        rows = np.repeat(inverse, extents["num_pages"])
        num_pages = np.bincount(rows, minlength=len(namespaces))
        # Exact below 2**53 bytes in one region.
        nbytes = np.bincount(rows, weights=pages["length"], minlength=len(namespaces))
        for namespace, number, size in zip(namespaces, num_pages, nbytes, strict=True):
            before = counted.get(namespace.tobytes(), (0, 0))
            counted[namespace.tobytes()] = (before[0] + int(number), before[1] + int(size))
    return counted


def identities(view: ScannedRegion) -> npt.NDArray[Any]:
    """Return namespace and key of every page as one value each."""
    extents, pages = view.contents
    rows = np.zeros(len(pages), [("namespace", "V32"), ("key", "V32")])
    rows["namespace"] = np.repeat(extents["namespace"], extents["num_pages"])
    rows["key"] = pages["key"]
    return rows.view("V64").reshape(-1)


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

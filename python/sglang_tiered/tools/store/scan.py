"""Reads the regions of a shard as recovery does, several at a time, without owning them: nothing is
locked, written, sealed or removed.

For tools that run beside a server. A region may be written, sealed or unlinked while it is read. A
page that was placed and not synced yet is no damage when it does not verify, and a file that was
unlinked meanwhile is reported as gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.errors import ConfigError, StoreError
from sglang_tiered.storage.region import erase_log, pins
from sglang_tiered.storage.region.device import FileReader
from sglang_tiered.storage.region.files import ERASED_NAME
from sglang_tiered.storage.region.format import Contents, parse_region_name, region_name
from sglang_tiered.storage.region.walk import Problem, RegionScan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    import numpy.typing as npt

    from sglang_tiered.storage.region.format import RegionHeader
    from sglang_tiered.tools.store.target import Shard, StoreTarget

__all__ = ["ByteMeter", "ScannedRegion", "ShardReader", "check_regions", "identities", "totals"]

# They say something about this process, not about the file.
_OWN_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class ScannedRegion(RegionScan):
    """What one region file says of itself. ``gone``: it was unlinked before it was read, or
    meanwhile."""

    def __init__(self, device: FileReader, name: str, advance: Callable[[int], None]) -> None:
        super().__init__(device, -1, 0, advance=advance)
        sequence = parse_region_name(name)
        assert sequence is not None, f"{name!r} does not name a region"
        self.name, self.sequence, self.gone = name, sequence, False
        self.header: RegionHeader | None = None
        self.contents = Contents.of([])

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
        """Return ``other format``, ``damaged``, ``sealed`` or ``open``."""
        if self.version is not None:
            return "other format"
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
    """The region files a shard has now, or one of them. A context. Raises ``StoreError`` when the
    shard cannot be read."""

    def __init__(self, shard: Shard, only: int | None = None) -> None:
        self.shard = shard
        self.num_gone = 0
        try:
            self.device = FileReader(shard.path)
            self.holder = shard.holder()
            names = sorted(self.device.list_names())
            self.erased = erase_log.read(self.device)
            if self.erased.damaged and self.holder.may_write:
                self.erased = erase_log.read(self.device)  # a server may have been writing it
            self.pins = pins.read_all(self.device, names)
        except OSError as error:
            raise StoreError(
                f"{shard.path} cannot be read ({error.strerror}); check the disk and its "
                "permissions"
            ) from error
        self.regions = [name for name in names if parse_region_name(name) is not None]
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

        may_be_new = name == self._newest and self.holder.may_write
        view = ScannedRegion(self.device, name, advance)
        view.scan(full=full, may_be_new=may_be_new)
        meter.skip(max(view.file_bytes - num_read, 0))
        return view

    def _modified(self, name: str) -> int | None:
        try:
            return self.device.status(name).st_mtime_ns
        except OSError:
            return None


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

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
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.errors import ConfigError, StoreError
from sglang_tiered.storage.region import erase_log, pins
from sglang_tiered.storage.region.device import FileReader
from sglang_tiered.storage.region.format import (
    ERASED_NAME,
    Contents,
    parse_region_name,
    region_name,
)
from sglang_tiered.storage.region.walk import Problem, RegionScan
from sglang_tiered.tools.store.target import find_holder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sglang_tiered.storage.region.format import RegionHeader
    from sglang_tiered.tools.store.target import StoreTarget


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

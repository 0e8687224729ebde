"""Reads the regions of a shard, several at a time, while a server may be writing them."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sglang_tiered.errors import ConfigError, StoreError
from sglang_tiered.storage.region import erase_log, pins
from sglang_tiered.storage.region.files import CHECKPOINT_NAME
from sglang_tiered.storage.region.format import (
    parse_region_name,
    region_name,
    unpack_checkpoint,
)
from sglang_tiered.tools.store.holder import Holder
from sglang_tiered.tools.store.inspection import inspect_region
from sglang_tiered.tools.store.read_only_device import ReadOnlyDevice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import numpy.typing as npt

    from sglang_tiered.tools.store.inspection import RegionView
    from sglang_tiered.tools.store.target import Shard, Target

__all__ = ["CheckpointState", "Meter", "ShardReader", "check_regions", "identities", "totals"]


class CheckpointState(NamedTuple):
    present: bool
    valid: bool
    num_regions: int


class Meter:
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

    def views(self, *, full: bool, jobs: int, meter: Meter | None = None) -> Iterator[RegionView]:
        """Yield the regions in order of their sequence; count those that were unlinked
        meanwhile."""
        meter = meter or Meter()
        with ThreadPoolExecutor(jobs, thread_name_prefix="store-scan") as pool:
            try:
                for view in pool.map(lambda name: self._view(name, full, meter), self.regions):
                    if view.gone:
                        self.num_gone += 1
                    else:
                        yield view
            finally:
                pool.shutdown(cancel_futures=True)

    def _view(self, name: str, full: bool, meter: Meter) -> RegionView:
        before = self._modified(name)
        view = self._inspect(name, full, meter)
        if view.problems and not view.gone:
            # A server may have been sealing it just then; what is still wrong now is wrong.
            changed = self._modified(name) != before
            if changed or self.holder.may_write or self.shard.holder().may_write:
                view = self._inspect(name, full, meter)
        return view

    def _inspect(self, name: str, full: bool, meter: Meter) -> RegionView:
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


def check_regions(target: Target, only: int | None) -> None:
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


def totals(views: Sequence[RegionView], field: str = "namespace") -> dict[bytes, tuple[int, int]]:
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


def identities(view: RegionView) -> npt.NDArray[Any]:
    """Return namespace and key of every page as one value each."""
    extents, pages = view.contents
    rows = np.zeros(len(pages), [("namespace", "V32"), ("key", "V32")])
    rows["namespace"] = np.repeat(extents["namespace"], extents["num_pages"])
    rows["key"] = pages["key"]
    return rows.view("V64").reshape(-1)

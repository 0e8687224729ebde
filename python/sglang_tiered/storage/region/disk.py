"""``Disk``: a store's device, as all its parts use it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from typing import TYPE_CHECKING

from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.base import Health

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from sglang_tiered.storage.backoff import OnceLog
    from sglang_tiered.storage.region.device import FileDevice
    from sglang_tiered.storage.region.regions import Region
    from sglang_tiered.storage.region.state import StoreState


_READ_FAILURES_TOLERATED = 2


class Disk:
    """A store's device, and whether it may be used. RUNNING while reads work and nothing hangs;
    MISS_ONLY otherwise, with automatic retry, or for good once what the store has is no longer its
    own.

    Thread-safe. What calls the device or lets a region go is called without the store's lock, and
    raises ``OSError`` where the device does; all else returns at once. Nothing runs in the
    background: the next caller notices an I/O that hangs.
    ``is_held`` asks the filesystem whether the store's lock still keeps others away.
    """

    def __init__(
        self,
        directory: Path,
        device: FileDevice,
        state: StoreState,
        log: OnceLog,
        is_held: Callable[[], bool],
        clock: Callable[[], float],
        io_timeout_s: float,
    ) -> None:
        self.directory, self.device, self.state, self.log = directory, device, state, log
        self.clock = clock
        self.stores = Backoff(clock)  # which failed ones pause, while loads go on
        self._is_held = is_held
        self._io_timeout_s = io_timeout_s
        self._lock = threading.Lock()
        self._tokens = itertools.count()
        self._started: dict[int, float] = {}  # guarded by _lock
        self._reads = Backoff(clock)
        self._cause = ""  # of the last failure of the device; guarded by _lock
        self._lost = ""  # why it is not used again; guarded by _lock
        # The system tells a failure to one of two that sync a file at once.
        self._syncing = threading.Lock()

    # ---- Health ----

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Wrap every blocking call to the device."""
        token = next(self._tokens)
        with self._lock:
            self._started[token] = self.clock()
        try:
            yield
        finally:
            with self._lock:
                took_s = self.clock() - self._started.pop(token)
                if took_s > self._io_timeout_s:
                    self._cause = f"an operation took {took_s:.0f} s"
                    self._reads.fail()

    def health(self) -> tuple[Health, str]:
        """Return the state of now and why; the reason is empty while RUNNING."""
        with self._lock:
            if self._lost:
                return Health.MISS_ONLY, self._lost
            now = self.clock()
            waited_s = now - min(self._started.values(), default=now)
            if waited_s > self._io_timeout_s:
                return Health.MISS_ONLY, f"the device has not answered for {waited_s:.0f} s"
            if not self._reads.is_over:
                return Health.MISS_ONLY, self._cause
            return Health.RUNNING, ""

    @property
    def is_running(self) -> bool:
        return self.health()[0] is Health.RUNNING

    def accepts_stores(self) -> bool:
        return not self._lost and self.stores.is_over

    def is_ours(self) -> bool:
        """Return whether the directory is still this store's alone; misses from now on if not."""
        try:
            with self.watch():
                if self._is_held():
                    return True
        except OSError:
            return True  # which says nothing about who has it
        with self._lock:
            self._lost = "its directory or the lock in it was removed"
        return False

    def fault(self, cause: str) -> None:
        """Answer misses for a while: the engine failed, not the device."""
        with self._lock:
            self._cause = cause
            self._reads.fail()

    def read_ended(self, error: OSError | None) -> None:
        """Note how a read went: a few failures in a row make the device sick."""
        with self._lock:
            if error is not None:
                self._cause = f"reads fail: {error.strerror or error}"
                self._reads.fail(_READ_FAILURES_TOLERATED)
            elif self._reads.is_over:  # else it was begun before the incident, and proves nothing
                self._reads.succeed()

    # ---- Calls to the device ----

    def write(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        """Write whole blocks, all of them, and count them."""
        nbytes = sum(segment.nbytes for segment in segments)
        with self.watch():
            written = self.device.writev(fd, segments, offset)
        if written != nbytes:
            raise OSError(errno.EIO, f"short write, {written} of {nbytes} bytes")
        self._count(nbytes)
        return nbytes

    def replace(self, name: str, data: bytes) -> None:
        """Make a small file hold these bytes, durably and in one step, or what it did before."""
        with self.watch():
            self.device.replace_file(name, data)
        self._count(len(data))

    def _count(self, nbytes: int) -> None:
        with self.state.lock:
            self.state.bytes_written += nbytes

    def unlink(self, name: str, fd: int | None = None) -> None:
        """Remove a file, if it is there; with a descriptor, only the one that it is of."""
        with self.watch(), contextlib.suppress(FileNotFoundError):
            self.device.unlink(name, fd)

    def sync(self, region: Region) -> None:
        """Make all that was written to a region durable. After a failed sync the next one succeeds,
        and what the first lost stays lost: the region is ``suspect``, and fails from then on."""
        with self._syncing:
            if region.suspect:
                raise OSError(errno.EIO, f"a sync of {region.name} has failed before")
            try:
                with self.watch():
                    self.device.sync(region.fd)
            except OSError:
                region.suspect = True
                raise

    def sync_names(self, regions: Iterable[Region] = ()) -> None:
        """Make durable which files there are, those of these regions among them."""
        try:
            with self.watch():
                self.device.sync_directory()
        except OSError:
            for region in regions:
                region.suspect = region.suspect or not region.has_name
            raise

    # ---- Regions that threads keep open ----

    def unpin(self, region: Region) -> None:
        """Let a region go that this thread kept open."""
        with self.state.lock:
            unused = self.state.regions.unpin(region)
        if unused:
            self.dispose(region)

    def dispose(self, region: Region) -> None:
        """Close a retired region that no thread pins."""
        with contextlib.suppress(OSError):
            self.device.close(region.fd)
        with self.state.lock:
            region.fd = -1
            self.state.regions.closed(region)
            self.state.space_freed.notify_all()

"""The tier directory: recognize it, refuse a foreign one, make it ready, lock it.

The manifest is what says that files in here may be deleted. A directory without one is touched only
when it is empty or holds only names of the product.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import re
import resource
import stat
import time
from typing import TYPE_CHECKING

import xxhash

from sglang_tiered.errors import (
    StoreError,
    StoreForeignError,
    StoreLockedError,
)
from sglang_tiered.storage.filesystem import (
    FULL_ERRNOS,
    read_small_file,
    replace_file,
    sync_names,
)
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    IGNORED_NAMES,
    LOCK_NAME,
    MANIFEST_NAME,
    SHARD_PREFIX,
    is_shard_file,
    is_shard_name,
    is_tier_file,
    is_tier_temporary,
    newer_format,
    other_version,
    parse_region_name,
)
from sglang_tiered.storage.region.walk import NOT_A_FILE_ERRNOS, persist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType


STORE_VERSION = 4
"""Programs of version 3 would serve what ``ERASED`` says is dead."""
_MANIFEST = re.compile(rb"(sglang-tiered store (\d{1,9})) ([0-9a-f]{16})\n")
_WAY_OUT = "pass an empty directory or another --tier-dir"
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_POLL_S = 0.05
_MAX_LOCKS = 10
_RESERVED = 512  # of a process, for sockets, libraries and the other files of its tiers


class DirectoryState(enum.Enum):
    ABSENT = "absent"
    EMPTY = "empty"
    OURS = "ours"
    OURS_DAMAGED = "ours, without a valid manifest"


def shard_path(path: Path, name: str) -> Path:
    """Return where that shard lies. Raises ``ValueError`` for a name that cannot be one."""
    shard = SHARD_PREFIX + name
    if not is_shard_name(shard):
        raise ValueError(f"{name!r} cannot name a shard")
    return path / shard


def inspect(path: Path) -> DirectoryState:
    """Say what is at ``path``, touching nothing.

    Raises ``StoreForeignError`` for a foreign directory, ``StoreFormatError`` for a store of
    a newer format, ``StoreError`` for a directory that cannot be read.
    """
    try:
        return _inspect(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be read ({error.strerror}); fix its permissions, or those of the folders "
        f"above it, or {_WAY_OUT}"
    )


def refuse_strangers(path: Path) -> None:
    """Raise ``StoreError`` for a directory that everybody can write to, or that may not be looked
    at. Touches nothing."""
    try:
        is_open = path.is_dir() and path.stat().st_mode & stat.S_IWOTH
    except OSError as error:
        raise _unreadable(path, error) from error
    if is_open:
        raise StoreError(
            f"{path} can be written by everybody on this machine, who could put pages there that "
            "the model would use; chmod o-w it, or pass a directory in it as --tier-dir"
        )


def prepare(path: Path) -> DirectoryState:
    """Make ``path`` a store directory, or refuse as ``inspect`` does; returns what was found.

    Creates it with its parents (mode 0700), writes a missing or damaged manifest, makes sure that
    files can be created, and removes what a start that died left half written. The caller holds the
    directory's lock where the directory exists.
    """
    state = inspect(path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Written even over a valid one: it is the only honest test of a writable directory, as
        # root passes every permission check and a read-only mount fails none of them.
        _write_manifest(path)
        if state is not DirectoryState.ABSENT:
            for name in filter(is_tier_temporary, os.listdir(path)):
                os.unlink(path / name)
    except OSError as error:
        if state is DirectoryState.OURS and error.errno in FULL_ERRNOS:
            return state  # a full disk must not keep a server with a good store from starting
        raise StoreError(
            f"{path} is not writable ({error.strerror}); "
            "fix its permissions or pass another --tier-dir"
        ) from error
    return state


def remove_shards(path: Path, *, keep: Callable[[str], bool], timeout_s: float = 0.0) -> list[str]:
    """Remove the shards whose name ``keep`` refuses; returns the names of those removed.

    For shards that no server started from here will open again, whose bytes no cap would count.
    The caller holds the lock of ``path``. A shard that another process holds for ``timeout_s`` is
    left alone, and so is any foreign file in a shard. Raises ``StoreError`` for a shard that
    cannot be removed.
    """
    removed = []
    for shard in sorted(path.glob(f"{SHARD_PREFIX}*")):
        name = shard.name.removeprefix(SHARD_PREFIX)
        if not _is_ours(shard) or keep(name):
            continue
        try:
            with DirectoryLock(shard, timeout_s=timeout_s) as lock:
                for file in os.listdir(lock.directory):
                    if is_shard_file(file) and file != LOCK_NAME:
                        os.unlink(file, dir_fd=lock.directory)
                os.unlink(LOCK_NAME, dir_fd=lock.directory)
            shard.rmdir()
        except StoreLockedError:
            continue
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                continue
            raise StoreError(
                f"{shard} cannot be removed ({error.strerror}); fix its permissions or {_WAY_OUT}"
            ) from error
        removed.append(name)
    return removed


def _inspect(path: Path) -> DirectoryState:
    if not os.path.lexists(path):
        return DirectoryState.ABSENT
    if not path.is_dir():
        raise StoreForeignError(f"{path} is not a directory; {_WAY_OUT}")
    names = set(os.listdir(path)) - IGNORED_NAMES
    if not names:
        return DirectoryState.EMPTY
    version = manifest_version(path)
    if version is not None:
        if version > STORE_VERSION:
            raise newer_format(path, version, STORE_VERSION)
        return DirectoryState.OURS
    for name in sorted(names):
        if not _is_ours(path / name):
            raise StoreForeignError(f"{path} holds {name!r}, not a tier store's file; {_WAY_OUT}")
    for shard in sorted(name for name in names if is_shard_name(name)):
        _inspect_shard(path / shard)
    return DirectoryState.OURS_DAMAGED


def _is_ours(path: Path) -> bool:
    mode = path.lstat().st_mode
    if is_shard_name(path.name):
        return stat.S_ISDIR(mode)
    return stat.S_ISREG(mode) and is_tier_file(path.name)


def _inspect_shard(shard: Path) -> None:
    for name in sorted(os.listdir(shard)):
        if not is_shard_file(name):
            raise StoreForeignError(f"{shard} holds {name!r}, not a tier store's file; {_WAY_OUT}")
        if parse_region_name(name) is None:
            continue
        version = other_version(read_small_file(shard / name, most=BLOCK_BYTES))
        if version is not None and version > FORMAT_VERSION:
            raise newer_format(shard / name, version, FORMAT_VERSION)


def manifest_version(path: Path) -> int | None:
    """Return the version a manifest states; ``None`` when it is missing or does not verify. Raises
    ``OSError`` for one that cannot be read."""
    try:
        text = persist(lambda: read_small_file(path / MANIFEST_NAME, most=256))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in NOT_A_FILE_ERRNOS:
            raise
        return None
    match = _MANIFEST.fullmatch(text)
    if match is None or xxhash.xxh3_64_hexdigest(match[1]).encode() != match[3]:
        return None
    return int(match[2])


def _write_manifest(path: Path) -> None:
    statement = b"sglang-tiered store %d" % STORE_VERSION
    text = statement + b" %s\n" % xxhash.xxh3_64_hexdigest(statement).encode()
    # By process, as the ranks of one server may prepare their directory at the same time.
    replace_file(path / MANIFEST_NAME, text, path / f"{MANIFEST_NAME}.tmp-{os.getpid()}")
    fd = os.open(path, _OPEN_DIRECTORY)
    try:
        sync_names(fd)
    finally:
        os.close(fd)


def max_regions() -> int:
    """Return how many regions the hard limit has room for, in a process that holds nothing else."""
    return _limits()[1] - _RESERVED


def allow_regions(directory: Path, capacity_bytes: int, region_bytes: int) -> None:
    """Raise the soft limit to what a store needs that holds what is there and fills up to its cap.
    Raises ``StoreError`` where the hard limit is lower, and ``OSError``."""
    held = [
        entry.stat(follow_symlinks=False).st_size
        for entry in os.scandir(directory)
        if parse_region_name(entry.name) is not None
    ]
    num_regions = len(held) + max(capacity_bytes - sum(held), 0) // region_bytes
    soft, hard = _limits()
    needed = num_regions + _num_open() + _RESERVED
    if needed <= soft:
        return
    if needed > hard:
        raise StoreError(
            f"{directory} may come to hold {num_regions} region files, all of them open, but the "
            f"hard limit of open files (ulimit -Hn) is {hard}, {_RESERVED} of them for other use; "
            "raise it, or pass a smaller --tier-nvme-bytes or "
            "another --tier-dir"
        )
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, limits[1]))


def _limits() -> tuple[int, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = (1 << 31) - 1
    return (most if soft == unlimited else soft, most if hard == unlimited else hard)


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0  # it was only to be exact


class DirectoryLock:
    """One process per directory: holds ``path/LOCK`` from construction until ``release``, or until
    the kernel drops it because the process died. Usable as a context manager.

    ``directory`` is a descriptor of what is locked, which stays the lock's: the name may come to
    mean another directory. ``timeout_s`` waits that long for the present holder, such as a server
    that is shutting down. Raises ``StoreLockedError`` when the time is up and ``StoreError`` when
    the lock file cannot be made. The file itself stays: unlinking it would let two processes hold
    different ones.
    """

    def __init__(
        self, path: Path, *, timeout_s: float = 0.0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._path = path
        self.directory, self._fd = -1, -1
        what, way_out = "opened", "make the directory writable or pass another --tier-dir"
        try:
            self._open(time.monotonic() + timeout_s, sleep)
            what = "written"
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except StoreLockedError:
            self.release()
            raise
        except OSError as error:
            # The pid only serves the message of others; a full disk must not keep the lock away.
            if what == "written" and error.errno in FULL_ERRNOS:
                return
            if what == "opened" and self._fd >= 0:
                what, way_out = "taken", "pass a --tier-dir on a local filesystem"
            self.release()
            raise StoreError(
                f"the lock {path / LOCK_NAME} cannot be {what} ({error.strerror}); {way_out}"
            ) from error

    def _open(self, deadline: float, sleep: Callable[[float], None]) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(_MAX_LOCKS):
            self.directory = os.open(self._path, _OPEN_DIRECTORY)
            self._fd = os.open(LOCK_NAME, flags, 0o600, dir_fd=self.directory)
            self._acquire(self._fd, deadline, sleep)
            if self.is_held():
                return
            self.release()  # its last holder removed it; there may be a new one
        raise OSError(errno.ESTALE, "it is removed again and again")

    def _acquire(self, fd: int, deadline: float, sleep: Callable[[float], None]) -> None:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                    raise StoreLockedError(
                        f"{self._path} is in use by process {holder}; "
                        "stop it or pass another --tier-dir"
                    ) from None
            sleep(_POLL_S)

    def is_held(self) -> bool:
        """Return whether the lock keeps others away: the directory and its ``LOCK`` are those that
        were locked. Asks the filesystem, on any thread."""
        try:
            there = os.stat(LOCK_NAME, dir_fd=self.directory, follow_symlinks=False)
            return os.path.samestat(there, os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let the next process in. Idempotent."""
        held = self.directory, self._fd
        self.directory, self._fd = -1, -1
        for fd in held:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

"""A bucket that is a directory: durable writes, reads without a copy, listings in order."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import secrets
import stat
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.filesystem import NOT_OFFERED_ERRNOS, replace_file, sync_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


logger = logging.getLogger(__name__)

# Not through a link, and never waiting for the writer of a named pipe: objects are files.
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MAX_TRIES = 3
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ESPIPE, errno.ENOTDIR)
_MAX_BUFFERS = 1024  # of one call (IOV_MAX)
_NO_WAIT = getattr(os, "RWF_NOWAIT", None)  # Linux has it
LISTED_AT_ONCE = 1000
_MAX_KEPT = 32
_PAGES = "/pages/"
STAGED = "#"
"""In the name of a file that is still being written, or whose writer died."""


class Listed(NamedTuple):
    """One object of a listing."""

    path: str
    size: int
    modified: float  # seconds since 1970, as the store says
    tag: str  # another one whenever the object was written


class Directory:
    """The files under one root, by the paths of their objects; nothing is reached through a link
    below it, as others may write there. Thread-safe. Raises ``OSError``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._synced: set[str] = set()
        self._kept: dict[str, _Kept] = {}  # folders that are read from, by path
        self.offers_cached = _NO_WAIT is not None
        self._syncs_names = True

    @contextlib.contextmanager
    def _open_folder(self, folder: str, *, make: bool = False) -> Iterator[int]:
        """Open a folder, step by step; one behind a link is not found."""
        if make:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.root, _FOLDER)
        try:
            for part in folder.split("/") if folder else ():
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=fd)
                below = _open(part, _FOLDER | os.O_NOFOLLOW, fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _open_file(self, path: str) -> int:
        """Open a file; of a page the folder is kept, as its bytes tell whether they are right. What
        else is read must be what is there now, whatever is renamed or mounted."""
        folder, _, name = path.rpartition("/")
        kept = self._kept.get(folder)
        if kept is not None:
            with contextlib.suppress(OSError):  # as another server removed the folder and made it
                return _open(name, _OPEN, kept.fd)
        with self._open_folder(folder) as folder_fd:
            fd = _open(name, _OPEN, folder_fd)
            if _PAGES not in folder:
                return fd
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[folder] = _Kept(os.dup(folder_fd))
        return fd

    def modified(self, path: str) -> float:
        """Return when a file was written, in seconds since 1970."""
        folder, _, name = path.rpartition("/")
        with self._open_folder(folder) as fd:
            return _status(name, fd).st_mtime

    def read(self, path: str, nbytes: int, into: memoryview | None = None) -> memoryview:
        """Return the first bytes of a file, in ``into`` if there is such room. What is no file is
        not found."""
        room = memoryview(bytearray(nbytes)) if into is None else into[:nbytes]
        fd, filled = self._open_file(path), 0
        try:
            while filled < len(room) and (num_read := os.preadv(fd, [room[filled:]], filled)):
                filled += num_read
        except OSError as error:
            raise _no_file(error) from None
        finally:
            os.close(fd)
        return room[:filled]

    def open_cached(self, path: str) -> int | None:
        """Open a file for ``read_cached``, which may wait for storage, as closing it may; None
        where it cannot be opened."""
        try:
            return self._open_file(path)
        except OSError:
            return None

    def read_cached(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers with what the page cache holds of a file, up to the first byte that would
        have to be waited for; returns how many bytes. Never raises: any error is 0, and so are file
        systems that do not offer it (NFS, FUSE)."""
        assert _NO_WAIT is not None
        filled = 0
        try:
            for at in range(0, len(buffers), _MAX_BUFFERS):
                part = buffers[at : at + _MAX_BUFFERS]
                num_read = os.preadv(fd, part, filled, _NO_WAIT)
                filled += num_read
                if num_read < sum(buffer.nbytes for buffer in part):
                    break
        except OSError as error:
            if error.errno in NOT_OFFERED_ERRNOS:
                self.offers_cached = False
        return filled

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Write a file, whole or not at all; durable, with its name and the folders it is in. Where
        names cannot be synced (SMB, 9p, drvfs) the file alone, with a line in the log."""
        folder, _, name = path.rpartition("/")
        for num_left in reversed(range(_MAX_TRIES)):  # another server removes folders left empty
            try:
                with self._open_folder(folder, make=True) as fd:
                    staged = f"{name}{STAGED}{secrets.token_hex(8)}"
                    # As far as the umask says: servers of other users share them.
                    replace_file(name, data, staged, fd, mode=0o666)
                    self._sync_names(fd)
                break
            except FileNotFoundError:
                self._synced.discard(folder)
                if not num_left:
                    raise
        if folder not in self._synced:
            above = folder
            while above:
                above = above.rpartition("/")[0]
                with self._open_folder(above) as fd:
                    self._sync_names(fd)
            self._synced.add(folder)

    def replace(self, listed: Listed, data: bytes) -> bool:
        """Write a file in the place of one that was listed; returns whether that was still so. What
        another server does in the instant between the look and the write is lost."""
        folder, _, name = listed.path.rpartition("/")
        try:
            with self._open_folder(folder) as fd:
                is_same = _tag(_status(name, fd)) == listed.tag
        except FileNotFoundError:
            return False
        if is_same:
            self.write(listed.path, data)
        return is_same

    def remove(self, path: str) -> None:
        """Remove a file, and the folder that it leaves empty."""
        folder, _, name = path.rpartition("/")
        with self._open_folder(folder) as fd:
            os.unlink(name, dir_fd=fd)
        above, _, name = folder.rpartition("/")
        with contextlib.suppress(OSError), self._open_folder(above) as fd:
            os.rmdir(name, dir_fd=fd)
            self._synced.discard(folder)

    def listing(self, folder: str, after: str | None) -> Iterator[list[Listed]]:
        """Yield the files in a folder and below it in the order of their paths, in parts, from the
        path behind ``after`` on. Those being written are there too."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)  # one that is gone is an error
        files = self._walk(folder, after or "")
        while chunk := list(itertools.islice(files, LISTED_AT_ONCE)):
            yield chunk

    def _walk(self, folder: str, after: str) -> Iterator[Listed]:
        for each in self._look(folder, after):
            if isinstance(each, Listed):
                yield each
            elif each >= after[: len(each)]:
                yield from self._walk(each, after)

    def _look(self, folder: str, after: str) -> list[Listed | str]:
        """Return the files in a folder behind ``after``, and the paths of the folders in it, in the
        order of paths."""
        found: list[Listed | str] = []
        with (
            contextlib.suppress(FileNotFoundError),
            self._open_folder(folder) as fd,
            os.scandir(fd) as entries,
        ):
            for entry in entries:
                path = f"{folder}/{entry.name}"
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    if entry.is_dir(follow_symlinks=False):
                        found.append(path)
                    elif path > after and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        found.append(Listed(path, status.st_size, status.st_mtime, _tag(status)))
        return sorted(found, key=lambda each: each if isinstance(each, str) else each.path)

    def folders(self, folder: str) -> list[str]:
        """Return the paths of the folders in a folder."""
        return [each for each in self._look(folder, "") if isinstance(each, str)]

    def _sync_names(self, folder: int) -> None:
        if self._syncs_names:
            self._syncs_names = sync_names(folder)
            if not self._syncs_names:
                logger.warning(
                    "%s cannot make names durable, as its filesystem does not offer it: loss of "
                    "power may take objects that were just stored",
                    self.root,
                )


class _Kept:
    """An open folder, closed when nobody uses it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def _no_file(error: OSError) -> OSError:
    """Return what an error says of an object: what is no file is not found."""
    is_none = error.errno in _NOT_A_FILE
    return FileNotFoundError(errno.ENOENT, "not a file") if is_none else error


def _tag(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"


def _status(name: str, folder: int) -> os.stat_result:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a file")
    return status


def _open(name: str, flags: int, folder: int) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        raise _no_file(error) from None

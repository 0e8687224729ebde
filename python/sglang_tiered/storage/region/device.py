"""The seam between the region store and the filesystem; alignment is owned here, nowhere else.

Callers read and write whole blocks at block offsets, from segments of any alignment. Where
``O_DIRECT`` is on, aligned segments go to the device as they are and others pass through a bounce
buffer. Where it is refused (overlay, some network filesystems) I/O is buffered.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import stat
import threading
import weakref
from typing import TYPE_CHECKING, cast

import numpy as np

from sglang_tiered.storage.filesystem import (
    FULL_ERRNOS,
    NOT_OFFERED_ERRNOS,
    read_small_file,
    regular,
    replace_file,
    sync_names,
)
from sglang_tiered.storage.region.format import BLOCK_BYTES, PROBE_NAME, TEMPORARY_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sglang_tiered.storage.base import Page


logger = logging.getLogger(__name__)

_BOUNCE_BYTES = 1 << 20
_IOV_MAX = 1024
_DIRECT = getattr(os, "O_DIRECT", 0)
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


def aligned_buffer(nbytes: int) -> memoryview:
    """Return anonymous writable memory starting at a block boundary; freed with its last view. A
    child of this process does not have it. Private, as shared memory is of small pages, of which
    the device gets many pieces."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # or a fork may move what a read is being written to
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def copy_page(page: Page, into: memoryview) -> None:
    """Copy the bytes of a page to the begin of ``into``; other threads run meanwhile."""
    at = 0
    for segment in page:
        # By numpy, which lets go of the interpreter for it; an assignment would not.
        np.copyto(np.asarray(into[at : at + segment.nbytes]), segment)
        at += segment.nbytes


class FileReader:
    """Files of one local directory, which is the same one wherever it is moved, for who looks
    beside its owner. It reads into aligned memory past the page cache, or drops from that what it
    read.

    Every method may be called from any thread, may block on the disk, and raises ``OSError`` and
    nothing else. A descriptor belongs to the thread that got it until it passes it to ``close``.
    """

    _access = os.O_RDONLY

    def __init__(self, directory: Path, *, lock: int | None = None) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        name = directory if lock is None else "."
        self._fd = os.open(name, flags, dir_fd=lock)
        self._closing = weakref.finalize(self, os.close, self._fd)
        self.direct = bool(_DIRECT)

    def release(self) -> None:
        """Close the directory; every later call for a name raises ``OSError``. Idempotent."""
        self._fd = -1
        self._closing()

    def _open(self, name: str, flags: int) -> int:
        flags |= self._access | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._fd)

    def status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def list_names(self) -> list[str]:
        """Return the names in the directory, in no particular order."""
        return os.listdir(self._fd)

    def open(self, name: str) -> int:
        """Open an existing regular file, for writing too where that can be; never follows a
        symlink."""
        mode = self.status(name).st_mode
        if not stat.S_ISREG(mode):  # asked first: opening some device nodes does something
            kind = _KINDS.get(stat.S_IFMT(mode), "a device node")
            raise OSError(errno.ENXIO, f"{kind}, not a regular file")
        try:
            fd = self._open(name, (_DIRECT if self.direct else 0) | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.EINVAL or self._access != os.O_RDONLY:
                raise
            self.direct = False
            fd = self._open(name, os.O_NONBLOCK)
        return regular(fd, name)

    def readv(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        """Fill the segments, in all whole blocks, from ``offset``; fewer bytes at the end."""
        try:
            done = os.preadv(fd, segments, offset)
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & _DIRECT:
                raise
            # Some filesystems open with O_DIRECT and refuse it only now.
            self.direct = False
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_DIRECT)
            done = os.preadv(fd, segments, offset)
        if not self.direct and done:
            os.posix_fadvise(fd, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def read_file(self, name: str) -> bytes:
        """Read a whole small file; raises ``FileNotFoundError`` where it is missing."""
        return read_small_file(name, self._fd)

    def close(self, fd: int) -> None:
        os.close(fd)


class FileDevice(FileReader):
    """Region files, mode 0600, for their owner. Tests have others in its place.

    ``direct=None`` probes ``O_DIRECT``; ``False`` forces buffered I/O. The mode is logged once.
    ``lock`` is the descriptor of the directory as it was locked, which stays the caller's; without
    it the directory is opened by its name.
    """

    _access = os.O_RDWR

    def __init__(
        self, directory: Path, *, direct: bool | None = None, lock: int | None = None
    ) -> None:
        super().__init__(directory, lock=lock)
        self._directory = directory  # for the log
        self._syncs_names = True
        self._bounce = threading.local()
        self._memory_alignment = 1 if direct is False or not _DIRECT else self._probe()
        self.direct = self._memory_alignment > 1
        mode = (
            f"direct I/O from memory aligned to {self._memory_alignment} bytes"
            if self.direct
            else "buffered I/O"
        )
        logger.info("%s uses %s", directory, mode)

    def _probe(self) -> int:
        """Return the alignment of memory that direct I/O needs here; 1 when it is refused.

        NVMe takes any multiple of 4, SATA and virtio want 512; PyTorch aligns host memory to 64,
        so asking decides whether pages of a host pool move without a copy.
        """
        try:
            fd = self._open(PROBE_NAME, os.O_CREAT | os.O_TRUNC | _DIRECT)
        except OSError as error:
            if error.errno in (*NOT_OFFERED_ERRNOS, *FULL_ERRNOS):
                return 1
            raise
        try:
            self.unlink(PROBE_NAME)
            memory = aligned_buffer(2 * BLOCK_BYTES)
            for alignment in (4, 64, 512, BLOCK_BYTES):
                try:
                    os.pwritev(fd, [memory[alignment : alignment + BLOCK_BYTES]], 0)
                    return alignment
                except OSError as error:
                    if error.errno in FULL_ERRNOS:
                        return BLOCK_BYTES  # opened, so not refused; the finer answer must wait
                    if error.errno not in NOT_OFFERED_ERRNOS:
                        raise
            return 1
        finally:
            os.close(fd)

    def create(self, name: str, nbytes: int) -> int:
        """Make a new file with its space reserved; leaves no file behind when it raises."""
        flags = os.O_CREAT | os.O_EXCL | (_DIRECT if self.direct else 0)
        fd = self._open(name, flags)
        try:
            with contextlib.suppress(PermissionError):  # drvfs and SMB may keep no modes
                os.fchmod(fd, 0o600)
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as error:
                # glibc emulates fallocate by small writes, which O_DIRECT answers with EINVAL.
                if error.errno not in NOT_OFFERED_ERRNOS:
                    raise
                os.ftruncate(fd, nbytes)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                self.unlink(name)
            raise
        return fd

    def is_intact(self, fd: int, nbytes: int) -> bool:
        """Return false when another process unlinked the file or changed its size."""
        status = os.fstat(fd)
        return status.st_nlink > 0 and status.st_size == nbytes

    def readv(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        return self._move(fd, segments, offset, is_read=True)

    def writev(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        """Write the segments, in all whole blocks, at ``offset``; fewer bytes when interrupted."""
        return self._move(fd, segments, offset, is_read=False)

    def _move(self, fd: int, segments: Sequence[memoryview], offset: int, *, is_read: bool) -> int:
        nbytes = sum(segment.nbytes for segment in segments)
        assert offset % BLOCK_BYTES == 0, f"offset {offset} is not on a block"
        assert nbytes % BLOCK_BYTES == 0, f"{nbytes} bytes are not whole blocks"
        call = os.preadv if is_read else os.pwritev
        if self._can_pass(segments):
            return _vectored(call, fd, segments, offset)
        done = 0
        bounce = self._bounce_buffer()
        for batch, nbytes in batches(segments, _BOUNCE_BYTES):
            if not is_read:
                _gather(batch, bounce)
            moved = call(fd, [bounce[:nbytes]], offset + done)
            if is_read:
                _scatter(bounce[:moved], batch)
            done += moved
            if moved < nbytes:
                break
        return done

    def sync(self, fd: int) -> None:
        """Make the file's data durable."""
        os.fdatasync(fd)

    def sync_directory(self) -> None:
        """Make names durable."""
        if self._syncs_names and not sync_names(self._fd):
            self._syncs_names = False
            logger.warning(
                "%s cannot make names durable, as its filesystem does not offer it: loss of power "
                "may take files that were just made, and bring back what was just removed",
                self._directory,
            )

    def file_bytes(self, name: str) -> int:
        """Return the size of a file, which need not be readable."""
        return self.status(name).st_size

    def replace_file(self, name: str, data: bytes) -> None:
        """Make ``name`` hold ``data``, durably and in one step: whatever happens, it holds the
        old or the new bytes."""
        replace_file(name, data, f"{name}{TEMPORARY_SUFFIX}", self._fd)
        self.sync_directory()

    def unlink(self, name: str, fd: int | None = None) -> None:
        """Remove a file; with a descriptor, only the one that it is of. Raises
        ``FileNotFoundError`` where that is not there."""
        if fd is not None and not os.path.samestat(self.status(name), os.fstat(fd)):
            raise FileNotFoundError(errno.ENOENT, "another file has its name", name)
        os.unlink(name, dir_fd=self._fd)

    def free_bytes(self) -> int:
        """Return how many bytes an unprivileged process could still write to this filesystem."""
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def _can_pass(self, segments: Sequence[memoryview]) -> bool:
        if not self.direct:
            return True
        return all(
            segment.nbytes % BLOCK_BYTES == 0 and _address(segment) % self._memory_alignment == 0
            for segment in segments
        )

    def _bounce_buffer(self) -> memoryview:
        buffer = getattr(self._bounce, "buffer", None)
        if buffer is None:
            buffer = self._bounce.buffer = aligned_buffer(_BOUNCE_BYTES)
        return cast("memoryview", buffer)


def _address(segment: memoryview) -> int:
    """Return where the segment lies; 1 (aligned to nothing) for memory ctypes will not look at."""
    if segment.readonly or segment.nbytes == 0:
        return 1
    return ctypes.addressof(ctypes.c_char.from_buffer(segment))


def _gather(pieces: Sequence[memoryview], into: memoryview) -> None:
    at = 0
    for piece in pieces:
        into[at : at + piece.nbytes] = piece
        at += piece.nbytes


def _scatter(data: memoryview, pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        take = min(piece.nbytes, data.nbytes)
        piece[:take] = data[:take]
        data = data[take:]


def _vectored(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    segments: Sequence[memoryview],
    offset: int,
) -> int:
    done = 0
    for start in range(0, len(segments), _IOV_MAX):
        batch = segments[start : start + _IOV_MAX]
        moved = call(fd, batch, offset + done)
        done += moved
        if start + _IOV_MAX < len(segments) and moved < sum(each.nbytes for each in batch):
            break
    return done


def batches(segments: Sequence[memoryview], limit: int) -> Iterator[tuple[list[memoryview], int]]:
    """Cut the segments into lists of ``limit`` bytes (the last may be shorter), with their sizes.
    As ``limit`` and the total are whole blocks, so is every list."""
    batch: list[memoryview] = []
    nbytes = 0
    for segment in segments:
        position = 0
        if nbytes + segment.nbytes < limit:
            batch.append(segment)
            nbytes += segment.nbytes
            continue
        while position < segment.nbytes:
            piece = segment[position : position + limit - nbytes]
            batch.append(piece)
            nbytes += piece.nbytes
            position += piece.nbytes
            if nbytes == limit:
                yield batch, nbytes
                batch, nbytes = [], 0
    if batch:
        yield batch, nbytes

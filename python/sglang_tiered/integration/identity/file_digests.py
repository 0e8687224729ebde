"""Digests of whole files: every byte is read once, and the result is remembered.

A digest is remembered under a stamp that every edit changes: device, inode, size, and the times at
which content and status changed, in nanoseconds. (The first time can be set back, the second
cannot.) Samples spread over the file must agree too. Images of a file system may be built with
equal times and inodes: a file that may lie in one is read at every start. The digests are kept in
one small checksummed file in the tier directory. Processes that share the directory, such as the
ranks of a server, take turns: the first reads, and the others find its digests.

A file without a remembered digest may still look like one that was read before, as when a container
fetches its weights anew at every start. Its probable digest is then known at once, the true one
only after reading it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.storage.filesystem import read_small_file, replace_file
from sglang_tiered.storage.region.format import WEIGHTS_NAME

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator
    from pathlib import Path


VERSION = 1
MAX_REMEMBERED = 4096
"""Number of files, about 100 bytes each. The earliest read are dropped first."""

CHUNK_BYTES = 1 << 20
NUM_SAMPLES, SAMPLE_BYTES = 16, 4096

SETTLED_NS = 2 * 10**9
"""A file that changed within this time could change again in the same tick of its file system's
clock, which its times would not show."""

TURN_LOOK_S = 0.1

logger = logging.getLogger(__name__)


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """Attributes that every edit of a file changes."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


class SeenFile(NamedTuple):
    """A file as it was at one moment."""

    path: Path
    stamp: Stamp
    sample: int  # a digest of blocks spread over it
    times_tell: bool  # an edit would show in the stamp


class _DigestEntry(msgspec.Struct, frozen=True, array_like=True):
    stamp: Stamp
    sample: int
    digest: bytes


class _Memory(msgspec.Struct, frozen=True):
    version: int
    entries: list[_DigestEntry]


def see(path: Path) -> SeenFile:
    """Stamp and sample a file; reads a few of its blocks. Raises ``OSError``."""
    with path.open("rb", buffering=0) as stream:
        stamp = Stamp.of(os.fstat(stream.fileno()))
        last = max(0, stamp.num_bytes - SAMPLE_BYTES)
        sample = xxhash.xxh3_64()
        for number in range(NUM_SAMPLES + 1):
            sample.update(os.pread(stream.fileno(), SAMPLE_BYTES, last * number // NUM_SAMPLES))
        # SquashFS, EROFS and ISO 9660 keep one time, chosen by the builder of the image, and report
        # it for both.
        is_read_only = os.fstatvfs(stream.fileno()).f_flag & os.ST_RDONLY
        times_tell = not is_read_only or stamp.modified_ns != stamp.changed_ns
    return SeenFile(path, stamp, sample.intdigest(), times_tell)


class FileDigests:
    """The digests remembered in one directory. Used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._entries: dict[Stamp, _DigestEntry] = {}
        self.num_bytes_read = 0

    def _recall(self) -> None:
        """Read the digests that any process has remembered here. A damaged or foreign file counts
        as empty."""
        path = self._directory / WEIGHTS_NAME
        try:
            data = read_small_file(path)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s cannot be read (%s); weights are read again", path, error.strerror)
            return
        memory = unseal(data, _Memory)
        if memory is None or memory.version != VERSION:
            logger.warning("%s is damaged or of another version; weights are read again", path)
            return
        self._entries = {entry.stamp: entry for entry in memory.entries}

    def known(self, files: Iterable[SeenFile]) -> dict[SeenFile, bytes]:
        """Return the digests of those files that were read before and not changed since."""
        self._recall()
        found = {}
        for file in files:
            entry = self._entries.get(file.stamp)
            if file.times_tell and entry is not None and entry.sample == file.sample:
                found[file] = entry.digest
        return found

    def likely(self, files: Iterable[SeenFile]) -> dict[SeenFile, bytes]:
        """Return the digests of files of equal size and samples, whatever their inodes and times:
        as of the last call of ``known``."""
        found = {
            (seen.stamp.num_bytes, seen.sample): seen.digest for seen in self._entries.values()
        }
        looks = {file: found.get((file.stamp.num_bytes, file.sample)) for file in files}
        return {file: digest for file, digest in looks.items() if digest is not None}

    def read(self, files: list[SeenFile], stopped: threading.Event) -> dict[SeenFile, bytes]:
        """Return the digest of every file, read now unless a process did so before. Files that
        changed since they were seen are left out, and all remaining ones once ``stopped``. Waits
        while another process reads."""
        with self._turn(stopped):
            found = self.known(files)
            for file in files:
                if file not in found and not stopped.is_set():
                    digest = self._digest(file, stopped)
                    if digest is not None:
                        found[file] = digest
        return found

    def _digest(self, file: SeenFile, stopped: threading.Event) -> bytes | None:
        state = xxhash.xxh3_128()
        buffer = memoryview(bytearray(CHUNK_BYTES))
        try:
            with file.path.open("rb", buffering=0) as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while num_bytes := stream.readinto(buffer):
                    if stopped.is_set():
                        return None
                    state.update(buffer[:num_bytes])
                    self.num_bytes_read += num_bytes
                if Stamp.of(os.fstat(stream.fileno())) != file.stamp:
                    return None
        except OSError as error:
            logger.warning(
                "%s cannot be read (%s); its model is not recognized", file.path, error.strerror
            )
            return None
        digest: bytes = state.digest()
        if abs(time.time_ns() - file.stamp.changed_ns) > SETTLED_NS:
            self._entries.pop(file.stamp, None)  # so that the new entry is the last
            self._entries[file.stamp] = _DigestEntry(file.stamp, file.sample, digest)
            self._save()
        return digest

    def _save(self) -> None:
        """Write the file as a whole or not at all. It is not synced: its loss costs a reading."""
        path = self._directory / WEIGHTS_NAME
        temporary = self._directory / f"{WEIGHTS_NAME}.tmp-{os.getpid()}"
        entries = list(self._entries.values())[-MAX_REMEMBERED:]
        try:
            data = seal(_Memory(VERSION, entries))
            replace_file(path, data, temporary, is_synced=False)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s); these weights are read again at the next start",
                path,
                error.strerror,
            )

    @contextlib.contextmanager
    def _turn(self, stopped: threading.Event) -> Iterator[None]:
        """Hold the directory's lock among processes, where its file system has locks."""
        try:
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # for example, it does not exist yet
            yield
            return
        try:
            while not stopped.is_set():
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    stopped.wait(TURN_LOOK_S)
                except OSError:
                    break
            yield
        finally:
            os.close(fd)

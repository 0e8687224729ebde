"""A directory in memory behind a volatile write cache, and what a loss of power leaves of it.

``SimulatedDevice`` keeps the durability model of ``Device`` and nothing more: what was written is
visible at once and volatile until ``sync``; names are volatile until ``sync_directory``;
``replace_file`` is atomic and durable when it returns. A block of 4096 bytes is atomic.

Every operation that changes something is numbered. The power can be cut at one of them: that one
is in flight, it and every later operation raise ``EIO``, and ``crash`` says what the disk holds
then. It answers for any mode and seed and changes nothing, so one run gives many crashes.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.format import BLOCK_BYTES

CrashMode = Literal["kill", "drop", "torn", "reorder"]
MODES: tuple[CrashMode, ...] = ("kill", "drop", "torn", "reorder")
"""kill: the process dies, the cache survives. The rest are losses of power. drop: nothing unsynced
survives. torn: of each unsynced write the first blocks, of the unsynced names the first changes.
reorder: any unsynced block and any unsynced name, each by itself."""


class _Write(NamedTuple):
    offset: int
    data: bytes
    complete: bool  # false for the write in flight when the power went

    def blocks(self) -> range:
        first = self.offset // BLOCK_BYTES
        return range(first, first + len(self.data) // BLOCK_BYTES)


class _NameChange(NamedTuple):
    name: str
    file: _File | None  # None: unlinked
    complete: bool


@dataclass(eq=False)
class _File:
    cached: bytearray  # what readers see
    durable: bytearray
    has_durable_size: bool
    unsynced: list[_Write] = field(default_factory=list)
    durable_blocks: set[int] = field(default_factory=set)

    @classmethod
    def whole(cls, data: bytes) -> _File:
        blocks = set(range(-(-len(data) // BLOCK_BYTES)))
        return cls(bytearray(data), bytearray(data), True, [], blocks)

    def sync(self) -> None:
        for write in self.unsynced:
            _put(self.durable, write.offset, write.data)
            self.durable_blocks.update(write.blocks())
        self.unsynced.clear()
        self.has_durable_size = True

    def settle(self, source: random.Random) -> None:
        """What came of the write in flight when its process died is in the cache."""
        for position, write in enumerate(self.unsynced):
            if not write.complete:
                count = len(_prefix(write, source))
                _apply(self.cached, write, range(count))
                data = write.data[: count * BLOCK_BYTES]
                self.unsynced[position] = _Write(write.offset, data, complete=True)

    def after(self, mode: CrashMode, source: random.Random, stale: bytes) -> bytes:
        if mode == "kill":
            image = bytearray(self.cached)
            for write in self.unsynced:
                if not write.complete:
                    _apply(image, write, _prefix(write, source))
            return bytes(image)
        if mode == "drop":
            return bytes(self.durable) if self.has_durable_size else b""
        image = bytearray(self.durable)
        if mode == "reorder" and stale and source.random() < 0.5:
            # A filesystem may hand out the blocks of a deleted file without erasing them.
            for block in set(range(len(image) // BLOCK_BYTES)) - self.durable_blocks:
                old = stale[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
                image[block * BLOCK_BYTES : block * BLOCK_BYTES + len(old)] = old
        survivors = 0
        for write in self.unsynced:
            if mode == "torn":
                kept = _prefix(write, source)
            else:
                share = source.choice((0.1, 0.5, 0.9, 1.0))
                kept = [i for i in range(len(write.blocks())) if source.random() < share]
            _apply(image, write, kept)
            survivors += len(kept)
        lost = not self.has_durable_size and not survivors and source.random() < 0.5
        return b"" if lost else bytes(image)


def _prefix(write: _Write, source: random.Random) -> list[int]:
    count = len(write.blocks())
    return list(range(source.choice((0, count, source.randint(0, count)))))


def _apply(image: bytearray, write: _Write, kept: Sequence[int]) -> None:
    for i in kept:
        start = write.offset + i * BLOCK_BYTES
        _put(image, start, write.data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])


def _put(image: bytearray, offset: int, data: bytes) -> None:
    """As a write does: a file that ends before it grows, with zeros in the gap."""
    image.extend(bytes(max(offset - len(image), 0)))
    image[offset : offset + len(data)] = data


def _changed(names: Mapping[str, _File], changes: Sequence[_NameChange]) -> dict[str, _File]:
    changed = dict(names)
    for change in changes:
        if change.file is None:
            changed.pop(change.name, None)
        else:
            changed[change.name] = change.file
    return changed


class SimulatedDevice(FileDevice):
    """Starts with ``files``, all durable; thread-safe.

    ``power_off_at`` is the number of the change during which the power goes. ``lossy_syncs``
    counts down the coming ``sync`` calls that fail the way Linux does: the data is not written,
    and the next one does not try again.

    ``misuse`` lists what no device forgives: a closed descriptor used, parts of blocks.
    """

    def __init__(
        self,
        files: Mapping[str, bytes] | None = None,
        *,
        power_off_at: int | None = None,
        seed: int = 0,
    ) -> None:
        self.power_off_at = power_off_at
        self.lossy_syncs = 0
        self.num_changes = 0
        self.powered = True
        self.misuse: list[str] = []
        self._lock = threading.RLock()
        self._names = {name: _File.whole(data) for name, data in (files or {}).items()}
        self._durable_names = dict(self._names)
        self._name_changes: list[_NameChange] = []
        self._replacing: tuple[str, bytes] | None = None  # in flight when the power went
        self._open: dict[int, _File] = {}
        self._next_fd = 1000  # never given out twice: use after close shows
        self._graveyard = b""  # what the last file to be deleted held
        self._shuffle = random.Random(seed)

    @property
    def num_open(self) -> int:
        """Descriptors given out and not closed."""
        with self._lock:
            return len(self._open)

    def crash(self, mode: CrashMode, seed: int = 0) -> dict[str, bytes]:
        """The files found after a crash now, by name. Pure: the same seed, the same files."""
        source = random.Random(f"{mode}/{seed}")
        with self._lock:
            names = _changed(self._durable_names, self._changes_after(mode, source))
            files = {
                name: file.after(mode, source, self._graveyard)
                for name, file in sorted(names.items())
            }
            if self._replacing is not None and source.random() < 0.5:
                name, data = self._replacing
                files[name] = data
            return files

    def restart(self, seed: int = 0) -> SimulatedDevice:
        """The same disk and cache for another process, after this one died: nothing is lost, and
        what was volatile still is. This device is dead afterwards."""
        source = random.Random(f"restart/{seed}")
        with self._lock:
            self.powered = False
            heir = SimulatedDevice()
            changes = self._changes_after("kill", source)
            heir._name_changes = [change._replace(complete=True) for change in changes]
            heir._durable_names = dict(self._durable_names)
            heir._names = _changed(self._durable_names, changes)
            heir._graveyard = self._graveyard
            for file in {*heir._names.values(), *heir._durable_names.values()}:
                file.settle(source)
            return heir

    def _changes_after(self, mode: CrashMode, source: random.Random) -> list[_NameChange]:
        changes = self._name_changes
        if mode == "kill":
            return [c for c in changes if c.complete or source.random() < 0.5]
        if mode == "drop":
            return []
        if mode == "torn":
            return changes[: source.randint(0, len(changes))]
        kept = []
        for name in sorted({change.name for change in changes}):
            # Each name stops at some step of its own history.
            history = [change for change in changes if change.name == name]
            kept += history[: source.randint(0, len(history))]
        return kept

    def list_names(self) -> list[str]:
        with self._lock:
            self._check_power()
            names = sorted(self._names)
            self._shuffle.shuffle(names)
            return names

    def create(self, name: str, nbytes: int) -> int:
        with self._lock:
            in_flight = self._begin_change()
            if name in self._names:
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            file = _File(bytearray(nbytes), bytearray(nbytes), has_durable_size=False)
            self._change_name(name, file, complete=not in_flight)
            self._end_change(in_flight)
            return self._descriptor(file)

    def open(self, name: str) -> int:
        with self._lock:
            self._check_power()
            return self._descriptor(self._named(name))

    def is_intact(self, fd: int, nbytes: int) -> bool:
        with self._lock:
            self._check_power()
            file = self._file(fd, "is_intact")
            return len(file.cached) == nbytes and any(file is f for f in self._names.values())

    def readv(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self._check_power()
            file = self._file(fd, "readv")
            self._check_blocks(segments, offset)
            position = offset
            for segment in segments:
                piece = file.cached[position : position + segment.nbytes]
                segment[: len(piece)] = piece
                position += len(piece)
                if len(piece) < segment.nbytes:
                    break
            return position - offset

    def writev(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            in_flight = self._begin_change()
            file = self._file(fd, "writev")
            self._check_blocks(segments, offset)
            write = _Write(offset, b"".join(segments), not in_flight)
            file.unsynced.append(write)
            self._end_change(in_flight)
            _put(file.cached, offset, write.data)
            return len(write.data)

    def sync(self, fd: int) -> None:
        with self._lock:
            in_flight = self._begin_change()
            file = self._file(fd, "sync")
            self._end_change(in_flight)
            if self.lossy_syncs:
                self.lossy_syncs -= 1
                file.unsynced.clear()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            file.sync()

    def sync_directory(self) -> None:
        with self._lock:
            self._end_change(self._begin_change())
            self._durable_names = dict(self._names)
            self._name_changes.clear()

    def file_bytes(self, name: str) -> int:
        with self._lock:
            self._check_power()
            return len(self._named(name).cached)

    def unlink(self, name: str, fd: int | None = None) -> None:
        with self._lock:
            in_flight = self._begin_change()
            file = self._named(name)
            if fd is not None and self._file(fd, "unlink") is not file:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            self._change_name(name, None, complete=not in_flight)
            self._end_change(in_flight)
            self._graveyard = bytes(file.cached)

    def close(self, fd: int) -> None:
        with self._lock:
            self._file(fd, "close")
            del self._open[fd]

    def free_bytes(self) -> int:
        with self._lock:
            self._check_power()
            return 1 << 50

    def read_file(self, name: str) -> bytes:
        with self._lock:
            self._check_power()
            return bytes(self._named(name).cached)

    def replace_file(self, name: str, data: bytes) -> None:
        with self._lock:
            in_flight = self._begin_change()
            file = _File.whole(data)
            if in_flight:
                self._replacing = (name, bytes(data))
            self._end_change(in_flight)
            self._names[name] = self._durable_names[name] = file
            self._name_changes = [c for c in self._name_changes if c.name != name]

    def _check_power(self) -> None:
        if not self.powered:
            raise OSError(errno.EIO, "power is off")

    def _begin_change(self) -> bool:
        """Number the change; true when it is the one during which the power goes."""
        self._check_power()
        number = self.num_changes
        self.num_changes += 1
        return number == self.power_off_at

    def _end_change(self, in_flight: bool) -> None:
        if in_flight:
            self.powered = False
            self._check_power()

    def _change_name(self, name: str, file: _File | None, *, complete: bool) -> None:
        self._name_changes.append(_NameChange(name, file, complete))
        if not complete:
            return
        if file is None:
            del self._names[name]
        else:
            self._names[name] = file

    def _descriptor(self, file: _File) -> int:
        fd = self._next_fd
        self._next_fd += 1
        self._open[fd] = file
        return fd

    def _named(self, name: str) -> _File:
        if name not in self._names:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self._names[name]

    def _file(self, fd: int, operation: str) -> _File:
        if fd not in self._open:
            self._misused(f"{operation} on a descriptor that is not open")
        return self._open[fd]

    def _check_blocks(self, segments: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(segment.nbytes for segment in segments)
        if offset % BLOCK_BYTES or nbytes % BLOCK_BYTES:
            self._misused(f"{nbytes} bytes at {offset} are not whole blocks")

    def _misused(self, what: str) -> None:
        self.misuse.append(what)
        raise OSError(errno.EBADF, what)

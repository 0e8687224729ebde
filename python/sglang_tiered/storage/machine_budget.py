"""The records of the servers on a machine that share one budget of NVMe, in a directory of theirs.

A store is known by its ``SERVER-`` file too, so a table that is lost or damaged is made again.
Until every live store has written its record there, nobody takes more. A store is forgotten once
its shard is gone. What else lies in the directory is left alone.

| file | |
|---|---|
| LOCK | flock of who reads and writes the table |
| TABLE-1 | the table: total, and a record of each store; replaced whole, under LOCK |
| SERVER-<digest> | flock of the process that has this store open; says what store it is |
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.errors import ConfigError, StoreError, StoreLockedError
from sglang_tiered.storage.filesystem import read_small_file, replace_file
from sglang_tiered.storage.region.directory import DirectoryLock, refuse_strangers
from sglang_tiered.storage.region.format import is_pin_name, parse_region_name

if TYPE_CHECKING:
    from collections.abc import Iterator


FLAG = "--tier-machine-budget"
_VERSION = 1
_TABLE = f"TABLE-{_VERSION}"
_OTHER_TABLE = re.compile(r"TABLE-\d+")
_SERVER = re.compile(r"SERVER-([0-9a-f]{32})")
_MAX_BYTES = 1 << 20
_PAGES = "put pages there that the model would use"  # in the sentence of a store's directory
_LOCK_S = 5.0
_YOUNG_NS = 2_000_000_000  # clocks of filesystems are coarse


class StoreRecord(msgspec.Struct, kw_only=True):
    """One store. Its capacity is never above ``cap_bytes``: that is lowered after the store is, and
    raised before."""

    shard: str
    floor_bytes: int
    cap_bytes: int
    due_bytes: int  # to which it was asked to come down; at least ``cap_bytes`` without that
    held_bytes: int = 0
    keeps_bytes: int = 0
    wants_bytes: int = 0
    coldest_s: float = 0.0
    is_live: bool = True


class _Server(msgspec.Struct):
    shard: str
    floor_bytes: int
    total_bytes: int


class Table(msgspec.Struct):
    """What all servers know. ``is_whole``: every live store has its record in it."""

    total_bytes: int
    records: dict[str, StoreRecord] = {}
    is_whole: bool = True


class BudgetRecords:
    """One store's part in the records. ``join`` comes first, and ``leave`` last."""

    def __init__(self, directory: Path, shard: Path, *, total_bytes: int, floor_bytes: int) -> None:
        self._directory = directory
        self._shard = shard.resolve()
        self._total_bytes = total_bytes
        self._floor_bytes = floor_bytes
        self.name = _name_of(self._shard)
        self.needed_bytes = 0  # before it is opened, which cuts it down to its capacity
        self._fd = -1
        self._looked: dict[str, tuple[int, int, bool]] = {}  # of closed stores

    def join(self) -> bool:
        """Enter this store, at what its record allows it or at what is left of its floor; false
        while a live store is missing in the table. Raises ``StoreLockedError`` where another
        process has it, ``StoreError``, and ``ConfigError`` where the budget cannot be shared on
        these terms."""
        with self.table() as table, self._usable():
            ours = {
                name
                for name, each in table.records.items()
                if not each.is_live and Path(each.shard).parent == self._shard.parent
            }
            refuse_terms(self._directory, table, self._total_bytes, self._floor_bytes, ours)
            if table.is_whole:
                self._hold()
                table.total_bytes = self._total_bytes
                self.enter(table)
            return table.is_whole

    def enter(self, table: Table, cap_bytes: int = 0) -> StoreRecord:
        """Put this store's record in a table, with a capacity that it has now."""
        others = (each for name, each in table.records.items() if name != self.name)
        room = self._total_bytes - sum(max(o.cap_bytes, o.floor_bytes) for o in others)
        before = table.records.get(self.name)
        held = closed_bytes(self._shard) if before is None else before.cap_bytes
        least = max(self._floor_bytes, held)
        cap = cap_bytes or max(min(least, room), 0)
        record = StoreRecord(
            shard=str(self._shard),
            floor_bytes=self._floor_bytes,
            cap_bytes=cap,
            due_bytes=cap if cap <= room else max(room, self._floor_bytes),
        )
        if not cap_bytes:  # before it is opened
            record.wants_bytes = self.needed_bytes = self._needed(before)
            record.keeps_bytes = self.needed_bytes  # also of one that is refused, and tries again
        table.records[self.name] = record
        return record

    @property
    def has_pins(self) -> bool:
        return _has_pin_files(self._shard)

    def _needed(self, before: StoreRecord | None) -> int:
        """Without pins no more than its floor. Pins were accepted beside its capacity of before;
        where nobody knows that, they may need more than their files: twice, and two regions."""
        sizes = [nbytes for _, _, nbytes in _regions(self._shard)]
        if not self.has_pins:
            return min(sum(sizes), self._floor_bytes)
        needed = 2 * (sum(sizes) + max(sizes, default=0))
        if before is not None:
            needed = max(before.cap_bytes, before.keeps_bytes)
        return min(needed, self._total_bytes)

    @contextlib.contextmanager
    def table(self, timeout_s: float = _LOCK_S) -> Iterator[Table]:
        """Read the table, and write it back if it changed; nobody else does meanwhile. Raises
        ``StoreError`` where it cannot be used, or somebody holds it for long."""
        with contextlib.ExitStack() as held, self._usable():
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_strangers(self._directory)
            try:
                lock = held.enter_context(DirectoryLock(self._directory, timeout_s=timeout_s))
            except StoreLockedError as error:
                raise StoreError(
                    "others hold its LOCK for long; where it is one that hangs, end it: its id is "
                    "in it"
                ) from error
            found = _content(self._directory / _TABLE)
            table = self._read(found)
            self._add_lost(table)
            self._look_after(table)
            held.pop_all()
        with lock:
            yield table
            data = seal((table.total_bytes, table.records))
            if data != found:
                with self._usable():
                    # Not synced: after loss of power no store is open, and it can be made again.
                    replace_file(_TABLE, data, f"{_TABLE}.tmp", lock.directory, is_synced=False)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except StoreLockedError:
            raise
        except (OSError, StoreError) as error:
            why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            why = why.replace("--tier-dir", FLAG).replace(_PAGES, "change what servers may take")
            raise StoreError(f"{FLAG} {self._directory} cannot be used: {why}") from error

    def hold(self) -> None:
        """Make this store's file again, where somebody removed it. Under the lock of the table."""
        with self._usable():
            self._hold()

    def _hold(self) -> None:
        try:
            there = os.stat(self._path(self.name), follow_symlinks=False)
            is_held = self._fd >= 0 and os.path.samestat(there, os.fstat(self._fd))
        except FileNotFoundError:
            is_held = False
        if not is_held:
            self.leave()
            self._claim()

    def leave(self) -> None:
        """Let others have what this store has above its floor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _claim(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path(self.name), flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            server = _Server(str(self._shard), self._floor_bytes, self._total_bytes)
            os.ftruncate(fd, 0)
            os.pwrite(fd, seal(server), 0)
            os.fsync(fd)
        except BlockingIOError:
            os.close(fd)
            raise StoreLockedError(f"{self._shard} is in use by another process") from None
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def _path(self, name: str) -> Path:
        return self._directory / f"SERVER-{name}"

    def _read(self, content: bytes) -> Table:
        """Return the table; one without records where there is none that verifies."""
        found = unseal(content, tuple[int, dict[str, StoreRecord]])
        if found is not None:
            total, records = found
            return Table(total, {name: one for name, one in records.items() if _is_sane(name, one)})
        others = [
            name
            for name in os.listdir(self._directory)
            if name != _TABLE and _OTHER_TABLE.fullmatch(name)
        ]
        if others and not (self._directory / _TABLE).exists():
            raise ConfigError(
                f"{FLAG} {self._directory} holds {others[0]}, of another version of this program; "
                "stop its servers and remove it, or pass another directory."
            )
        return Table(self._total_bytes)

    def _add_lost(self, table: Table) -> None:
        """Add stores that have a file and no record."""
        for entry in os.listdir(self._directory):
            match = _SERVER.fullmatch(entry)
            if match is None or match[1] in table.records or match[1] == self.name:
                continue
            if not stat.S_ISREG(os.lstat(self._directory / entry).st_mode):
                continue
            server = unseal(_content(self._directory / entry), _Server)
            if self._is_live(match[1]):
                table.is_whole = False  # until it writes its record, which it does every second
                table.total_bytes = server.total_bytes if server else table.total_bytes
            elif server is not None and match[1] == _name_of(Path(server.shard)):
                nbytes = server.floor_bytes
                with contextlib.suppress(OSError):
                    nbytes = closed_bytes(Path(server.shard))
                table.records[match[1]] = StoreRecord(
                    shard=server.shard,
                    floor_bytes=server.floor_bytes,
                    cap_bytes=nbytes,
                    due_bytes=nbytes,
                    is_live=False,
                )

    def _look_after(self, table: Table) -> None:
        """Note which stores no process has open, what those take, and which are gone. One that
        cannot be looked at keeps what it has."""
        for name, record in list(table.records.items()):
            shard = Path(record.shard)
            if name == self.name or self._is_live(name, shard):
                continue
            try:
                held, has_pins = self._look(name, shard, again=record.is_live)
            except FileNotFoundError:
                del table.records[name]
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(name))
                continue
            except OSError:
                held, has_pins = record.cap_bytes, True
            if record.is_live:
                least = record.cap_bytes if has_pins else 0
                record.cap_bytes = max(min(record.cap_bytes, held), least)
                record.due_bytes = record.cap_bytes
            record.is_live, record.wants_bytes, record.held_bytes = False, 0, held
            record.keeps_bytes = max(record.cap_bytes, record.keeps_bytes) if has_pins else 0

    def _look(self, name: str, shard: Path, *, again: bool) -> tuple[int, bool]:
        """Return the bytes of a closed store, and whether it has pins; as they were found before
        while nothing was added or removed there. Raises ``OSError``."""
        changed_ns = os.lstat(shard).st_mtime_ns
        found = self._looked.get(name)
        is_young = time.time_ns() - changed_ns < _YOUNG_NS
        if again or is_young or found is None or found[0] != changed_ns:
            found = changed_ns, closed_bytes(shard), _has_pin_files(shard)
            self._looked[name] = found
        return found[1:]

    def _is_live(self, name: str, shard: Path | None = None) -> bool:
        """Return whether a process has a store open. Where the file that says so was removed, the
        lock of the shard tells."""
        try:
            fd = os.open(self._path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return shard is not None and _is_locked(shard)
        except OSError:
            return True  # somebody put another thing in its place
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)


def _is_locked(shard: Path) -> bool:
    try:
        with DirectoryLock(shard):
            return False
    except StoreLockedError:
        return True
    except StoreError:
        return False


def refuse_terms(
    directory: Path, table: Table, total_bytes: int, floor_bytes: int, ours: set[str]
) -> None:
    """Raise ``ConfigError`` where a server would share on other terms than those of the others, or
    where their floors leave none for it. ``ours`` are the stores that it is, or takes over."""
    others = [record for name, record in table.records.items() if name not in ours]
    is_shared = not table.is_whole or any(record.is_live for record in others)
    if is_shared and table.total_bytes != total_bytes:
        raise ConfigError(
            f"--tier-nvme-bytes {total_bytes} is another total than the {table.total_bytes} bytes "
            f"that servers share by {FLAG} {directory}; pass theirs, or stop them."
        )
    floors = sum(record.floor_bytes for record in others)
    if floors + floor_bytes > total_bytes:
        raise ConfigError(
            f"--tier-nvme-floor {floor_bytes} does not fit beside the floors of the other "
            f"servers of {FLAG} {directory}, {floors} of {total_bytes} bytes; lower it, or remove "
            "the --tier-dir of a server that will not come back."
        )


def _is_sane(name: str, record: StoreRecord) -> bool:
    """Return whether a record is of the store that it names, with numbers that mean something."""
    numbers = (
        *(record.floor_bytes, record.cap_bytes, record.due_bytes),
        *(record.held_bytes, record.keeps_bytes, record.wants_bytes, record.coldest_s),
    )
    return name == _name_of(Path(record.shard)) and all(number >= 0 for number in numbers)


def _name_of(shard: Path) -> str:
    return hashlib.blake2b(os.fsencode(shard), digest_size=16).hexdigest()


def _content(path: Path) -> bytes:
    """Return what a file holds; nothing of one that is missing or no file."""
    try:
        return read_small_file(path, most=_MAX_BYTES)
    except OSError:
        return b""


def closed_bytes(shard: Path) -> int:
    """Return what the region files of a shard take together; 0 of one that is not there. Raises
    ``OSError`` for one that cannot be looked at."""
    return sum(nbytes for _, _, nbytes in _regions(shard))


def _has_pin_files(shard: Path) -> bool:
    """Return whether pins keep pages of a shard. Raises ``OSError``."""
    try:
        return any(is_pin_name(name) for name in os.listdir(shard))
    except FileNotFoundError:
        return False


def trim_closed(shard: Path, most_bytes: int) -> bool:
    """Remove the oldest region files of a shard until they take no more, as its own server would
    have at its next start; false where one stays. None goes of a shard with pins, as which pages
    they keep is not known here, nor of one that a process has open."""
    try:
        with DirectoryLock(shard) as lock:
            if _has_pin_files(shard):
                return False
            excess = closed_bytes(shard) - most_bytes
            for _, name, nbytes in sorted(_regions(shard)):
                if excess <= 0:
                    break
                os.unlink(name, dir_fd=lock.directory)
                excess -= nbytes
            return excess <= 0
    except (OSError, StoreError):
        return False


def _regions(shard: Path) -> list[tuple[int, str, int]]:
    """Return sequence, name and size of each region file."""
    found = []
    try:
        names = os.listdir(shard)
    except FileNotFoundError:
        return []
    for name in names:
        sequence = parse_region_name(name)
        if sequence is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(shard / name)
            if stat.S_ISREG(status.st_mode):
                found.append((sequence, name, status.st_size))
    return found

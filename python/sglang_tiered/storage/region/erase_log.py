"""The erase log: which pages in the regions are dead, whatever the region files say.

A region is never rewritten, so an erasure notes how far the log of pages reached: of that tenant,
or under those keys, everything before is dead. The file ``ERASED`` is the truth: without it what
was erased would come back. Each erasure appends a record, and is durable once that is synced. The
head of the file says up to where that is so. A record before it that does not verify is damage, and
then everything stored until it was found is dead. One behind it is a torn append, of which nobody
was told.

The file is written anew, in one step, where much of it says what later records say too. What is
said of a page is dropped only once no region holds such a page.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    ERASED_NAME,
    newer_format,
    padded,
    parse_region_name,
    verifies,
    with_checksum,
)
from sglang_tiered.storage.region.pending import Note
from sglang_tiered.storage.region.walk import (
    NOT_A_FILE_ERRNOS,
    UNREADABLE_ERRNOS,
    all_contents,
    persist,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from sglang_tiered.storage.base import Erasure
    from sglang_tiered.storage.region.device import FileReader
    from sglang_tiered.storage.region.disk import Disk
    from sglang_tiered.storage.region.format import Contents
    from sglang_tiered.storage.region.pending import Order
    from sglang_tiered.storage.region.reclaim import Reclaimer


VERSION = 2
"""Version 1 had no notes."""
MAX_IDS = 1 << 16
"""Erasures that are known by name. Beyond it the oldest are done again when they are heard of
again, which is safe and costs pages."""
MAX_NOTES_BYTES = 64 << 20
"""Of all notes together. The oldest go first."""
MANY = 1 << 18
"""Beyond so many keys and tenants, what no region holds is looked for when the file is written
anew."""

MAGIC = b"SGLTERSD"
RECORD_MAGIC = b"SGLTERSR"
NOTES_MAGIC = b"SGLTERSN"
_HEAD = struct.Struct("<8sIIQ")  # magic version reserved durable_bytes
_RECORD = struct.Struct("<8sQQQIIQ")  # magic record_bytes, bound of all, tenants ids keys
_NOTES = struct.Struct("<8sQQ")  # magic record_bytes num_notes
_CHECKSUM = struct.Struct("<Q")
_SLACK_BYTES = 1 << 20  # of records, beyond twice what is needed, before the file is written anew

_TENANTS: np.dtype[Any] = np.dtype([("tenant", "V16"), ("sequence", "<u8"), ("offset", "<u8")])
_KEYS: np.dtype[Any] = np.dtype([("key", "S32"), ("sequence", "<u8"), ("offset", "<u8")])
_NOTE: np.dtype[Any] = np.dtype([("id", "V16"), ("until", "<f8"), ("nbytes", "<u4")])

_SWEPT_ROWS = 1 << 12  # at a time, as a lookup waits for it


class Bound(NamedTuple):
    """A place in the log: what lies before it is dead. Ordered as the log is."""

    sequence: int  # of the region
    offset: int  # of the extent within it


NOWHERE = Bound(0, 0)
_EVERYWHERE = Bound((1 << 63) - 1, 0)


@dataclass(slots=True, eq=False)
class Erased:
    """What is dead: the bound of every erased tenant, one for all tenants alike, and those of pages
    by key, whatever their namespace. ``ids`` are digests of the names of erasures."""

    tenants: dict[bytes, Bound] = field(default_factory=dict)
    everyone: Bound = NOWHERE
    ids: dict[int, None] = field(default_factory=dict)  # the oldest first
    notes: dict[bytes, Note] = field(default_factory=dict)  # by name, the oldest first
    notes_bytes: int = 0
    damaged: bool = False  # everything is dead
    num_bytes: int = 0  # of the file, up to where the next record goes; 0: it must be written anew
    parts: list[npt.NDArray[Any]] = field(default_factory=lambda: [np.zeros(0, _KEYS)])

    @property
    def is_empty(self) -> bool:
        return not self.tenants and self.everyone == NOWHERE and not any(map(len, self.parts))

    @property
    def rows(self) -> npt.NDArray[Any]:
        """Return keys with their bounds, sorted by key, every key once."""
        if len(self.parts) > 1:
            rows = np.concatenate(self.parts)
            rows = rows[np.lexsort((rows["offset"], rows["sequence"], rows["key"]))]
            is_last = np.ones(len(rows), np.bool_)
            is_last[:-1] = rows["key"][:-1] != rows["key"][1:]
            self.parts = [rows[is_last]]
        return self.parts[0]

    @property
    def packed_bytes(self) -> int:
        """Return what the file takes if it is written anew."""
        num_keys = sum(map(len, self.parts))
        nbytes = BLOCK_BYTES + _record_bytes(len(self.tenants), len(self.ids), num_keys)
        return nbytes + _notes_bytes(len(self.notes), self.notes_bytes)

    def add(self, what: Erasure, bound: Bound) -> None:
        """Declare dead what is meant and lies before the bound."""
        if what.keys is not None:
            rows = np.zeros(len(what.keys), _KEYS)
            rows["key"] = np.frombuffer(b"".join(what.keys), "S32")
            rows["sequence"], rows["offset"] = bound
            self.parts.append(rows)
        elif what.tenant is None:
            self.everyone = max(self.everyone, bound)
        else:
            self.tenants[what.tenant] = max(self.tenants.get(what.tenant, NOWHERE), bound)

    def note(self, ids: Iterable[int]) -> None:
        """Remember names of erasures, as many as there is room for."""
        self.ids.update(dict.fromkeys(ids))
        while len(self.ids) > MAX_IDS:
            del self.ids[next(iter(self.ids))]

    def tell(self, notes: Iterable[Note]) -> None:
        """Keep notes, as many as there is room for."""
        for note in notes:
            self._untell(note.id)
            self.notes[note.id] = note
            self.notes_bytes += len(note.data)
        while self.notes_bytes > MAX_NOTES_BYTES or len(self.notes) > MAX_IDS:
            self._untell(next(iter(self.notes)))

    def _untell(self, name: bytes) -> None:
        note = self.notes.pop(name, None)
        self.notes_bytes -= len(note.data) if note is not None else 0

    def drop_expired(self, now_s: float) -> None:
        for note in [each for each in self.notes.values() if each.until_s <= now_s]:
            self._untell(note.id)

    def merge(self, other: Erased) -> None:
        for tenant, bound in other.tenants.items():
            self.tenants[tenant] = max(self.tenants.get(tenant, NOWHERE), bound)
        self.everyone = max(self.everyone, other.everyone)
        self.damaged = self.damaged or other.damaged
        self.parts += [part for part in other.parts if len(part)]
        self.note(other.ids)
        self.tell(other.notes.values())

    def next_sequence(self) -> int:
        """Return a sequence above all bounds: what is stored from now on is not meant."""
        bounds = (self.everyone, *self.tenants.values())
        above = [bound.sequence + (bound.offset > 0) for bound in bounds]
        above += [int((p["sequence"] + (p["offset"] > 0)).max()) for p in self.parts if len(p)]
        return max(above)

    def drop_before(self, sequence: int) -> None:
        """Drop what speaks only of regions older than ``sequence``, which are gone, and say that
        they are dead. So their numbers are not given again. After a loss of power a filesystem may
        show a new file the blocks of a deleted one, which would be taken for a region of that
        number."""
        if self.is_empty:
            return
        first = Bound(sequence, BLOCK_BYTES)
        self.tenants = {tenant: bound for tenant, bound in self.tenants.items() if bound > first}
        self.everyone = max(self.everyone, Bound(sequence, 0))
        rows = self.rows
        is_new = (rows["sequence"] > sequence) | (
            (rows["sequence"] == sequence) & (rows["offset"] > BLOCK_BYTES)
        )
        self.parts = [rows[is_new]]

    def keep_needed(self, regions: Iterable[tuple[int, Contents]]) -> None:
        """Drop what none of these regions, which are all there are, holds a page of."""
        rows, tenants = self.rows, dict[bytes, Bound]()
        is_needed = np.zeros(len(rows), np.bool_)
        for sequence, contents in regions:
            is_needed[self._dead_by_key(sequence, contents)[1]] = True
            for name in np.unique(contents.extents["tenant"]):
                bound = self.tenants.get(name.tobytes(), NOWHERE)
                if sequence <= bound.sequence:
                    tenants[name.tobytes()] = bound
        self.tenants = tenants
        self.parts = [rows[is_needed]]

    def dead_pages(self, sequence: int, contents: Contents) -> npt.NDArray[np.bool_]:
        """Return which pages of a region are dead."""
        extents = contents.extents
        dead = np.zeros(len(extents), bool)
        if self.everyone != NOWHERE:
            dead |= _before(sequence, extents["offset"], self.everyone)
        if self.tenants and len(extents):
            names, inverse = np.unique(extents["tenant"], return_inverse=True)
            for number, name in enumerate(names):
                bound = self.tenants.get(name.tobytes())
                if bound is not None:
                    own = inverse == number
                    dead[own] |= _before(sequence, extents["offset"][own], bound)
        pages: npt.NDArray[np.bool_] = np.repeat(dead, extents["num_pages"])
        pages[self._dead_by_key(sequence, contents)[0]] = True
        return pages

    def _dead_by_key(self, sequence: int, contents: Contents) -> tuple[npt.NDArray[Any], ...]:
        """Return the pages of a region that are dead by their keys, and the rows of those."""
        rows = self.rows
        if not len(rows) or not len(contents.pages):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        keys = np.ascontiguousarray(contents.pages["key"]).view("S32").reshape(-1)
        at = np.minimum(np.searchsorted(rows["key"], keys), len(rows) - 1)
        named = np.flatnonzero(rows["key"][at] == keys)
        bounds = rows[at[named]]
        offsets = np.repeat(contents.extents["offset"], contents.extents["num_pages"])[named]
        dead = (sequence < bounds["sequence"]) | (
            (sequence == bounds["sequence"]) & (offsets < bounds["offset"])
        )
        return named[dead], at[named[dead]]


def _before(sequence: int, offsets: npt.NDArray[np.uint64], bound: Bound) -> npt.NDArray[np.bool_]:
    if sequence != bound.sequence:
        return np.full(len(offsets), sequence < bound.sequence)
    before: npt.NDArray[np.bool_] = offsets < np.uint64(bound.offset)
    return before


# ---- The file ----


def _record_bytes(num_tenants: int, num_ids: int, num_keys: int) -> int:
    tables = num_tenants * _TENANTS.itemsize + num_ids * 8 + num_keys * _KEYS.itemsize
    nbytes = _RECORD.size + tables + _CHECKSUM.size
    return padded(nbytes)


def pack_record(erased: Erased) -> bytes:
    """Return what one append says: a record, and one of notes where there are any."""
    rows, tenants = erased.rows, np.zeros(len(erased.tenants), _TENANTS)
    for row, (tenant, bound) in zip(tenants, erased.tenants.items(), strict=True):
        row["tenant"], row["sequence"], row["offset"] = np.void(tenant), *bound
    ids = np.fromiter(erased.ids, "<u8", len(erased.ids))
    nbytes = _record_bytes(len(tenants), len(ids), len(rows))
    counts = len(tenants), len(ids), len(rows)
    fields = _RECORD.pack(RECORD_MAGIC, nbytes, *erased.everyone, *counts)
    tables = tenants.tobytes(), ids.tobytes(), rows.tobytes()
    record = with_checksum(b"".join((fields, *tables)), nbytes)
    if not erased.notes:
        return record
    table = np.zeros(len(erased.notes), _NOTE)
    for row, note in zip(table, erased.notes.values(), strict=True):
        row["id"], row["until"], row["nbytes"] = np.void(note.id), note.until_s, len(note.data)
    data = (note.data for note in erased.notes.values())
    nbytes = _notes_bytes(len(table), erased.notes_bytes)
    fields = _NOTES.pack(NOTES_MAGIC, nbytes, len(table))
    return record + with_checksum(b"".join((fields, table.tobytes(), *data)), nbytes)


def _notes_bytes(num_notes: int, data_bytes: int) -> int:
    nbytes = _NOTES.size + num_notes * _NOTE.itemsize + data_bytes + _CHECKSUM.size
    return padded(nbytes) if num_notes else 0


def _unpack_notes(data: memoryview) -> tuple[Erased, int] | None:
    """Unpack the notes that the data begins with, and say how long their record is."""
    if len(data) < BLOCK_BYTES:
        return None
    magic, nbytes, num_notes = _NOTES.unpack_from(data)
    if magic != NOTES_MAGIC or not 0 < nbytes <= len(data) or not verifies(data[:nbytes]):
        return None
    table = np.frombuffer(data, _NOTE, num_notes, _NOTES.size)
    if nbytes != _notes_bytes(num_notes, int(table["nbytes"].sum())):
        return None
    ends = (np.cumsum(table["nbytes"].astype(np.int64)) + _NOTES.size + table.nbytes).tolist()
    erased = Erased()
    erased.tell(
        Note(row["id"].tobytes(), float(row["until"]), bytes(data[end - int(row["nbytes"]) : end]))
        for row, end in zip(table, ends, strict=True)
    )
    return erased, nbytes


def _unpack_record(data: memoryview) -> tuple[Erased, int] | None:
    """Unpack the record that the data begins with, and say how long it is."""
    if len(data) < BLOCK_BYTES:
        return None
    magic, nbytes, sequence, offset, num_tenants, num_ids, num_keys = _RECORD.unpack_from(data)
    if magic != RECORD_MAGIC or not 0 < nbytes <= len(data) or not verifies(data[:nbytes]):
        return None
    if nbytes != _record_bytes(num_tenants, num_ids, num_keys):
        return None
    at = _RECORD.size
    tenants = np.frombuffer(data, _TENANTS, num_tenants, at)
    ids = np.frombuffer(data, "<u8", num_ids, at := at + tenants.nbytes)
    erased = Erased(_bounds(tenants), Bound(sequence, offset), dict.fromkeys(ids.tolist()))
    erased.parts.append(np.frombuffer(data, _KEYS, num_keys, at + ids.nbytes).copy())
    return erased, nbytes


def _bounds(rows: npt.NDArray[Any]) -> dict[bytes, Bound]:
    return {row["tenant"].tobytes(): Bound(*row.tolist()[1:]) for row in rows}


def _pack_head(durable_bytes: int) -> bytes:
    """The checksum stands in the first sector with all it covers, so that no power loss tears
    it."""
    fields = _HEAD.pack(MAGIC, VERSION, 0, durable_bytes)
    return (fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))).ljust(BLOCK_BYTES, b"\0")


def pack(erased: Erased) -> bytes:
    """Return the whole file, all of it durable once it is there."""
    record = pack_record(erased)
    return _pack_head(BLOCK_BYTES + len(record)) + record


def unpack(data: bytes) -> Erased | None:
    """Unpack the file; ``None`` for bytes that do not verify. Raises ``StoreFormatError`` for those
    of a newer version that do."""
    fields = data[: _HEAD.size]
    checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    if len(data) < BLOCK_BYTES or data[_HEAD.size :][: _CHECKSUM.size] != checksum:
        return None
    magic, version, _, durable_bytes = _HEAD.unpack(fields)
    if magic != MAGIC:
        return None
    if version > VERSION:
        raise newer_format(ERASED_NAME, version, VERSION)
    erased, view, at = Erased(), memoryview(data), BLOCK_BYTES
    while (found := _unpack_record(view[at:]) or _unpack_notes(view[at:])) is not None:
        erased.merge(found[0])
        at += found[1]
    if at < durable_bytes or not _is_sane(erased):
        return None
    erased.num_bytes = at if at == len(data) else 0
    return erased


def _is_sane(erased: Erased) -> bool:
    rows = erased.rows
    bounds = (erased.everyone, *erased.tenants.values())
    sane = all(bound < _EVERYWHERE and bound.offset % BLOCK_BYTES == 0 for bound in bounds)
    return sane and bool(
        ((rows["sequence"] < _EVERYWHERE.sequence) & (rows["offset"] % BLOCK_BYTES == 0)).all()
    )


def read(device: FileReader) -> Erased:
    """Return what the file says. One that is damaged erases everything there is, and says so.
    Raises ``OSError`` for one that cannot be read and for conditions of this process, and
    ``StoreFormatError`` for one of a newer version."""
    try:
        data = persist(lambda: device.read_file(ERASED_NAME))
    except FileNotFoundError:
        return Erased()
    except OSError as error:
        if error.errno in UNREADABLE_ERRNOS:
            why = f"{ERASED_NAME}, which says what was erased, cannot be read: {error.strerror}"
            raise OSError(error.errno, why) from error
        if error.errno not in NOT_A_FILE_ERRNOS:
            raise
        data = b""
    return unpack(data) or Erased(everyone=_EVERYWHERE, damaged=True)


def drop_gone(device: FileReader, erased: Erased) -> None:
    """Drop what is said of regions whose files are gone, and notes that are of no use any more,
    but not from the file."""
    erased.drop_expired(time.time())
    sequences = [parse_region_name(name) for name in device.list_names()]
    first = min((s for s in sequences if s is not None), default=erased.next_sequence())
    erased.drop_before(first)


def rewrite(disk: Disk, erased: Erased) -> None:
    """Replace the file by one that says what must be said. Raises ``OSError``: what was durable
    before is then."""
    with disk.watch():
        drop_gone(disk.device, erased)
    disk.sync_names()  # what is gone must not come back without what is said of it
    data = pack(erased)
    erased.num_bytes = 0
    disk.replace(ERASED_NAME, data)
    erased.num_bytes = len(data)


# ---- The writer thread's part ----


class EraseLog:
    """Owns ``ERASED`` while the store is open: makes erasures durable and gives back what they
    free. On the writer thread, without the lock held.

    First the file says what is dead, then regions go, so the power may go at any step. Lookups miss
    what they held since ``erase`` was called.
    """

    def __init__(self, disk: Disk, reclaimer: Reclaimer, erased: Erased) -> None:
        self._disk, self._state, self._reclaimer = disk, disk.state, reclaimer
        self._erased = erased
        self._needed_bytes = erased.packed_bytes
        self._state.erased_ids = set(erased.ids)

    def erase(self, orders: Sequence[Order], bound: Bound) -> bool:
        """Erase up to the present end of the log, with nothing under way before it. True when that
        is durable, and all that was asked before."""
        new = Erased()
        whats = [order.what for order in orders if order.what is not None]
        for what in whats:
            new.add(what, bound)
        for order in orders:
            new.note(order.ids)
            new.tell(order.notes)
        self._erased.merge(new)
        durable = self._record(new)
        if any(what.is_everything for what in whats):
            with self._state.lock:
                regions = list(self._state.regions)
            for region in regions:
                self._reclaimer.remove(region)
        self._reclaimer.remove_useless()
        return durable

    def _record(self, new: Erased) -> bool:
        """Append a record; whatever that fails by, the whole file is written anew, now or with the
        next. After a failed sync, none behind it tells what of the file is there."""
        try:
            try:
                is_there = self._append(new)
            except OSError:
                is_there = False
            if not is_there:
                self._reclaimer.with_room(self._rewrite)
        except OSError as error:
            self._disk.log.report(
                "erase",
                "%s cannot be written (%s): what was erased is hidden, but a restart may bring it "
                "back; erase it again",
                self._disk.directory / ERASED_NAME,
                error,
            )
            return False
        self._disk.log.settle("erase")
        with self._state.lock:
            self._state.erased_ids.update(new.ids)
            if len(self._state.erased_ids) > 2 * MAX_IDS:
                self._state.erased_ids = set(self._erased.ids)
        return True

    def _append(self, new: Erased) -> bool:
        """Append what is new; false where the file must be written anew for that."""
        start, record = self._erased.num_bytes, pack_record(new)
        end = start + len(record)
        if not start or end > 2 * self._needed_bytes + _SLACK_BYTES:
            return False
        self._erased.num_bytes = 0
        device = self._disk.device
        with self._disk.watch():
            fd = device.open(ERASED_NAME)
            try:
                self._disk.write(fd, [memoryview(record)], start)
                device.sync(fd)
                # Until the next sync, losing the power takes this, and damage to the record then
                # looks like a torn append.
                self._disk.write(fd, [memoryview(_pack_head(end))], 0)
            finally:
                device.close(fd)
        self._erased.num_bytes = end
        return True

    def _rewrite(self) -> None:
        erased = self._erased
        if len(erased.rows) + len(erased.tenants) > MANY:
            self._drop_unheld()
        rewrite(self._disk, erased)
        self._needed_bytes = erased.packed_bytes

    def _drop_unheld(self) -> None:
        """Drop what no region holds, if all that they hold is known."""
        with self._state.lock:
            regions = [(region, list(region.extents)) for region in self._state.regions]
            is_known = not self._state.regions.aside_bytes
        found = []
        for region, extents in regions:
            if not is_known:
                return
            with self._disk.watch():  # each by itself: together they may take long
                contents = all_contents(self._disk.device, region, extents)
            if contents is None:
                return
            found.append((region.sequence, contents))
        self._disk.sync_names()
        self._erased.keep_needed(found)

    def sweep(self) -> None:
        """Forget some pages of erased tenants. After the last, regions go that held no others."""
        with self._state.lock:
            sweeps = self._state.index.tenants.any_dead and not self._state.erases
            is_swept = sweeps and self._state.index.sweep(_SWEPT_ROWS)
        if is_swept and self._disk.is_ours():
            self._reclaimer.remove_useless()

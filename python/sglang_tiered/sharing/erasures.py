"""The erasures that a server knows: those begun here and those that others told. Thread-safe.

Servers that follow each other come to know the same set. A digest of it shows which have applied
the same, and the book says what another one lacks. A record is kept for ``retention_s`` after the
erasure began, within bounds of number and bytes; its short id for longer, so that it is not applied
again. Ages travel, never times of day: no two clocks are compared.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import xxhash

from sglang_tiered.sharing.pages.messages import (
    ID_BYTES,
    KEY_BYTES,
    MAX_ERASED_KEYS,
    MAX_ERASURES_BYTES,
    SHORT_ID_BYTES,
    ErasureNotice,
)
from sglang_tiered.storage.base import PIECE_KEYS
from sglang_tiered.storage.promises import ended, is_true, keep, promise
from sglang_tiered.storage.region.pending import Note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Erasure
    from sglang_tiered.storage.region.engine import RegionEngine


MAX_PURGES = 8_192
"""Bounds the erasures of tenants that are known of one namespace. The oldest go first."""

MAX_FORGETS = 16_384
"""Bounds those of single pages, of at most 1,024 each."""

MAX_KEYS_BYTES = 8 << 20
"""Bounds their keys: 262,144 pages."""

RETENTION_S = 7 * 86400.0
"""A server that was away for longer may bring back pages that were erased meanwhile."""

MAX_DROPPED = 16_384
MAX_NAMESPACES = 8  # of which erasures are remembered; each change of weights begins one
VERSION = 3
_RECORD_BYTES = 64  # counted in a message for a record without its keys
_NOTE_WAIT_S = 4.0
_LOOK_S = 1.0  # between two looks for what is too old


class Known(NamedTuple):
    """What a server knows at one moment. ``version`` counts up with every erasure."""

    digest: bytes
    version: int


@dataclass(eq=False, slots=True)
class _KnownErasure:
    namespace: bytes
    tenant: bytes | None
    keys: bytes | None
    forget_at: float  # of the book's clock
    version: int
    local: Future[bool]  # true once it is durable here


@dataclass(eq=False, slots=True)
class _Shelf:
    """What is known of one namespace, oldest first."""

    records: dict[bytes, _KnownErasure] = field(default_factory=dict)
    dropped: dict[bytes, None] = field(default_factory=dict)  # short ids
    sum: int = 0
    keys_bytes: int = 0
    num_forgets: int = 0

    def add(self, name: bytes, record: _KnownErasure) -> None:
        self.records[name] = record
        self._count(name, record, 1)
        while self.num_forgets > MAX_FORGETS or self.keys_bytes > MAX_KEYS_BYTES:
            self.drop(next(n for n, each in self.records.items() if each.keys is not None))
        while len(self.records) - self.num_forgets > MAX_PURGES:
            self.drop(next(n for n, each in self.records.items() if each.keys is None))

    def drop(self, name: bytes) -> None:
        self.withdraw(name)
        self.dropped[name[:SHORT_ID_BYTES]] = None
        while len(self.dropped) > MAX_DROPPED:
            del self.dropped[next(iter(self.dropped))]

    def withdraw(self, name: bytes) -> None:
        """Know it no longer: whoever does may tell it again."""
        self._count(name, self.records.pop(name), -1)

    def _count(self, name: bytes, record: _KnownErasure, sign: int) -> None:
        self.sum ^= xxhash.xxh3_128_intdigest(name)
        if record.keys is not None:
            self.keys_bytes += sign * len(record.keys)
            self.num_forgets += sign


class _Spreading(NamedTuple):
    """An erasure that began here, until every server that lives has applied it."""

    names: tuple[bytes, ...]
    version: int
    is_done: Future[bool]


class _Noted(msgspec.Struct, frozen=True, array_like=True):
    version: int
    namespace: bytes
    tenant: bytes | None
    keys: bytes | None


class ErasureBook:
    """Never blocks, but for ``save``, which waits for the disk: any thread, ``save`` on one.
    ``notes`` keep the records over a restart; those that are not known to be durable in the store
    are not noted, so they are applied again, which is always safe."""

    def __init__(
        self,
        namespace: bytes,
        *,
        retention_s: float = RETENTION_S,
        notes: RegionEngine | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._lock = threading.Lock()
        self._retention_s = retention_s
        self._notes = notes
        self._clock = clock
        self._wall_clock = wall_clock
        self._shelves: dict[bytes, _Shelf] = {}
        self._version = 0
        self._spreading: list[_Spreading] = []
        self._is_closed = False
        self._unnoted: dict[bytes, _KnownErasure] = {}
        self._look_at = 0.0
        self.num_told = 0
        self.num_applied = 0  # of what others told; the keeper's thread counts
        if notes is not None:
            self._recall(notes)
        self._namespace, self._shelf = namespace, self._use(namespace)

    # ---- What is known ----

    @property
    def known(self) -> Known:
        with self._lock:
            return Known(self.digest, self._version)

    @property
    def digest(self) -> bytes:
        """A digest of the set of erasures that were applied here, in any order: with whom pages may
        be exchanged."""
        return self._shelf.sum.to_bytes(ID_BYTES, "little")

    @property
    def noted_digest(self) -> bytes:
        """The same of those that are durable and noted: what others are told."""
        with self._lock:
            return self._noted_digest()

    def _noted_digest(self) -> bytes:
        noted = self._shelf.sum
        for name, record in self._unnoted.items():
            if self._shelf.records.get(name) is record:
                noted ^= xxhash.xxh3_128_intdigest(name)
        return noted.to_bytes(ID_BYTES, "little")

    def __len__(self) -> int:
        return len(self._shelf.records)

    def ids(self) -> tuple[Known, bytes]:
        """What is known, and the short ids of all that was ever applied, as far as is known."""
        with self._lock:
            shelf = self._shelf
            known = Known(self.digest, self._version)
            names = [*shelf.records, *shelf.dropped]
        return known, b"".join(name[:SHORT_ID_BYTES] for name in names)

    def compare(self, ids: bytes) -> tuple[bytes, list[ErasureNotice], bytes]:
        """Compare with what another server knows, by short ids. Returns the digest of what is noted
        here, what the other lacks, oldest first and as much as one message takes, and what is not
        noted here."""
        theirs = set(_short(ids))
        names = {name[:SHORT_ID_BYTES]: name for name in self._shelf.records.copy()}
        lacked = [name for short, name in names.items() if short not in theirs]
        lacking = theirs - names.keys() - self._shelf.dropped.copy().keys()
        with self._lock:
            shelf = self._shelf
            unnoted = (name[:SHORT_ID_BYTES] for name in self._unnoted if name in shelf.records)
            lacking |= theirs.intersection(unnoted)
            digest = self._noted_digest()
        return digest, self._pack(lacked), b"".join(lacking)

    def lacked(self, ids: bytes) -> tuple[list[ErasureNotice], int]:
        """Return the erasures of these short ids, which another server lacks, oldest first and as
        many as one message takes; and the version up to which it knows all. What is known may be
        much, so it is looked through without the lock, and not for nothing."""
        wanted, version = set(_short(ids)), self._version
        known = self._shelf.records.copy() if wanted else {}
        names = [name for name in known if name[:SHORT_ID_BYTES] in wanted]
        return self._pack(names), known[names[0]].version - 1 if names else version

    def unknown(self, erasures: Iterable[ErasureNotice]) -> list[ErasureNotice]:
        """Return those that were not applied here, each once."""
        with self._lock:
            shelf, found = self._shelf, {}
            for each in erasures:
                if each.id not in shelf.records and each.id[:SHORT_ID_BYTES] not in shelf.dropped:
                    found[each.id] = each
            return list(found.values())

    def _pack(self, names: Sequence[bytes]) -> list[ErasureNotice]:
        records, now, left = self._shelf.records, self._clock(), MAX_ERASURES_BYTES
        packed: list[ErasureNotice] = []
        for name in names:
            record = records.get(name)
            if record is None:  # meanwhile
                continue
            left -= _RECORD_BYTES + len(record.keys or b"")
            if left < 0:
                break
            age_s = max(now - (record.forget_at - self._retention_s), 0.0)
            packed.append(ErasureNotice(name, age_s, record.tenant, record.keys))
        return packed

    # ---- What is learnt ----

    def begin(
        self, what: Erasure, local: Future[bool] | None = None
    ) -> tuple[Future[bool], list[ErasureNotice]]:
        """Note an erasure that this server has begun itself; ``local`` is true once it is durable
        here. Returns what others are to be told, and a future. It is true once that is durable and
        noted and every server that lives has applied it (``settle``); false when the namespace
        changes or the book is closed before."""
        begun = [
            ErasureNotice(
                each.id, 0.0, each.tenant, None if each.keys is None else b"".join(each.keys)
            )
            for each in what.pieces
        ]
        with self._lock:
            is_done = ended(False) if self._is_closed else promise()
            for each in begun:
                self._learn(each, local or ended(True))
            names = tuple(each.id for each in begun)
            self._spreading.append(_Spreading(names, self._version, is_done))
        return is_done, begun

    def learn(self, told: ErasureNotice, local: Future[bool]) -> None:
        """Note what another server told, before it is hidden here; ``local`` is true once that is
        durable."""
        with self._lock:
            self._learn(told, local)

    def _learn(self, told: ErasureNotice, local: Future[bool]) -> None:
        if told.id in self._shelf.records:
            return
        age_s = told.age_s if told.age_s <= self._retention_s else self._retention_s
        forget_at = self._clock() + self._retention_s - age_s
        self._version += 1
        record = _KnownErasure(
            self._namespace, told.tenant, told.keys, forget_at, self._version, local
        )
        self._shelf.add(told.id, record)
        self._unnoted[told.id] = record

    def settle(self, version: int | None) -> None:
        """End what has spread: every server that lives has applied all up to ``version``; None:
        there is no other. Drop what is old."""
        now, old = self._clock(), []
        if now >= self._look_at:  # a walk over all of them, without the lock
            self._look_at = now + _LOOK_S
            known = self._shelf.records.copy()
            old = [name for name, record in known.items() if record.forget_at <= now]
        with self._lock:
            records = self._shelf.records
            reached = self._version if version is None else version
            for name in old:
                if name in records:
                    self._shelf.drop(name)
            are_noted = self._unnoted.keys().isdisjoint
            self.num_told += self._end(lambda e: e.version <= reached and are_noted(e.names), True)

    def _end(self, is_over: Callable[[_Spreading], bool], outcome: bool) -> int:
        """End what has spread, or cannot any more. The caller holds the lock."""
        over = [each for each in self._spreading if is_over(each)]
        for each in over:
            keep(each.is_done, outcome)
        self._spreading = [each for each in self._spreading if not each.is_done.done()]
        return len(over)

    def change_namespace(self, namespace: bytes) -> None:
        """Continue under another namespace. What is known of the old one is kept for its return."""
        with self._lock:
            self._namespace, self._shelf = namespace, self._use(namespace)
            self._version += 1
            self._end(lambda _: True, False)

    def _use(self, namespace: bytes) -> _Shelf:
        shelf = self._shelves.pop(namespace, _Shelf())
        self._shelves[namespace] = shelf
        while len(self._shelves) > MAX_NAMESPACES:
            del self._shelves[next(iter(self._shelves))]
        return shelf

    def close(self) -> None:
        """End what has not spread, as false."""
        with self._lock:
            self._is_closed = True
            self._end(lambda _: True, False)

    # ---- Over a restart ----

    def _recall(self, notes: RegionEngine) -> None:
        """Read what is noted. Of another version it is ignored: it is told and applied again."""
        now, offset_s = self._clock(), self._clock() - self._wall_clock()
        for note in notes.erased_notes:
            try:
                noted = msgspec.msgpack.decode(note.data, type=_Noted)
            except msgspec.DecodeError:
                continue
            if noted.version != VERSION:
                continue
            # A clock that was set back would keep it for ever.
            forget_at = min(note.until_s + offset_s, now + self._retention_s)
            self._version += 1
            record = _KnownErasure(
                noted.namespace, noted.tenant, noted.keys, forget_at, self._version, ended(True)
            )
            self._use(noted.namespace).add(note.id, record)

    def save(self) -> None:
        """Note what has become durable since. What cannot be noted is tried with the next call.
        What cannot become durable is known no longer, so that others tell it again."""
        with self._lock:
            settled = {name: each for name, each in self._unnoted.items() if each.local.done()}
            failed = {name for name, each in settled.items() if not each.local.result()}
            for name in failed:
                record = settled.pop(name)
                del self._unnoted[name]
                shelf = self._shelves.get(record.namespace)
                if shelf is not None and shelf.records.get(name) is record:
                    shelf.withdraw(name)
            self._end(lambda each: not failed.isdisjoint(each.names), False)
        offset_s = self._wall_clock() - self._clock()
        notes = [_note(name, each, offset_s) for name, each in settled.items()]
        noted = ended(True)
        if self._notes is not None and notes:
            noted = self._notes.note_erased((), notes)
        if not is_true(noted, _NOTE_WAIT_S):
            return
        with self._lock:
            for name in settled:
                self._unnoted.pop(name, None)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books do not balance."""
        with self._lock:
            for shelf in self._shelves.values():
                total = keys_bytes = num_forgets = 0
                for name, record in shelf.records.items():
                    total ^= xxhash.xxh3_128_intdigest(name)
                    keys_bytes += len(record.keys or b"")
                    num_forgets += record.keys is not None
                assert total == shelf.sum, f"the digest of {len(shelf.records)} erasures is off"
                counted = (shelf.keys_bytes, shelf.num_forgets)
                assert (keys_bytes, num_forgets) == counted, f"{keys_bytes}, {num_forgets}"


def _note(name: bytes, record: _KnownErasure, offset_s: float) -> Note:
    noted = _Noted(VERSION, record.namespace, record.tenant, record.keys)
    return Note(name, record.forget_at + offset_s, msgspec.msgpack.encode(noted))


def _short(ids: bytes) -> list[bytes]:
    """What follows the last whole one names nothing."""
    number = len(ids) // SHORT_ID_BYTES
    split: list[bytes] = np.frombuffer(ids, f"V{SHORT_ID_BYTES}", number).tolist()
    return split


assert PIECE_KEYS <= MAX_ERASED_KEYS
assert MAX_KEYS_BYTES >= KEY_BYTES * MAX_ERASED_KEYS
assert _RECORD_BYTES + KEY_BYTES * MAX_ERASED_KEYS <= MAX_ERASURES_BYTES  # any fits alone
assert (MAX_PURGES + MAX_FORGETS + MAX_DROPPED) * SHORT_ID_BYTES <= MAX_ERASURES_BYTES

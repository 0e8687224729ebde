"""What was erased in a bucket: one small record of each erasure, for every namespace there.

Records are numbered. A page carries the number of the last erasure that its writer had applied when
it was submitted (its *stamp*), and is dead by every later record that names it. So no two clocks
are compared, and a page that was read before an erasure is dead wherever and whenever it arrives.

Numbers grow: who writes a record lists before and behind that, and writes it again under a later
number where another came between. The record with the highest number is never removed.

| below ``v2/erased/`` | erases |
|---|---|
| ``<number, 12 hex digits>-<id, 32>-t<tenant, 32>`` | all pages of a tenant |
| ``<number, 12 hex digits>-<id, 32>-n<namespace, 64>`` | all pages of a namespace |
| ``<number, 12 hex digits>-<id, 32>-k`` | those whose keys it holds |
| ``<highest number, 12>-<id, 32>-m<lowest, 12>`` | what several of the kind ``k`` did |
"""

from __future__ import annotations

import logging
import re
import secrets
from itertools import chain, groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.base import KEY_BYTES, RECORD_KEYS, TENANT_BYTES, Erasure
from sglang_tiered.storage.bucket.names import ERASED, NAMESPACE_BYTES
from sglang_tiered.storage.bucket.requests import BucketError, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from sglang_tiered.storage.bucket.directory import Listed
    from sglang_tiered.storage.bucket.requests import Requests


MAX_NUMBER = (1 << 31) - 1  # stamps have 32 bits
_ENTRY_BYTES = 64  # of a merged record, beside its keys
_MAX_RECORD_BYTES = RECORD_KEYS * KEY_BYTES + _ENTRY_BYTES
_MAX_MERGED_BYTES = 2 << 20  # with others under way within the timeout of a request
_MERGED_FROM = 64
"""So many records become one, or fewer that fill one: each is a request of a server's start."""
_MAX_KEYS = 1 << 16  # as they are, some 150 bytes each; those before take 12
_MAX_HASHES = 1 << 23
_MAX_SAMPLE = 1 << 13
_MAX_WHOLES = 1 << 17
_MAX_LISTINGS = 8

_SEED = secrets.randbits(64)

_log = OnceLog(logging.getLogger(__name__))
_NAME = re.compile(r"(([0-9a-f]{12})-([0-9a-f]{32}))-([a-z])([0-9a-f]*)")
_HEX_CHARS = {"t": 2 * TENANT_BYTES, "n": 2 * NAMESPACE_BYTES, "k": 0, "m": 12}


class _RecordEntry(NamedTuple):
    """One erasure in an object of several."""

    number: int
    id: bytes
    unix_s: float  # when its record was written, by the store's clock
    keys: bytes  # one behind the other


class Record(NamedTuple):
    """One erasure in a bucket. ``what`` is None where the record cannot be read: everything that
    is older counts as erased, in every namespace. Several may be in one object; there the first
    names no page, and stands for the object."""

    number: int
    what: Erasure | None
    namespace: bytes  # of an erasure of everything; empty for others
    path: str
    modified: float  # by the store's clock

    @property
    def name(self) -> str:
        """Return what tells it from all others, in whatever object it is."""
        if self.what is None:
            return name_of(self.path)
        return f"{self.number:012x}-{self.what.id.hex()}"


def name_of(path: str) -> str:
    """Return number and id of the record at a path; of several, of that which stands for them."""
    return path.rpartition("/")[2][:45]


def record_path(number: int, what: Erasure, namespace: bytes) -> str:
    if what.keys is not None:
        named = "k"
    else:
        named = f"n{namespace.hex()}" if what.tenant is None else f"t{what.tenant.hex()}"
    return f"{ERASED}/{number:012x}-{what.id.hex()}-{named}"


def record_data(what: Erasure) -> bytes:
    return seal((b"".join(what.keys or ()),))


def read_records(
    requests: Requests,
    take: Callable[[Record], None],
    known: Container[str] = (),
    after: int = 0,
) -> int | None:
    """Have each record from a number on taken whose name is not known, in their order, as they are
    read: what was taken before an error is not lost. Returns the lowest number of all. Raises
    ``BucketError``."""
    cursor = f"{ERASED}/{after:012x}" if after else None
    for _ in range(_MAX_LISTINGS):
        listed = []
        lowest: int | None = None
        for each in chain.from_iterable(requests.listing(ERASED, after=cursor)):
            match = _NAME.fullmatch(each.path.rpartition("/")[2])
            if match is not None and int(match[2], 16) > MAX_NUMBER:
                _log.report(each.path, "object tier: %s is no record and is ignored", each.path)
            elif match is not None:
                first = int(match[5] if match[4] == "m" and match[5] else match[2], 16)
                lowest = first if lowest is None else min(lowest, first)
                if match[1] not in known:
                    listed.append((each, match))
        is_whole = True
        for found in requests.each(lambda record: _read(requests, *record), listed):
            # One that is gone is in another since, which is listed behind it, or over.
            is_whole &= found is not None
            for record in found or ():
                if record.name not in known:
                    take(record)
        if is_whole:
            return lowest
    raise BucketError(Failure.UNAVAILABLE, "list showed records that were gone, again and again")


def all_records(requests: Requests) -> list[Record]:
    """Return every record, of every object that holds it. Raises ``BucketError``."""
    records: dict[tuple[str, str], Record] = {}  # what was gone meanwhile is read again
    read_records(requests, lambda each: records.update({(each.path, each.name): each}))
    return list(records.values())


def _read(requests: Requests, listed: Listed, match: re.Match[str]) -> list[Record] | None:
    """Read an object; None for one that is gone meanwhile."""
    number, record_id = int(match[2], 16), bytes.fromhex(match[3])
    kind, digits = match[4], match[5]
    place = listed.path, listed.modified
    if len(digits) == _HEX_CHARS.get(kind) and kind in "tn":
        named = bytes.fromhex(digits)
        what = Erasure(None, named if kind == "t" else None, record_id, spread=False)
        return [Record(number, what, named if kind == "n" else b"", *place)]
    data: memoryview | None = memoryview(b"")
    if len(digits) == _HEX_CHARS.get(kind) and 0 < listed.size <= _MAX_RECORD_BYTES:
        data = requests.whole(listed)
    if data is None:
        return None
    entries = _entries(kind, bytes(data), _RecordEntry(number, record_id, listed.modified, b""))
    is_sound = all(0 < e.number <= number and len(e.keys) % KEY_BYTES == 0 for e in entries)
    found = []
    for entry in entries if is_sound else ():
        split = range(0, len(entry.keys), KEY_BYTES)
        keys = tuple(dict.fromkeys(entry.keys[at : at + KEY_BYTES] for at in split))
        what = Erasure(keys, None, entry.id, spread=False)
        found.append(Record(entry.number, what, b"", listed.path, entry.unix_s))
    return found or [Record(number, None, b"", *place)]


def _entries(kind: str, data: bytes, own: _RecordEntry) -> list[_RecordEntry]:
    """Return what an object of erased pages says; nothing if it is damaged."""
    if kind == "k":
        single = unseal(data, tuple[bytes])
        return [] if single is None else [own._replace(keys=single[0])]
    merged = unseal(data, tuple[list[_RecordEntry]])
    return [] if merged is None else [own, *merged[0]]


def records_of(whats: Sequence[tuple[Erasure, bytes]], first: int, now: float) -> list[Record]:
    """Number erasures, each with its namespace, from the first on: those of few pages before the
    others, so that what is in one object has numbers in a row."""
    ordered = sorted(whats, key=lambda each: (each[0].keys is None, len(each[0].keys or ())))
    return [
        Record(number, what, namespace, record_path(number, what, namespace), now)
        for number, (what, namespace) in enumerate(ordered, first)
    ]


def packed(records: Sequence[Record]) -> list[tuple[str, bytes]]:
    """Return paths and bytes of the objects of new records, in the order of their numbers."""
    merged = list(mergeable(records, 0.0, 2))
    apart = {record.path: record.what for record in records}
    for path in (path for _, _, replaced in merged for path in replaced):
        del apart[path]
    alone = [(path, record_data(what)) for path, what in apart.items() if what is not None]
    return sorted([*((path, data) for path, data, _ in merged), *alone])


def mergeable(
    records: Sequence[Record], oldest_s: float, least: int = _MERGED_FROM
) -> Iterator[tuple[str, bytes, list[str]]]:
    """Yield what of these records, in their order, could be one, from ``least`` on: its path, its
    bytes, and the paths that it replaces once it is written. What is in it from before ``oldest_s``
    is left out."""
    batch: dict[str, list[Record]] = {}
    room = _MAX_MERGED_BYTES
    for path, found in groupby(records, lambda record: record.path):
        whole = list(found)
        size = sum(
            len(each.what.keys) * KEY_BYTES + _ENTRY_BYTES
            for each in whole
            if each.what is not None and each.what.keys is not None
        )
        if not size or size > _MAX_MERGED_BYTES // 2:
            continue
        if size > room:
            yield from _merged(batch, oldest_s)
            batch, room = {}, _MAX_MERGED_BYTES
        batch[path] = whole
        room -= size
    if len(batch) >= least:
        yield from _merged(batch, oldest_s)


def _merged(
    batch: dict[str, list[Record]], oldest_s: float
) -> Iterator[tuple[str, bytes, list[str]]]:
    if len(batch) < 2:
        return
    entries = {
        each.name: _RecordEntry(each.number, each.what.id, each.modified, b"".join(each.what.keys))
        for each in chain.from_iterable(batch.values())
        if each.what is not None and each.what.keys and each.modified >= oldest_s
    }
    if entries:
        numbers = [entry.number for entry in entries.values()]
        path = record_path(max(numbers), Erasure(()), b"")
        yield f"{path[:-1]}m{min(numbers):012x}", seal((list(entries.values()),)), list(batch)


class BucketErasures:
    """What is dead by the records that are known, and by erasures that have none so far. By what
    names a page, the number below which its stamp is that of a dead one. Of the keys before the
    last some it has eight bytes, which nobody can aim at: their seed is this process's own. The
    owner's lock guards every call.

    ``hides`` says more than ``kills``: where there were more keys than fit in memory, or a record
    that cannot be read. Rather miss pages than serve what was erased; but only what names a page
    kills it."""

    def __init__(self) -> None:
        self.top = 0  # the highest number
        self.known: dict[str, int] = {}  # numbers by names, of records that are wholly applied
        self._floor = 0
        self._keys: dict[bytes, int] = {}
        self._hashes = np.empty(0, np.uint64)  # sorted
        self._hash_numbers = np.empty(0, np.uint32)
        self._wholes: dict[bytes, int] = {}  # tenants and namespaces

    @classmethod
    def of(cls, records: Iterable[Record]) -> BucketErasures:
        """Return what these say, but for those that cannot be read."""
        erased = cls()
        for record in records:
            if record.what is not None:
                erased.add(record)
        return erased

    def add(self, record: Record) -> None:
        self.top = max(self.top, record.number)
        if record.what is None:
            self._floor = max(self._floor, record.number)
        else:
            self._note(record.what, record.namespace, record.number)

    def expect(self, what: Erasure, namespace: bytes) -> None:
        """Note what has no record so far: that one will be behind all that are known."""
        self._note(what, namespace, self.top + 1)

    def _note(self, what: Erasure, namespace: bytes, number: int) -> None:
        """Note an erasure. What no longer fits in memory raises the floor."""
        for key in what.keys or ():
            _raise(self._keys, key, number)
        if what.keys is None:
            _raise(self._wholes, namespace if what.tenant is None else what.tenant, number)
        if len(self._keys) > _MAX_KEYS:
            self._pack_keys()
        if len(self._wholes) > _MAX_WHOLES:
            oldest = list(self._wholes)[: _MAX_WHOLES // 2]
            self._floor = max(self._floor, *map(self._wholes.pop, oldest))

    def _pack_keys(self) -> None:
        """Sort these keys alone, and insert them: lookups wait for it."""
        hashes = np.fromiter(map(_hash, self._keys), np.uint64, len(self._keys))
        numbers = np.fromiter(self._keys.values(), np.uint32, len(self._keys))
        self._keys.clear()
        order = np.lexsort((numbers, hashes))
        hashes, numbers = hashes[order], numbers[order]
        is_last = np.append(hashes[1:] != hashes[:-1], True)  # of its hash: the highest
        hashes, numbers = hashes[is_last], numbers[is_last]
        at = np.searchsorted(self._hashes, hashes)
        known = np.flatnonzero(at < len(self._hashes))
        known = known[self._hashes[at[known]] == hashes[known]]
        raised = np.maximum(self._hash_numbers[at[known]], numbers[known])
        self._hash_numbers[at[known]] = raised
        at, hashes, numbers = (np.delete(each, known) for each in (at, hashes, numbers))
        self._hashes = np.insert(self._hashes, at, hashes)
        self._hash_numbers = np.insert(self._hash_numbers, at, numbers)
        if len(self._hashes) > _MAX_HASHES:
            # Of some, as lookups wait: what is sorted by hashes is in no order of numbers.
            sample = self._hash_numbers[:: len(self._hashes) // _MAX_SAMPLE + 1]
            folded = int(np.median(sample))
            self._keep_hashes(self._hash_numbers > folded)
            self._floor = max(self._floor, folded)

    def _keep_hashes(self, are_kept: NDArray[np.bool_]) -> None:
        self._hashes, self._hash_numbers = self._hashes[are_kept], self._hash_numbers[are_kept]

    def keep_only(self, lowest: int) -> None:
        """Drop what records below a number say: they were removed, and nothing is left of it."""
        self.known = {name: number for name, number in self.known.items() if number >= lowest}
        for numbers in (self._keys, self._wholes):
            for each in [each for each, number in numbers.items() if number < lowest]:
                del numbers[each]
        self._keep_hashes(self._hash_numbers >= lowest)

    def kills(self, namespace: bytes, tenant: bytes, key: bytes, stamp: int) -> bool:
        """Return whether a page is dead by what names it."""
        bounds = self._keys.get(key, 0), self._wholes.get(tenant, 0), self._wholes.get(namespace, 0)
        return stamp < max(*bounds, self._of_hash(key) if len(self._hashes) else 0)

    def hides(self, namespace: bytes, tenant: bytes, key: bytes, stamp: int) -> bool:
        return stamp < self._floor or self.kills(namespace, tenant, key, stamp)

    def _of_hash(self, key: bytes) -> int:
        hashed = np.uint64(_hash(key))
        at = int(np.searchsorted(self._hashes, hashed))
        is_there = at < len(self._hashes) and self._hashes[at] == hashed
        return int(self._hash_numbers[at]) if is_there else 0


def _hash(key: bytes) -> int:
    return xxh3_64_intdigest(key, _SEED)


def _raise(numbers: dict[bytes, int], each: bytes, number: int) -> None:
    numbers[each] = max(numbers.pop(each, 0), number)

"""What was erased in a bucket: one small record of each erasure, for every namespace there.

Records are numbered. A page carries the number of the last erasure that its writer had applied when
it was submitted (its *stamp*), and is dead by every later record that names it. So no two clocks
are compared, and a page that was read before an erasure is dead wherever and whenever it arrives.

    v2/erased/<number, 12 hex digits>-<id, 32>-t<tenant, 32>      all pages of a tenant
    v2/erased/<number, 12 hex digits>-<id, 32>-n<namespace, 64>   all pages of a namespace
    v2/erased/<number, 12 hex digits>-<id, 32>-k                  those whose keys it holds

Numbers grow: who writes a record lists before and behind that, and writes it again under a later
number where another came between. The record with the highest number is never removed.
"""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.base import KEY_BYTES, RECORD_KEYS, TENANT_BYTES, Erasure
from sglang_tiered.storage.bucket.names import ERASED, NAMESPACE_BYTES
from sglang_tiered.storage.bucket.requests import Failure, RequestError

if TYPE_CHECKING:
    from collections.abc import Container

    from sglang_tiered.storage.bucket.directory import Listed
    from sglang_tiered.storage.bucket.requests import Requests

__all__ = ["MAX_NUMBER", "Erased", "Record", "read_records", "record_path"]

MAX_NUMBER = (1 << 31) - 1  # stamps have 32 bits
_MAX_RECORD_BYTES = RECORD_KEYS * KEY_BYTES + 64
_MAX_KEYS = 1 << 19  # in memory, of all records: some 150 bytes each
_MAX_TENANTS = 1 << 17
_NUM_READS = 8  # under way

_log = OnceLog(logging.getLogger(__name__))
_NAME = re.compile(r"([0-9a-f]{12})-([0-9a-f]{32})-([a-z])([0-9a-f]*)")
_HEX_CHARS = {"t": 2 * TENANT_BYTES, "n": 2 * NAMESPACE_BYTES, "k": 0}


class _Keys(msgspec.Struct, frozen=True, array_like=True):
    keys: bytes  # one behind the other


class Record(NamedTuple):
    """One erasure in a bucket. ``what`` is None where the record cannot be read: everything that
    is older counts as erased, in every namespace."""

    number: int
    what: Erasure | None
    namespace: bytes  # of an erasure of everything; empty for others
    path: str
    modified: float  # by the store's clock


def record_path(number: int, what: Erasure, namespace: bytes) -> str:
    if what.keys is not None:
        named = "k"
    else:
        named = f"n{namespace.hex()}" if what.tenant is None else f"t{what.tenant.hex()}"
    return f"{ERASED}/{number:012x}-{what.id.hex()}-{named}"


def record_data(what: Erasure) -> bytes:
    return seal(_Keys(b"".join(what.keys or ())))


def read_records(
    requests: Requests, after: int, known: Container[str], numbers: set[int]
) -> list[Record]:
    """Read the records from a number on that are not known, in their order, and add the numbers of
    all. Raises ``RequestError``."""
    cursor = f"{ERASED}/{after:012x}" if after else None
    listed = []
    for chunk in requests.listing(ERASED, after=cursor):
        for each in chunk:
            match = _NAME.fullmatch(each.path.rpartition("/")[2])
            if match is not None and int(match[1], 16) > MAX_NUMBER:
                _log.report(each.path, "object tier: %s is no record and is ignored", each.path)
            elif match is not None:
                numbers.add(int(match[1], 16))
                if each.path not in known:
                    listed.append((each, match))

    def read(found: tuple[Listed, re.Match[str]]) -> Record | None:
        return _record(requests, *found)

    with ThreadPoolExecutor(_NUM_READS) as pool:  # its threads begin with the first record
        return [each for each in pool.map(read, listed) if each is not None]


def _record(requests: Requests, listed: Listed, match: re.Match[str]) -> Record | None:
    """Read a record; None for one that is gone meanwhile."""
    number, record_id = int(match[1], 16), bytes.fromhex(match[2])
    kind, digits = match[3], match[4]
    what: Erasure | None = None
    if len(digits) == _HEX_CHARS.get(kind):
        if kind == "k":
            try:
                is_sound = 0 < listed.size <= _MAX_RECORD_BYTES
                data = bytes(requests.get(listed.path, listed.size)) if is_sound else b""
            except RequestError as error:
                if error.failure is not Failure.NOT_FOUND:
                    raise
                return None
            keys = unseal(data, _Keys)
            if keys is not None and len(keys.keys) % KEY_BYTES == 0:
                split = range(0, len(keys.keys), KEY_BYTES)
                each = tuple(keys.keys[at : at + KEY_BYTES] for at in split)
                what = Erasure(each, None, record_id, spread=False)
        else:
            tenant = bytes.fromhex(digits) if kind == "t" else None
            what = Erasure(None, tenant, record_id, spread=False)
    namespace = bytes.fromhex(digits) if what is not None and kind == "n" else b""
    return Record(number, what, namespace, listed.path, listed.modified)


class _Numbers:
    """The number below which a stamp is that of a dead page, by what was erased."""

    def __init__(self) -> None:
        self.keys: dict[bytes, int] = {}
        self.tenants: dict[bytes, int] = {}
        self.namespaces: dict[bytes, int] = {}

    def note(self, what: Erasure, namespace: bytes, number: int) -> int:
        """Note an erasure. Returns the highest number of those that no longer fit in memory."""
        if what.keys is not None:
            for key in what.keys:
                _raise(self.keys, key, number)
            return _fold(self.keys, _MAX_KEYS)
        if what.tenant is not None:
            _raise(self.tenants, what.tenant, number)
            return _fold(self.tenants, _MAX_TENANTS)
        _raise(self.namespaces, namespace, number)
        return 0

    def keep_only(self, lowest: int) -> None:
        for numbers in (self.keys, self.tenants, self.namespaces):
            for each in [each for each, number in numbers.items() if number < lowest]:
                del numbers[each]

    def of(self, namespace: bytes, tenant: bytes, key: bytes) -> int:
        return max(
            self.keys.get(key, 0),
            self.tenants.get(tenant, 0),
            self.namespaces.get(namespace, 0),
        )


class Erased:
    """What is dead by the records that are known, and what other servers told without one so far.
    The owner's lock guards every call. ``hides`` says more than ``kills``: what was told, and where
    there were more keys than fit in memory, or a record that cannot be read. Rather miss pages than
    serve what was erased; but only a record kills."""

    def __init__(self) -> None:
        self.top = 0  # the highest number
        self.known: dict[str, int] = {}  # numbers by paths
        self._recorded = _Numbers()
        self._told = _Numbers()
        self._floor = 0

    def add(self, record: Record) -> None:
        self.known[record.path] = record.number
        self.top = max(self.top, record.number)
        folded = record.number
        if record.what is not None:
            folded = self._recorded.note(record.what, record.namespace, record.number)
        self._floor = max(self._floor, folded)

    def tell(self, what: Erasure, namespace: bytes) -> None:
        """Hide what was told and has no record so far: that one will be behind all that are
        known."""
        self._floor = max(self._floor, self._told.note(what, namespace, self.top + 1))

    def keep_only(self, lowest: int) -> None:
        """Drop what records below a number say: they were removed, and nothing is left of it."""
        self.known = {path: number for path, number in self.known.items() if number >= lowest}
        for numbers in (self._recorded, self._told):
            numbers.keep_only(lowest)

    def kills(self, namespace: bytes, tenant: bytes, key: bytes, stamp: int) -> bool:
        """Return whether a page is dead by a record."""
        return stamp < self._recorded.of(namespace, tenant, key)

    def hides(self, namespace: bytes, tenant: bytes, key: bytes, stamp: int) -> bool:
        told = self._told.of(namespace, tenant, key)
        return stamp < max(self._floor, told) or self.kills(namespace, tenant, key, stamp)


def _raise(numbers: dict[bytes, int], each: bytes, number: int) -> None:
    numbers[each] = max(numbers.pop(each, 0), number)


def _fold(numbers: dict[bytes, int], most: int) -> int:
    if len(numbers) <= most:
        return 0
    return max(numbers.pop(each) for each in list(numbers)[: most // 2])

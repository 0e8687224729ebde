"""What was erased: which pages in the log are dead, whatever the region files say.

The log is never rewritten, so an erasure notes how far the log reached: of that tenant, everything
before is dead; pages that are erased one by one are noted by key. Unlike the checkpoint this
file is the truth: without it purged pages would come back. So one that does not verify purges
everything that was stored before it was found damaged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from sglang_tiered.errors import StoreFormatError
from sglang_tiered.storage.region.files import PURGES_NAME
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    parse_region_name,
)
from sglang_tiered.storage.region.walk import NOT_A_FILE_ERRNOS, UNREADABLE_ERRNOS, persist

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from sglang_tiered.storage.region.device import Device
    from sglang_tiered.storage.region.format import Contents

__all__ = [
    "MAX_FORGOTTEN",
    "MAX_TENANTS",
    "NOWHERE",
    "VERSION_WITH_KEYS",
    "Bound",
    "Forgotten",
    "Purges",
    "compact",
    "pack",
    "read",
    "unpack",
]

MAGIC = b"SGLTPURG"
VERSION_WITH_KEYS = FORMAT_VERSION + 1
"""Written only while pages are forgotten by key: a program that knows nothing of those refuses the
store, as it would serve them."""
MAX_TENANTS = 16384
"""Beyond it the older half is replaced by one purge of every tenant, as far back as those reach: a
cache may forget, and a file that grows with every purge would make each the slower."""

MAX_FORGOTTEN = 1 << 18
"""Beyond it the older half is replaced by a purge of everything as far back as those reach: a file
that grows with every call would make each the slower."""

_DTYPE: np.dtype[Any] = np.dtype([("key", "S32"), ("sequence", "<u8"), ("offset", "<u8")])

_HEADER = struct.Struct("<8sIIQQ")  # magic version num_tenants, and the bound of all tenants
_ENTRY = struct.Struct("<16sQQ")  # tenant sequence offset
_NUM_KEYS = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<Q")
_MAGIC_VERSION = struct.Struct("<8sI")


class Bound(NamedTuple):
    """A place in the log: what lies before it is dead. Ordered as the log is."""

    sequence: int  # of the region
    offset: int  # of the extent within it


NOWHERE = Bound(0, 0)
_EVERYWHERE = Bound((1 << 63) - 1, 0)


class Forgotten:
    """Which pages were erased one by one: keys with their bounds, sorted by key; every key once. A
    page is dead where it lies before the bound of its key, whatever its namespace."""

    def __init__(self, rows: npt.NDArray[Any] | None = None) -> None:
        self._rows = np.zeros(0, _DTYPE) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Forgotten) and bool(np.array_equal(self._rows, other._rows))

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> Forgotten:
        return Forgotten(self._rows.copy())

    def add(self, keys: Sequence[bytes], bound: Bound) -> None:
        """Declare dead what is stored under these keys before the bound, which is not before that
        of any key already there."""
        new = np.zeros(len(keys), _DTYPE)
        new["key"] = np.frombuffer(b"".join(keys), "S32")
        new["sequence"], new["offset"] = bound
        kept = self._rows[~np.isin(self._rows["key"], new["key"])]
        rows = np.concatenate([kept, new[np.unique(new["key"], return_index=True)[1]]])
        self._rows = rows[np.argsort(rows["key"], kind="stable")]

    def fold(self) -> Bound:
        """Drop the older half when there are too many; returns the bound they are all before."""
        if len(self._rows) <= MAX_FORGOTTEN:
            return NOWHERE
        order = np.lexsort((self._rows["offset"], self._rows["sequence"]))
        oldest = order[: MAX_FORGOTTEN // 2]
        last = self._rows[oldest[-1]]
        self._rows = np.delete(self._rows, oldest)
        return Bound(int(last["sequence"]), int(last["offset"]))

    def next_sequence(self) -> int:
        return int(self._rows["sequence"].max()) + 1 if len(self._rows) else 0

    def forget_before(self, sequence: int) -> bool:
        """Drop what speaks only of regions older than ``sequence``; true when there was any."""
        bounds = self._rows["sequence"], self._rows["offset"]
        old = (bounds[0] < sequence) | ((bounds[0] == sequence) & (bounds[1] <= BLOCK_BYTES))
        if not old.any():
            return False
        self._rows = self._rows[~old]
        return True

    def dead_pages(self, sequence: int, contents: Contents) -> npt.NDArray[np.bool_]:
        """Return which pages of a region are dead."""
        dead = np.zeros(len(contents.pages), np.bool_)
        if not len(self._rows) or not len(dead):
            return dead
        keys = np.ascontiguousarray(contents.pages["key"]).view("S32").reshape(-1)
        at = np.minimum(np.searchsorted(self._rows["key"], keys), len(self._rows) - 1)
        named = np.flatnonzero(self._rows["key"][at] == keys)
        bounds = self._rows[at[named]]
        offsets = np.repeat(contents.extents["offset"], contents.extents["num_pages"])[named]
        dead[named] = (sequence < bounds["sequence"]) | (
            (sequence == bounds["sequence"]) & (offsets < bounds["offset"])
        )
        return dead

    def pack(self) -> bytes:
        return self._rows.tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Forgotten | None:
        """Unpack what ``pack`` gave; ``None`` for rows that no store wrote."""
        rows = np.frombuffer(data, _DTYPE).copy()
        sane = (rows["offset"] % BLOCK_BYTES == 0) & (rows["sequence"] < np.uint64(1 << 63))
        sorted_once = (rows["key"][:-1] < rows["key"][1:]).all()
        return cls(rows) if sane.all() and sorted_once else None


@dataclass(slots=True)
class Purges:
    """The bound of every tenant that was purged, one for all tenants alike, and those of pages."""

    tenants: dict[bytes, Bound] = field(default_factory=dict)
    everyone: Bound = NOWHERE
    damaged: bool = False  # the file is: everything is dead
    forgotten: Forgotten = field(default_factory=Forgotten)

    @property
    def is_empty(self) -> bool:
        return not self.tenants and self.everyone == NOWHERE and not self.forgotten

    def add(self, tenant: bytes | None, bound: Bound) -> None:
        """Declare dead all that a tenant (None: every tenant) has before the bound."""
        if tenant is None:
            self.everyone = max(self.everyone, bound)
            return
        self.tenants[tenant] = max(self.tenants.get(tenant, NOWHERE), bound)
        if len(self.tenants) > MAX_TENANTS:
            oldest = sorted(self.tenants, key=self.tenants.__getitem__)[: MAX_TENANTS // 2]
            self.everyone = max(self.everyone, *(self.tenants.pop(name) for name in oldest))

    def forget(self, keys: Sequence[bytes], bound: Bound) -> None:
        """Declare dead what is stored under these keys before the bound."""
        self.forgotten.add(keys, bound)
        self.everyone = max(self.everyone, self.forgotten.fold())

    def next_sequence(self) -> int:
        """Return a sequence above all bounds: what is stored from now on is not meant."""
        bounds = (self.everyone, *self.tenants.values())
        after = (bound.sequence + 1 for bound in bounds if bound != NOWHERE)
        return max(self.forgotten.next_sequence(), *after, 0)

    def forget_before(self, sequence: int) -> bool:
        """Drop what speaks only of regions older than ``sequence``; true when there was any."""
        first = Bound(sequence, BLOCK_BYTES)
        kept = {tenant: bound for tenant, bound in self.tenants.items() if bound > first}
        changed = len(kept) < len(self.tenants) or NOWHERE < self.everyone <= first
        self.tenants = kept
        if self.everyone <= first:
            self.everyone = NOWHERE
        return self.forgotten.forget_before(sequence) or changed

    def copy(self) -> Purges:
        return Purges(dict(self.tenants), self.everyone, self.damaged, self.forgotten.copy())

    def dead_pages(self, sequence: int, contents: Contents) -> npt.NDArray[np.bool_]:
        """Return which pages of a region are dead."""
        extents = self.dead_extents(sequence, contents)
        dead: npt.NDArray[np.bool_] = np.repeat(extents, contents.extents["num_pages"])
        return dead | self.forgotten.dead_pages(sequence, contents)

    def dead_extents(self, sequence: int, contents: Contents) -> npt.NDArray[np.bool_]:
        """Return which extents of a region are dead as a whole."""
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
        return dead


def _before(sequence: int, offsets: npt.NDArray[np.uint64], bound: Bound) -> npt.NDArray[np.bool_]:
    if sequence != bound.sequence:
        return np.full(len(offsets), sequence < bound.sequence)
    before: npt.NDArray[np.bool_] = offsets < np.uint64(bound.offset)
    return before


def pack(purges: Purges) -> bytes:
    rows = [_ENTRY.pack(tenant, *bound) for tenant, bound in sorted(purges.tenants.items())]
    version = VERSION_WITH_KEYS if purges.forgotten else FORMAT_VERSION
    body = _HEADER.pack(MAGIC, version, len(rows), *purges.everyone) + b"".join(rows)
    if purges.forgotten:
        body += _NUM_KEYS.pack(len(purges.forgotten)) + purges.forgotten.pack()
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def unpack(data: bytes) -> Purges | None:
    """Unpack purges; ``None`` for bytes that do not verify. Raises ``StoreFormatError`` for those
    of a newer version that do."""
    if len(data) < _HEADER.size + _CHECKSUM.size:
        return None
    body = data[: -_CHECKSUM.size]
    if _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0] != xxhash.xxh3_64_intdigest(body):
        return None
    magic, version = _MAGIC_VERSION.unpack_from(body)
    if magic != MAGIC:
        return None
    if version > VERSION_WITH_KEYS:
        raise StoreFormatError(
            f"{PURGES_NAME} was written in format {version}, newer than {VERSION_WITH_KEYS}, which "
            "this version reads; upgrade sglang-tiered or pass another --tier-dir"
        )
    _, _, num_tenants, *everyone = _HEADER.unpack_from(body)
    end = _HEADER.size + num_tenants * _ENTRY.size
    forgotten: Forgotten | None = Forgotten()
    if version == VERSION_WITH_KEYS:
        start = end + _NUM_KEYS.size
        if len(body) < start:
            return None
        (num_keys,) = _NUM_KEYS.unpack_from(body, end)
        if len(body) != start + num_keys * _DTYPE.itemsize:
            return None
        forgotten = Forgotten.unpack(body[start:])
    elif version != FORMAT_VERSION or len(body) != end:
        return None
    if forgotten is None:
        return None
    rows: Iterable[tuple[bytes, int, int]] = _ENTRY.iter_unpack(body[_HEADER.size : end])
    tenants = {tenant: Bound(sequence, offset) for tenant, sequence, offset in rows}
    purges = Purges(tenants, Bound(*everyone), forgotten=forgotten)
    bounds = (purges.everyone, *tenants.values())
    sane = all(bound < _EVERYWHERE and bound.offset % BLOCK_BYTES == 0 for bound in bounds)
    return purges if sane and len(tenants) == num_tenants else None


def compact(device: Device, purges: Purges) -> bool:
    """Drop what is said of regions that are gone, once they cannot come back; true when there was
    any. Raises ``OSError``."""
    sequences = [parse_region_name(name) for name in device.list_names()]
    first = min((s for s in sequences if s is not None), default=purges.next_sequence())
    if not purges.copy().forget_before(first):
        return False
    device.sync_directory()
    return purges.forget_before(first)


def read(device: Device) -> Purges:
    """Return what the file says. One that is damaged purges everything there is, and says so.
    Raises ``OSError`` for one that cannot be read and for conditions of this process, and
    ``StoreFormatError`` as ``unpack``."""
    try:
        data = persist(lambda: device.read_file(PURGES_NAME))
    except FileNotFoundError:
        return Purges()
    except OSError as error:
        if error.errno in UNREADABLE_ERRNOS:
            why = f"{PURGES_NAME}, which says what was purged, cannot be read: {error.strerror}"
            raise OSError(error.errno, why) from error
        if error.errno not in NOT_A_FILE_ERRNOS:
            raise
        data = b""
    purges = unpack(data)
    if purges is None:
        purges = Purges(everyone=_EVERYWHERE, damaged=True)
    return purges

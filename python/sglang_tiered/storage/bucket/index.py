"""What is held: the pages that a bucket lists, in memory. No I/O.

A page takes about 200 bytes, and 100 more where tenants have a limit: its key, a row of 28 bytes,
and their place in a table that the collector of garbage need not look into. Nothing here locks: the
owner's lock guards every call.
"""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.base import TenantUsage
from sglang_tiered.storage.bucket.names import PageName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["MAX_STEPS", "Held", "PageIndex"]

_ROW = struct.Struct("<IIIIQI")
_PART_KEYS = 10_000
MAX_STEPS = 1000
"""Pages that one call drops or finds pinned, as lookups wait for it."""


class Held(NamedTuple):
    """A row of the index."""

    share: int
    unix_s: int
    stored: int
    length: int
    checksum: int
    stamp: int


class _Share:
    """What one tenant has. One that was erased is dead, and its rows are swept later. ``keys`` are
    by age, roughly, and only of a share that has a limit."""

    def __init__(self, tenant: bytes) -> None:
        self.tenant = tenant
        self.num_pages = self.num_bytes = self.pinned_bytes = 0
        self.keys: dict[bytes, None] = {}


class PageIndex:
    """At most ``max_pages``, ``capacity_bytes``, and ``max_tenant_bytes`` for one tenant, if these
    are set; the oldest go first, but none that ``is_pinned``. Of two pages of one key the later
    counts."""

    def __init__(
        self,
        max_pages: int,
        capacity_bytes: int | None,
        max_tenant_bytes: int | None,
        is_pinned: Callable[[bytes], bool],
    ) -> None:
        self._max_pages = max_pages
        self._capacity_bytes = capacity_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._is_pinned = is_pinned
        self.num_pages_evicted = 0
        self._reset()

    def _reset(self) -> None:
        self._rows: dict[bytes, bytes] = {}  # by age, roughly
        self._parts: list[tuple[bytes, ...]] = []  # of the keys, as they were put
        self._latest: list[bytes] = []
        self._shares: list[_Share | None] = []  # None: dead
        self._free: list[int] = []  # dead ones without a row
        self._numbers: dict[bytes, int] = {}  # of the living ones, by tenant
        self._num_dead = 0  # rows of dead shares
        self.num_pages = self.stored_bytes = self.pinned_bytes = 0

    # ---- What there is ----

    def get(self, key: bytes) -> Held | None:
        row = self._rows.get(key)
        if row is None:
            return None
        held = Held(*_ROW.unpack(row))
        return None if self._shares[held.share] is None else held

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        if self._num_dead:
            return [self.get(key) is not None for key in keys]
        return [key in self._rows for key in keys]

    def num_leading(self, keys: Sequence[bytes]) -> int:
        held = self.holds(keys)
        return held.index(False) if False in held else len(keys)

    def some_keys(self, limit: int) -> list[bytes]:
        found: list[bytes] = []
        for key in self._rows:
            if len(found) == limit:
                break
            if not self._num_dead or self.get(key) is not None:
                found.append(key)
        return found

    def key_parts(self) -> tuple[tuple[bytes, ...], ...]:
        """Return all keys in parts, and some that are gone: of the table itself no part can be
        looked at."""
        self._seal()
        return tuple(self._parts)

    def replace_keys(self, parts: Sequence[object], keys: tuple[bytes, ...]) -> None:
        """Have parts that were returned be these, without what is gone and was not put again."""
        before = self._parts[: len(parts)]
        if [id(part) for part in before] == [id(part) for part in parts]:
            self._parts[: len(parts)] = [keys] if keys else []

    def _seal(self) -> None:
        if self._latest:
            self._parts.append(tuple(self._latest))
            self._latest.clear()

    def name_of(self, key: bytes, held: Held) -> PageName:
        share = self._shares[held.share]
        assert share is not None, "a row of a dead share was returned"
        return PageName(key, share.tenant, held.length, held.stamp, held.unix_s, held.checksum)

    def is_at(self, name: PageName) -> bool:
        """Return whether this is the object that a lookup finds."""
        held = self.get(name.key)
        return held is not None and self.name_of(name.key, held) == name

    @property
    def num_tenants(self) -> int:
        return len(self._numbers)

    def usage(self) -> list[TenantUsage]:
        shares = (share for share in self._shares if share is not None)
        return [TenantUsage(s.tenant, s.num_pages, s.num_bytes, s.num_bytes) for s in shares]

    def bytes_of(self, keys: Iterable[bytes]) -> int:
        return sum(held.stored for key in keys if (held := self.get(key)) is not None)

    # ---- Changes ----

    def put(self, name: PageName, stored: int, *, is_news: bool = True) -> None:
        """Enter a page that is in the bucket, unless a later one of its key is known. Without
        ``is_news`` none goes in the place of a younger one: it may have gone for that before."""
        known = self.get(name.key)
        if known is not None:
            if known.unix_s > name.unix_s:
                return
            self.drop(name.key)
        elif self._rows.pop(name.key, None) is not None:
            self._num_dead -= 1
        number = self._numbers.get(name.tenant)
        if known is None and not is_news and self._is_too_old(name, stored, number):
            return
        if number is None:
            if not self._free:
                self._free.append(len(self._shares))
                self._shares.append(None)
            number = self._numbers[name.tenant] = self._free.pop()
            self._shares[number] = _Share(name.tenant)
        share = self._shares[number]
        assert share is not None
        row = (number, name.unix_s, stored, name.length, name.checksum, name.stamp)
        self._rows[name.key] = _ROW.pack(*row)
        self._latest.append(name.key)
        if len(self._latest) >= _PART_KEYS:
            self._seal()
        self._count(share, 1, stored)
        self._count_pinned(share, stored if self._is_pinned(name.key) else 0)
        if self._max_tenant_bytes is not None and any(name.tenant):
            share.keys[name.key] = None
            self._evict_of_share(share, self._max_tenant_bytes)
        self._evict()

    def _is_too_old(self, name: PageName, stored: int, number: int | None) -> bool:
        """Return whether a page would have to go before any other of all, or of its tenant."""
        if self._is_pinned(name.key):
            return False
        if not self._has_room(1, stored) and name.unix_s < self._time_of(self._rows):
            return True
        limit, share = self._max_tenant_bytes, None if number is None else self._shares[number]
        is_over = share is not None and limit is not None and share.num_bytes + stored > limit
        return is_over and share is not None and name.unix_s < self._time_of(share.keys)

    def _time_of(self, keys: Iterable[bytes]) -> int:
        """Return the time of the first page of some; 0 where there is none."""
        key = next(iter(keys), None)
        return 0 if key is None else Held(*_ROW.unpack(self._rows[key])).unix_s

    def _has_room(self, num_pages: int = 0, num_bytes: int = 0) -> bool:
        capacity = self._capacity_bytes
        return self.num_pages + num_pages <= self._max_pages and (
            capacity is None or self.stored_bytes + num_bytes <= capacity
        )

    def _count(self, share: _Share, num_pages: int, num_bytes: int) -> None:
        share.num_pages += num_pages
        share.num_bytes += num_bytes
        self.num_pages += num_pages
        self.stored_bytes += num_bytes
        if not share.num_pages and (number := self._numbers.get(share.tenant)) is not None:
            self._kill(number)

    def count_pinned(self, keys: Iterable[bytes], sign: int) -> None:
        """Count pages that are pinned from now on (1), or no more (-1)."""
        for key in keys:
            held = self.get(key)
            if held is not None:
                share = self._shares[held.share]
                assert share is not None
                self._count_pinned(share, sign * held.stored)

    def _count_pinned(self, share: _Share, num_bytes: int) -> None:
        share.pinned_bytes += num_bytes
        self.pinned_bytes += num_bytes

    def _kill(self, number: int) -> None:
        share = self._shares[number]
        assert share is not None
        del self._numbers[share.tenant]
        self._shares[number] = None
        self._num_dead += share.num_pages
        if not share.num_pages:
            self._free.append(number)
        if not self._rows:
            self._reset()

    def drop(self, key: bytes) -> bool:
        """Forget a page; returns whether it was found."""
        held = self.get(key)
        if held is None:
            return False
        del self._rows[key]
        share = self._shares[held.share]
        assert share is not None
        share.keys.pop(key, None)
        self._count_pinned(share, -held.stored if self._is_pinned(key) else 0)
        self._count(share, -1, -held.stored)
        return True

    def drop_tenant(self, tenant: bytes) -> int:
        """Forget a tenant's pages at once; ``sweep`` gives their memory back."""
        number = self._numbers.get(tenant)
        if number is None:
            return 0
        share = self._shares[number]
        assert share is not None
        num_pages = share.num_pages
        self.num_pages -= num_pages
        self.stored_bytes -= share.num_bytes
        self.pinned_bytes -= share.pinned_bytes
        self._kill(number)
        return num_pages

    def clear(self) -> int:
        num_pages = self.num_pages
        self._reset()
        return num_pages

    def sweep(self, keys: Iterable[bytes]) -> bool:
        """Remove rows of dead shares among these; returns whether there are others."""
        if self._num_dead:
            for key in keys:
                row = self._rows.get(key)
                if row is not None and self._shares[_ROW.unpack(row)[0]] is None:
                    del self._rows[key]
                    self._num_dead -= 1
            if not self._rows:
                self._reset()
        return self._num_dead > 0

    def expire(self, oldest_s: float) -> bool:
        """Forget some of what was uploaded before that time; returns whether that is all."""
        return self._drop_oldest(lambda held: held.unix_s >= oldest_s)

    def _evict(self) -> None:
        if not self._has_room():
            num_before = self.num_pages
            self._drop_oldest(lambda _: self._has_room())  # or the next page has the rest go
            self.num_pages_evicted += num_before - self.num_pages

    def _drop_oldest(self, is_enough: Callable[[Held], bool]) -> bool:
        """Drop from the oldest on, at most some; returns whether it is enough. What is pinned goes
        to the end."""
        for _ in range(min(len(self._rows), MAX_STEPS)):
            if not self._rows:
                break
            key = next(iter(self._rows))
            held = Held(*_ROW.unpack(self._rows[key]))
            if self._shares[held.share] is None:
                self.sweep([key])
            elif is_enough(held):
                return True
            elif self._is_pinned(key):
                self._rows[key] = self._rows.pop(key)
            else:
                self.drop(key)
        return not self._rows

    def _evict_of_share(self, share: _Share, limit: int) -> None:
        """Drop the oldest of a share until it keeps its limit. What is pinned goes to the end."""
        for _ in range(min(len(share.keys), MAX_STEPS)):
            if share.num_bytes <= limit:
                return
            key = next(iter(share.keys))
            if self._is_pinned(key):
                share.keys[key] = share.keys.pop(key)
            else:
                self.num_pages_evicted += self.drop(key)

    def check_integrity(self) -> None:
        """Recount everything."""
        rows = [Held(*_ROW.unpack(row)) for row in self._rows.values()]
        living = [held for held in rows if self._shares[held.share] is not None]
        assert len(rows) - len(living) == self._num_dead, f"{self._num_dead} rows counted dead"
        counted = (self.num_pages, self.stored_bytes)
        found = (len(living), sum(held.stored for held in living))
        assert counted == found, f"pages and bytes {found}, counted {counted}"
        pinned = self.bytes_of(key for key in self._rows if self._is_pinned(key))
        assert pinned == self.pinned_bytes, f"{pinned} bytes pinned, {self.pinned_bytes} counted"
        usage = self.usage()
        shares = (sum(u.num_pages for u in usage), sum(u.stored_bytes for u in usage))
        assert shares == found, f"tenants have {shares} of {found}"
        parts = set(itertools.chain(self._latest, *self._parts))
        assert self._rows.keys() <= parts, "a row is in no part of the keys"
        keyed = {key for share in self._shares if share is not None for key in share.keys}
        assert keyed <= self._rows.keys(), "a share has keys without rows"

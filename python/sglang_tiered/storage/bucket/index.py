"""What is held: the pages that a bucket lists, in memory. No I/O.

A page takes about 200 bytes, and 100 more where tenants have a limit. These are its key, a row of
25 bytes, and their place in a table that the collector of garbage need not look into. Nothing here
locks: the owner's lock guards every call.
"""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, Any

from sglang_tiered.storage.bucket.names import PageName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


# Number of the share, time, length, stamp, checksum, mark of the last full listing that had begun.
_ROW = struct.Struct("<IIIIQB")
_SPARE_SHIFT = 10
MAX_STEPS = 1000
"""Pages that one call drops or finds pinned, as lookups wait for it."""


class _Share:
    """What one tenant has. One that was erased is dead, and its rows are swept later. ``keys`` are
    by age, roughly, and only of a share that has a limit. ``evicted_s``: the time of the youngest
    page that went for that."""

    __slots__ = (
        *("tenant", "number", "keys", "evicted_s"),
        *("num_pages", "num_bytes", "pinned_bytes"),
    )

    def __init__(self, tenant: bytes, number: int) -> None:
        self.tenant, self.number = tenant, number
        self.keys: dict[bytes, None] = {}
        self.evicted_s = self.num_pages = self.num_bytes = self.pinned_bytes = 0


class BucketIndex:
    """At most ``max_pages``, ``capacity_bytes``, and ``max_tenant_bytes`` for one tenant, if these
    are set; the oldest go first, but none that ``is_pinned``. Of two pages of one key the later
    counts."""

    _evicted_s: int
    num_dead: int

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
        self._numbers = itertools.count()
        self._mark = self.num_pages = 0
        self.clear()

    # ---- What there is ----

    def get(self, key: bytes) -> PageName | None:
        row = self._rows.get(key)
        if row is None:
            return None
        number, unix_s, length, stamp, checksum, _ = _ROW.unpack(row)
        share = self._shares.get(number)
        if share is None:
            return None
        return PageName(key, share.tenant, length, stamp, unix_s, checksum)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        if self.num_dead:
            return [self.get(key) is not None for key in keys]
        return [key in self._rows for key in keys]

    def keys(self) -> list[bytes]:
        """Return all keys, those of dead rows too. Of the table itself no part can be looked at: a
        copy of a million takes some ten milliseconds."""
        return list(self._rows)

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def bytes_of(self, keys: Iterable[bytes]) -> int:
        return sum(held.length for key in keys if (held := self.get(key)) is not None)

    # ---- Changes ----

    def begin_listing(self) -> None:
        """From now on note which pages are put: ``sweep`` tells them from the others."""
        self._mark = (self._mark + 1) % 256

    def put(self, name: PageName, *, is_listed: bool = False) -> None:
        """Enter a page that is in the bucket, unless a later one of its key is known. None that is
        listed goes in the place of a younger one: it may have gone for that before."""
        known = self.get(name.key)
        if known == name:
            self._rows[name.key] = self._rows[name.key][:-1] + bytes([self._mark])
            return
        if known is not None:
            if known.unix_s > name.unix_s:
                return
            self.drop(name.key)
        elif self._rows.pop(name.key, None) is not None:
            self.num_dead -= 1
        share = self._tenants.get(name.tenant)
        if known is None and is_listed and self._is_too_old(name, share):
            return
        if share is None:
            share = self._tenants[name.tenant] = _Share(name.tenant, next(self._numbers))
            self._shares[share.number] = share
        self._rows[name.key] = _ROW.pack(
            share.number, name.unix_s, name.length, name.stamp, name.checksum, self._mark
        )
        self._count(share, 1, name.length)
        self._count_pinned(share, name.length if self._is_pinned(name.key) else 0)
        limit, num_before = self._max_tenant_bytes, self.num_pages
        if limit is not None and any(name.tenant):
            share.keys[name.key] = None
            if share.num_bytes > limit:
                enough = limit - (limit >> _SPARE_SHIFT)
                evicted_s = self._evict(share.keys, lambda _: share.num_bytes <= enough)
                share.evicted_s = max(share.evicted_s, evicted_s)
        if not self._has_room():
            evicted_s = self._evict(self._rows, lambda _: self._has_room(spare=True))
            self._evicted_s = max(self._evicted_s, evicted_s)
        self.num_pages_evicted += num_before - self.num_pages

    def _is_too_old(self, name: PageName, share: _Share | None) -> bool:
        """Return whether a page would have to go before any other of all, or of its tenant."""
        if self._is_pinned(name.key):
            return False
        if name.unix_s <= self._evicted_s and not self._has_room(1, name.length, spare=True):
            return True
        if share is None or self._max_tenant_bytes is None:
            return False
        limit = self._max_tenant_bytes - (self._max_tenant_bytes >> _SPARE_SHIFT)
        return name.unix_s <= share.evicted_s and share.num_bytes + name.length > limit

    def _has_room(self, num_pages: int = 0, num_bytes: int = 0, *, spare: bool = False) -> bool:
        """``spare``: and for some more. So many go at once: each look for the oldest passes over
        the places of all that went before."""
        capacity = self._capacity_bytes
        if spare:
            num_pages += self._max_pages >> _SPARE_SHIFT
            num_bytes += (capacity or 0) >> _SPARE_SHIFT
        return self.num_pages + num_pages <= self._max_pages and (
            capacity is None or self.stored_bytes + num_bytes <= capacity
        )

    def _count(self, share: _Share, num_pages: int, num_bytes: int) -> None:
        share.num_pages += num_pages
        share.num_bytes += num_bytes
        self.num_pages += num_pages
        self.stored_bytes += num_bytes
        if not share.num_pages:
            self._kill(share)

    def count_pinned(self, keys: Iterable[bytes], sign: int) -> None:
        """Count pages that are pinned from now on (1), or no more (-1)."""
        for key in keys:
            held = self.get(key)
            if held is not None:
                self._count_pinned(self._tenants[held.tenant], sign * held.length)

    def _count_pinned(self, share: _Share, num_bytes: int) -> None:
        share.pinned_bytes += num_bytes
        self.pinned_bytes += num_bytes

    def _kill(self, share: _Share) -> None:
        del self._tenants[share.tenant], self._shares[share.number]
        self.num_dead += share.num_pages

    def drop(self, key: bytes) -> bool:
        """Forget a page; returns whether it was found."""
        held = self.get(key)
        if held is None:
            return False
        del self._rows[key]
        share = self._tenants[held.tenant]
        share.keys.pop(key, None)
        self._count_pinned(share, -held.length if self._is_pinned(key) else 0)
        self._count(share, -1, -held.length)
        return True

    def drop_tenant(self, tenant: bytes) -> int:
        """Forget a tenant's pages at once; ``sweep`` gives their memory back."""
        share = self._tenants.get(tenant)
        if share is None:
            return 0
        self.num_pages -= share.num_pages
        self.stored_bytes -= share.num_bytes
        self.pinned_bytes -= share.pinned_bytes
        self._kill(share)
        return share.num_pages

    def clear(self) -> int:
        """Forget all; returns how many."""
        num_pages = self.num_pages
        self._rows: dict[bytes, bytes] = {}  # by age, roughly
        self._shares: dict[int, _Share] = {}  # the living, by number
        self._tenants: dict[bytes, _Share] = {}  # the same
        self._evicted_s = 0  # the time of the youngest page that went for others
        self.num_dead = 0  # rows of dead shares
        self.num_pages = self.stored_bytes = self.pinned_bytes = 0
        return num_pages

    def sweep(self, keys: Iterable[bytes], *, unseen: bool = False) -> None:
        """Remove rows of dead shares among these, and with ``unseen`` pages that were not put since
        ``begin_listing``."""
        for key in keys:
            row = self._rows.get(key)
            if row is None:
                continue
            if _ROW.unpack(row)[0] not in self._shares:
                del self._rows[key]
                self.num_dead -= 1
            elif unseen and row[-1] != self._mark:
                self.drop(key)

    def expire(self, oldest_s: float) -> bool:
        """Forget some of what was uploaded before that time; returns whether any was."""
        num_before = self.num_pages
        evicted_s = self._evict(self._rows, lambda held: held.unix_s >= oldest_s)
        self._evicted_s = max(self._evicted_s, evicted_s)
        return self.num_pages < num_before

    def _evict(self, keys: dict[bytes, Any], is_enough: Callable[[PageName], bool]) -> int:
        """Drop from the oldest of these on, at most some; returns the time of the youngest that
        went. What is pinned goes to the end."""
        evicted_s = 0
        for key in list(itertools.islice(keys, MAX_STEPS)):
            held = self.get(key)
            if held is None:
                self.sweep([key])
            elif is_enough(held):
                break
            elif self._is_pinned(key):
                keys[key] = keys.pop(key)
            else:
                evicted_s = max(evicted_s, held.unix_s)
                self.drop(key)
        return evicted_s

    def check_integrity(self) -> None:
        """Recount everything."""
        living = [held for key in self._rows if (held := self.get(key)) is not None]
        num_dead = len(self._rows) - len(living)
        assert num_dead == self.num_dead, f"{num_dead} rows are dead, {self.num_dead} counted"
        counted = (self.num_pages, self.stored_bytes)
        found = (len(living), sum(held.length for held in living))
        assert counted == found, f"pages and bytes {found}, counted {counted}"
        pinned = self.bytes_of(key for key in self._rows if self._is_pinned(key))
        assert pinned == self.pinned_bytes, f"{pinned} bytes pinned, {self.pinned_bytes} counted"
        shares = self._tenants.values()
        theirs = (sum(each.num_pages for each in shares), sum(each.num_bytes for each in shares))
        assert theirs == found, f"tenants have {theirs} of {found}"
        assert {id(s) for s in self._shares.values()} == {id(s) for s in self._tenants.values()}
        keyed = {key for share in self._shares.values() for key in share.keys}
        assert keyed <= self._rows.keys(), "a share has keys without rows"

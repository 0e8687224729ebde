"""What is held where: the page table of the region log over the objects that are known. No I/O.

A page takes 65 bytes of columns and 8 to 16 of hash table, an object some 500 bytes beside them.
Nothing here locks: the owner's lock guards every call.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered.storage.base import TenantUsage
from sglang_tiered.storage.object.format import NO_CODEC
from sglang_tiered.storage.region.index import PageIndex, key_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from sglang_tiered.storage.object.format import Manifest

__all__ = ["HeldObject", "ObjectIndex", "Place"]

_PAGES_PER_OBJECT = 16  # an object may hold so few before objects, not pages, are the bound
_MIN_OBJECTS = 1024
_MAX_FLOORS = 4096


class HeldObject(NamedTuple):
    """An object whose manifest is known."""

    name: str
    slot: int
    tenant: bytes
    page_bytes: int  # length of every page; 0 where bytes are stored as they are
    object_bytes: int


class Place(NamedTuple):
    """Where a page is."""

    position: int  # of the page within the run that asked
    held: HeldObject
    offset: int
    stored: int
    checksum: int

    @property
    def length(self) -> int:
        """Return the length of the page, decoded."""
        return self.held.page_bytes or self.stored


class ObjectIndex:
    """At most ``max_pages``, ``capacity_bytes`` of objects and ``max_tenant_bytes`` of them for
    one tenant; the oldest objects go first. Where two objects hold a key, the younger counts."""

    def __init__(
        self, max_pages: int, capacity_bytes: int | None, max_tenant_bytes: int | None
    ) -> None:
        self._max_pages = max_pages
        self._max_objects = max(max_pages // _PAGES_PER_OBJECT, _MIN_OBJECTS)
        self._capacity_bytes = capacity_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self.num_pages_evicted = 0
        self._reset()

    def _reset(self) -> None:
        self._pages = PageIndex(block_bytes=1)
        self._objects: dict[str, HeldObject] = {}
        self._slots: list[HeldObject | None] = []
        self._free_slots: list[int] = []
        self._hidden_slots: list[int] = []  # of erased objects whose rows are not swept yet
        self._ages: list[str] = []  # heap of names, oldest first; may name what is gone
        self._tenants: dict[bytes, set[str]] = {}
        self._tenant_bytes: dict[bytes, int] = {}
        self._floors: dict[str, str] = {}  # by tenant tag: up to which name its share evicted
        self.pinned: set[str] = set()  # objects that stay, whatever their age
        self._is_full = False  # something was evicted and nothing much was forgotten since
        self.object_bytes = 0

    # ---- What there is ----

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, name: str) -> bool:
        return name in self._objects

    @property
    def num_objects(self) -> int:
        return len(self._objects)

    @property
    def max_objects(self) -> int:
        return self._max_objects

    @property
    def stored_bytes(self) -> int:
        return self._pages.stored_bytes

    @property
    def num_tenants(self) -> int:
        return self._pages.num_tenants

    def names(self) -> list[str]:
        return list(self._objects)

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are held."""
        return self._pages.num_leading(keys)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = (self._pages.find(key_words(keys)) >= 0).tolist() if keys else []
        return found

    def some_keys(self, limit: int) -> list[bytes]:
        """Return at most ``limit`` keys, of one object if it has as many."""
        rows = self._pages.some_rows(limit + 1024)
        keys = self._pages.keys(rows)
        held = self.holds(keys)
        return [key for key, is_held in zip(keys, held, strict=True) if is_held][:limit]

    def find(self, keys: Sequence[bytes]) -> list[Place]:
        """Return the places of those keys that are held."""
        rows = self._pages.find(key_words(keys))
        positions = np.flatnonzero(rows >= 0)
        places = self._pages.places(rows[positions])
        found = []
        for position, slot, offset, stored, checksum in zip(
            positions.tolist(), *places, strict=True
        ):
            held = self._slots[slot]
            assert held is not None, f"a page points to the free slot {slot}"
            found.append(Place(position, held, offset, stored, checksum))
        return found

    def newest_ms(self, tenant: bytes | None) -> int:
        """Return when a tenant's (None: the) youngest object was opened; 0 without one."""
        names = self._objects if tenant is None else self._tenants.get(tenant, ())
        return int(max(names, default="0")[:12], 16)

    def usage(self) -> list[TenantUsage]:
        """Return every tenant that has pages."""
        held = self._pages.usage()
        return [
            TenantUsage(tenant, *held.get(tenant, (0, 0)), size)
            for tenant, size in self._tenant_bytes.items()
        ]

    # ---- Changes ----

    def accepts(self, name: str, may_be_pinned: bool = False) -> bool:
        """Return whether to learn of this object: not when it would be the next to be evicted,
        unless it may be pinned."""
        if name in self._objects:
            return False
        if may_be_pinned:
            return True
        if name <= self._floors.get(name[-8:], ""):
            return False
        return not self._is_full or name > self._oldest()

    def put(self, manifest: Manifest, dead: npt.NDArray[np.bool_] | None = None) -> None:
        """Point to the pages of an object, but for the dead ones, and drop the oldest objects
        beyond the bounds."""
        name = str(manifest.object_id)
        if name in self._objects:
            return
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        if slot == len(self._slots):
            self._slots.append(None)
        encoded = manifest.codec != NO_CODEC
        size = manifest.object_bytes
        held = HeldObject(
            name, slot, manifest.tenant, (manifest.page_bytes or 0) if encoded else 0, size
        )
        pages = manifest.pages
        words = np.ascontiguousarray(pages["key"]).view("<u8").reshape(-1, 4)
        fresh = self._not_in_younger(words, name)
        if dead is not None:
            fresh &= ~dead
        words, pages = words[fresh], pages[fresh]
        self._slots[slot] = self._objects[name] = held
        if len(pages):
            self._pages.put(
                words,
                slot,
                pages["offset"].astype(np.int64),
                pages["stored"],
                pages["checksum"],
                self._pages.place_of(manifest.tenant),
            )
        heapq.heappush(self._ages, name)
        self._tenants.setdefault(manifest.tenant, set()).add(name)
        self._tenant_bytes[manifest.tenant] = self._tenant_bytes.get(manifest.tenant, 0) + size
        self.object_bytes += size
        self._evict(manifest.tenant)

    def _not_in_younger(self, words: npt.NDArray[np.uint64], name: str) -> npt.NDArray[np.bool_]:
        """Return which keys no object with a greater name holds."""
        rows = self._pages.find(words)
        fresh = rows < 0
        known = np.flatnonzero(~fresh)
        for position, slot in zip(
            known.tolist(), self._pages.places(rows[known]).slots, strict=True
        ):
            other = self._slots[slot]
            fresh[position] = other is None or other.name < name
        return fresh

    def drop_page(self, key: bytes, place: Place) -> None:
        """Forget a page if it is still known to be there."""
        if self._slots[place.held.slot] is place.held:
            self._pages.drop(key, place.held.slot, place.offset)

    def bytes_of(self, names: Iterable[str]) -> int:
        """Return the bytes of those of these objects that are known."""
        held = (self._objects.get(name) for name in names)
        return sum(each.object_bytes for each in held if each is not None)

    def names_of(self, keys: Sequence[bytes]) -> set[str]:
        """Return the objects that these pages would be read from."""
        return {place.held.name for place in self.find(keys)}

    def drop_pages(self, keys: Sequence[bytes], bound_ms: int) -> int:
        """Forget pages, each key once, where they are in objects that were opened up to then;
        returns how many went."""
        behind = f"{bound_ms + 1:012x}"
        gone = [keys[p.position] for p in self.find(keys) if p.held.name < behind]
        return self._pages.discard(key_words(gone)) if gone else 0

    def drop_objects(self, names: Iterable[str]) -> int:
        """Forget objects; returns how many pages that could be hit went."""
        gone = [held for name in names if (held := self._objects.get(name)) is not None]
        if not gone:
            return 0
        num_pages = self._pages.drop_regions([held.slot for held in gone])
        for held in gone:
            self._unlist(held)
            self._free_slots.append(held.slot)
        if len(self._ages) > 2 * len(self._objects) + 64:
            self._ages = sorted(self._objects)
        if num_pages > self._max_pages // 8:
            self._is_full = False
        return num_pages

    def drop_tenant(self, tenant: bytes) -> int:
        """Hide a tenant's pages, in no time that grows with them, until ``sweep`` has removed
        them; returns how many could be hit."""
        for name in list(self._tenants.get(tenant, ())):
            held = self._objects[name]
            self._unlist(held)
            self._hidden_slots.append(held.slot)
        self._is_full = False
        num_pages = self._pages.drop_tenant(tenant)
        self.sweep(0)  # done with, if there was nothing
        return num_pages

    def drop_before(self, tenant: bytes | None, bound_ms: int) -> int:
        """Drop a tenant's objects (None: everyone's) that were opened up to then; returns how
        many pages that could be hit went."""
        names = self._objects if tenant is None else self._tenants.get(tenant, set())
        behind = f"{bound_ms + 1:012x}"
        gone = [name for name in names if name < behind]
        if tenant is not None and gone and len(gone) == len(names):
            return self.drop_tenant(tenant)
        return self.drop_objects(gone)

    def sweep(self, max_rows: int) -> bool:
        """Look at some rows and remove the erased; true when all are removed."""
        if not self._pages.sweep(max_rows):
            return False
        self._free_slots += self._hidden_slots
        self._hidden_slots.clear()
        return True

    def clear(self) -> int:
        """Forget everything; returns how many pages could be hit."""
        num_pages = len(self._pages)
        self._reset()
        return num_pages

    def expired(self, before: str) -> list[str]:
        """Return the objects with lesser names, which are older, but for the pinned ones."""
        found, pinned = [], []
        while self._ages and self._ages[0] < before:
            name = heapq.heappop(self._ages)
            if name in self.pinned:
                pinned.append(name)
            elif name in self._objects:
                found.append(name)
        for name in pinned:
            heapq.heappush(self._ages, name)
        return found

    def _unlist(self, held: HeldObject) -> None:
        del self._objects[held.name]
        self._slots[held.slot] = None
        self.object_bytes -= held.object_bytes
        self._tenant_bytes[held.tenant] -= held.object_bytes
        names = self._tenants[held.tenant]
        names.discard(held.name)
        if not names:
            del self._tenants[held.tenant], self._tenant_bytes[held.tenant]

    def _oldest(self) -> str:
        while self._ages and self._ages[0] not in self._objects:
            heapq.heappop(self._ages)
        return self._ages[0] if self._ages else ""

    def _evict(self, tenant: bytes) -> None:
        """Forget the oldest objects some at a time, as each time is a pass over the index."""
        gone: list[str] = []
        own = self._tenant_bytes[tenant]
        if self._max_tenant_bytes is not None and any(tenant) and own > self._max_tenant_bytes:
            for name in sorted(self._tenants[tenant] - self.pinned):
                gone.append(name)
                own -= self._objects[name].object_bytes
                if own <= self._max_tenant_bytes:
                    break
            self.num_pages_evicted += self.drop_objects(gone)
            if len(self._floors) >= _MAX_FLOORS:
                self._floors.clear()
            if gone:
                self._floors[gone[-1][-8:]] = gone[-1]
        num_pages, num_objects, size = len(self._pages), len(self._objects), self.object_bytes
        capacity = float("inf") if self._capacity_bytes is None else self._capacity_bytes
        if num_pages <= self._max_pages and num_objects <= self._max_objects and size <= capacity:
            return
        max_pages = self._max_pages - self._max_pages // 64
        max_objects = self._max_objects - self._max_objects // 64
        gone = []
        pinned: list[str] = []
        while num_pages > max_pages or num_objects > max_objects or size > capacity:
            name = self._oldest()
            if not name:  # memory is bounded, whatever is pinned
                if num_pages <= max_pages and num_objects <= max_objects:
                    break
                name = pinned.pop(0)
                heapq.heappush(self._ages, name)
            elif name in self.pinned:
                pinned.append(heapq.heappop(self._ages))
                continue
            held = self._objects[name]
            heapq.heappop(self._ages)
            gone.append(name)
            num_pages -= self._pages.num_live(held.slot)
            num_objects -= 1
            size -= held.object_bytes
        for name in pinned:
            heapq.heappush(self._ages, name)
        self.num_pages_evicted += self.drop_objects(gone)
        self._is_full = True

    def check_integrity(self) -> None:
        """Recount everything."""
        hidden = dict.fromkeys(self._hidden_slots, 1 << 40)
        sizes = {held.slot: held.object_bytes for held in self._objects.values()}
        self._pages.check_integrity(sizes | hidden)
        total = sum(sizes.values())
        assert total == self.object_bytes, f"objects of {total}, counted {self.object_bytes}"
        counted = sum(self._tenant_bytes.values())
        assert counted == total, f"tenants have {counted} of {total} bytes"
        slots = sorted([*sizes, *self._hidden_slots, *self._free_slots])
        assert slots == list(range(len(self._slots))), f"slots {slots} of {len(self._slots)}"
        for held in self._objects.values():
            assert self._slots[held.slot] is held, f"{held.name} is not in its slot"
        missing = self._objects.keys() - set(self._ages)
        assert not missing, f"objects without an age: {sorted(missing)}"
        assert len(self._pages) <= self._max_pages, f"{len(self._pages)} > {self._max_pages}"

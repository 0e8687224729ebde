"""In memory: the regions of the log, the tenants of its pages, and the bytes they take. No I/O.

Nothing here locks: the owner's lock guards every call.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.storage.region.format import region_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from sglang_tiered.storage.region.format import Extent


@dataclass(eq=False, slots=True)
class Region:
    """One region file. ``fd`` stays open until the region is retired and no thread pins it."""

    sequence: int
    fd: int
    nbytes: int
    nonce: bytes
    slot: int = -1  # its place in the table; an index entry names its region by it
    tail: int = 0  # where the next extent goes; block-aligned
    sealed: bool = False  # takes no more extents
    extents: list[Extent] = field(default_factory=list)  # for the footer; emptied by sealing
    num_writing: int = 0  # extents placed and not yet published or failed
    has_name: bool = False  # one that survives loss of power, as what was synced then does
    dirty: bool = False  # published since the last sync
    suspect: bool = False  # a sync failed: what it covered may be lost, whatever the next says
    pins: int = 0
    syncing: bool = False  # one of the pins is the syncer's
    retired: bool = False
    num_foreign: int = 0  # pages that no lookup finds now, but another namespace may later
    tenant_bytes: dict[bytes, int] = field(default_factory=dict)  # payload placed, with padding
    unread: set[bytes] = field(default_factory=set)  # pinned pages whose read failed; hidden
    used_s: float = 0.0  # when a page of it was last of use, or it was made or opened
    kept: bool = False  # not all of it could be read when it was opened: it does not go

    @property
    def name(self) -> str:
        return region_name(self.sequence)


class RegionTable:
    """The regions that exist, and the bytes they take on the disk.

    ``physical_bytes`` also counts room reserved for a region about to be created, and files that
    cannot be read. It counts regions already unlinked that a thread still holds open: the disk has
    not got those back yet.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._regions: dict[int, Region] = {}  # by sequence, the oldest first
        self._slots: list[Region | None] = []
        self.physical_bytes = 0
        self.retiring_bytes = 0
        self.aside_bytes = 0  # of files that cannot be read: neither served nor removed
        self.tenant_bytes: Counter[bytes] = Counter()  # the regions' together

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    def __len__(self) -> int:
        return len(self._regions)

    def at(self, slot: int) -> Region:
        region = self._slots[slot]
        assert region is not None, f"region slot {slot} is not in use"
        return region

    def without(self, live: npt.NDArray[np.int64]) -> list[Region]:
        """Return the regions that no page is in, the oldest first; ``live`` counts the pages by
        slot."""
        counts = np.zeros(len(self._slots), np.int64)
        counts[: len(live)] = live[: len(counts)]
        found = (self._slots[slot] for slot in np.flatnonzero(counts == 0))
        return sorted(filter(None, found), key=lambda region: region.sequence)

    def add(self, region: Region) -> None:
        """Adopt a region whose bytes were reserved before, and give it a slot."""
        assert region.sequence not in self._regions, f"{region.name} is there twice"
        region.used_s = self.clock()
        self._regions[region.sequence] = region
        if None in self._slots:
            region.slot = self._slots.index(None)
            self._slots[region.slot] = region
        else:
            region.slot = len(self._slots)
            self._slots.append(region)

    def charge(self, region: Region, tenant: bytes, nbytes: int) -> None:
        """Count payload of a tenant in a region; negative where its place is taken back."""
        for books in (region.tenant_bytes, self.tenant_bytes):
            books[tenant] = books.get(tenant, 0) + nbytes
            if not books[tenant]:
                del books[tenant]

    def reserve(self, nbytes: int) -> None:
        """Count room for a region to come; negative where it does not come."""
        self.physical_bytes += nbytes

    def pin(self, region: Region) -> None:
        """Keep the region's descriptor open until the matching ``unpin``."""
        assert not region.retired, f"{region.name} is retired"
        region.pins += 1

    def unpin(self, region: Region) -> bool:
        """Release a pin; true when this was the last one of a retired region: the caller closes its
        descriptor, then calls ``closed``."""
        region.pins -= 1
        return region.retired and region.pins == 0

    def retire(self, region: Region) -> bool:
        """Take the region out of service; its file is gone and no index entry names its slot.
        Returns what ``unpin`` returns."""
        del self._regions[region.sequence]
        self._slots[region.slot] = None
        for tenant, nbytes in list(region.tenant_bytes.items()):
            self.charge(region, tenant, -nbytes)
        region.retired = True
        self.retiring_bytes += region.nbytes
        return region.pins == 0

    def closed(self, region: Region) -> None:
        self.retiring_bytes -= region.nbytes
        self.physical_bytes -= region.nbytes

    def check_integrity(self, *, idle: bool) -> None:
        taken = sum(region.nbytes for region in self) + self.aside_bytes
        assert self.physical_bytes >= taken + self.retiring_bytes, (
            f"physical {self.physical_bytes} < regions {taken} + retiring {self.retiring_bytes}"
        )
        for region in self:
            assert self.at(region.slot) is region, f"{region.name} is not in slot {region.slot}"
            assert region.sealed or 0 < region.tail <= region.nbytes, (
                f"{region.name}: tail {region.tail} of {region.nbytes}"
            )
        assert sorted(self._regions) == list(self._regions), "regions are not in order"
        charged: Counter[bytes] = Counter()
        for region in self:
            charged.update(region.tenant_bytes)
        assert charged == self.tenant_bytes, "the bytes of the tenants do not add up"
        if idle:
            assert self.physical_bytes == taken, f"physical {self.physical_bytes}, regions {taken}"
            pinned = [region.name for region in self if region.pins or region.num_writing]
            assert not pinned, f"pinned while idle: {pinned}"


class TenantTable:
    """Pages and payload bytes by tenant. An erased tenant's place is *dead* until its last page is
    taken out; the same tenant may have another place meanwhile."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._names: list[bytes] = []  # by place, as the three below
        self._pages = np.zeros(64, np.int64)
        self._bytes = np.zeros(64, np.int64)
        self._dead = np.zeros(64, np.bool_)
        self._num_dead = 0
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._places)

    @property
    def any_dead(self) -> bool:
        return self._num_dead > 0

    def dead_totals(self) -> tuple[int, int]:
        """Return the pages and bytes that are counted and that no lookup may find."""
        return int(self._pages[self._dead].sum()), int(self._bytes[self._dead].sum())

    def usage(self) -> dict[bytes, tuple[int, int]]:
        """Return the pages and bytes of every tenant that has any."""
        pages, sizes = self._pages.tolist(), self._bytes.tolist()
        return {name: (pages[place], sizes[place]) for name, place in self._places.items()}

    def names(self, places: npt.NDArray[np.int32]) -> list[bytes]:
        return [self._names[place] for place in places.tolist()]

    def place_of(self, tenant: bytes) -> int:
        """Return the place of a tenant, of which a page must then be added."""
        place = self._places.get(tenant)
        if place is not None:
            return place
        if self._free:
            place = self._free.pop()
            self._names[place] = tenant
        else:
            place = len(self._names)
            self._names.append(tenant)
            if place == len(self._pages):
                self._pages = np.concatenate([self._pages, np.zeros_like(self._pages)])
                self._bytes = np.concatenate([self._bytes, np.zeros_like(self._bytes)])
                self._dead = np.concatenate([self._dead, np.zeros_like(self._dead)])
        self._places[tenant] = place
        return place

    def add(self, places: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> None:
        np.add.at(self._pages, places, 1)
        np.add.at(self._bytes, places, lengths)

    def remove(self, places: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> None:
        """Take pages out; ``free_empty`` must follow, when what replaces them is added."""
        np.subtract.at(self._pages, places, 1)
        np.subtract.at(self._bytes, places, lengths)

    def free_empty(self, places: npt.NDArray[np.int32]) -> None:
        """Forget those of these tenants that have no pages left."""
        for place in np.unique(places[self._pages[places] == 0]).tolist():
            if self._dead[place]:
                self._dead[place] = False
                self._num_dead -= 1
            else:
                del self._places[self._names[place]]
            self._free.append(place)

    def drop(self, tenant: bytes) -> int:
        """Hide all pages of a tenant, whose place is dead; returns how many. Pages of it that come
        from now on have another place."""
        place = self._places.pop(tenant, None)
        if place is None:
            return 0
        self._dead[place] = True
        self._num_dead += 1
        return int(self._pages[place])

    def is_dead(self, places: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        dead: npt.NDArray[np.bool_] = self._dead[places]
        return dead

    def check_integrity(self, owners: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        """Recount everything; ``owners`` and ``lengths`` are those of all rows in use."""
        num_places = len(self._names)
        pages = np.bincount(owners, minlength=num_places)
        sizes = np.bincount(owners, lengths, minlength=num_places)
        assert self._dead.sum() == self._num_dead, f"{self._num_dead} places counted dead"
        for place, name in enumerate(self._names):
            counted = int(self._pages[place]), int(self._bytes[place])
            assert (pages[place], sizes[place]) == counted, f"tenant {name.hex()}: {pages[place]}"
            used = self._places.get(name) == place or bool(self._dead[place])
            assert used == (counted[0] > 0), f"tenant {name.hex()} has {counted[0]} pages"
            assert used != (place in self._free), f"the place of tenant {name.hex()}"

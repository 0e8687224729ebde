"""``TenantTable``: pages and payload bytes by tenant, of which some are dead. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["TenantTable"]


class TenantTable:
    """Pages and payload bytes by tenant. An erased tenant's place is *dead* until its last page is
    taken out; the same tenant may have another place meanwhile."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._names: list[bytes] = []  # by place, as the two below
        self._pages = np.zeros(64, np.int64)
        self._bytes = np.zeros(64, np.int64)
        self._free: list[int] = []
        self._dead: set[int] = set()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def any_dead(self) -> bool:
        return bool(self._dead)

    def dead_totals(self) -> tuple[int, int]:
        """Return the pages and bytes that are counted and that no lookup may find."""
        dead = list(self._dead)
        return int(self._pages[dead].sum()), int(self._bytes[dead].sum())

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
            if place in self._dead:
                self._dead.discard(place)
            else:
                del self._places[self._names[place]]
            self._free.append(place)

    def drop(self, tenant: bytes) -> int:
        """Declare the tenant's place dead; returns the pages in it."""
        place = self._places.pop(tenant, None)
        if place is None:
            return 0
        self._dead.add(place)
        return int(self._pages[place])

    def is_dead(self, places: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        return np.isin(places, list(self._dead))

    def check_integrity(self, owners: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        """Recount everything; ``owners`` and ``lengths`` are those of all rows in use."""
        num_places = len(self._names)
        pages = np.bincount(owners, minlength=num_places)
        sizes = np.bincount(owners, lengths, minlength=num_places)
        for place, name in enumerate(self._names):
            counted = int(self._pages[place]), int(self._bytes[place])
            assert (pages[place], sizes[place]) == counted, f"tenant {name.hex()}: {pages[place]}"
            used = self._places.get(name) == place or place in self._dead
            assert used == (counted[0] > 0), f"tenant {name.hex()} has {counted[0]} pages"
            assert used != (place in self._free), f"the place of tenant {name.hex()}"

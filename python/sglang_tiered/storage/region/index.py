"""In memory: which region holds a key, and the regions themselves. No I/O.

Nothing here locks: the owner's lock guards every call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.region.format import region_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_tiered.storage.region.format import Extent

__all__ = ["Entry", "Index", "Region", "RegionTable"]


@dataclass(eq=False, slots=True)
class Region:
    """One region file. ``fd`` stays open until the region is retired and nobody pins it."""

    sequence: int
    fd: int
    nbytes: int
    nonce: bytes
    tail: int = 0  # where the next extent goes; block-aligned
    sealed: bool = False
    extents: list[Extent] = field(default_factory=list)  # for the footer; emptied by sealing
    keys: list[bytes] = field(default_factory=list)  # every key ever indexed here
    num_live: int = 0  # index entries that point here
    last_hit: int = -1
    pins: int = 0
    retired: bool = False
    corruption_reported: bool = False

    @property
    def name(self) -> str:
        return region_name(self.sequence)


class Entry(NamedTuple):
    """Where the bytes of one page are, and what they must hash to."""

    region: Region
    offset: int
    length: int
    checksum: int


class Index:
    """key -> entry, with the live count of every region kept in step."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self.stored_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def put(self, key: bytes, entry: Entry) -> None:
        """Point ``key`` at ``entry``, whatever it pointed at before."""
        old = self._entries.get(key)
        if old is not None:
            self._forget(old)
        self._entries[key] = entry
        entry.region.keys.append(key)
        entry.region.num_live += 1
        self.stored_bytes += entry.length

    def drop(self, key: bytes, entry: Entry) -> None:
        """Forget ``key`` if it still points at ``entry``."""
        if self._entries.get(key) is entry:
            del self._entries[key]
            self._forget(entry)

    def drop_region(self, region: Region) -> int:
        """Forget every key that still points into the region; returns how many."""
        dropped = region.num_live
        for key in region.keys:
            entry = self._entries.get(key)
            if entry is not None and entry.region is region:
                del self._entries[key]
                self._forget(entry)
        region.keys.clear()
        return dropped

    def clear(self) -> None:
        for entry in self._entries.values():
            entry.region.num_live = 0
            entry.region.keys.clear()
        self._entries.clear()
        self.stored_bytes = 0

    def _forget(self, entry: Entry) -> None:
        entry.region.num_live -= 1
        self.stored_bytes -= entry.length

    def check_integrity(self, regions: RegionTable) -> None:
        """Recount everything from the entries; linear in the number of pages."""
        live: dict[int, int] = {}
        stored = 0
        for entry in self._entries.values():
            assert entry.region in regions, f"an entry points into retired {entry.region.name}"
            end = entry.offset + entry.length
            assert end <= entry.region.nbytes, f"an entry ends at {end} in {entry.region.name}"
            live[entry.region.sequence] = live.get(entry.region.sequence, 0) + 1
            stored += entry.length
        assert stored == self.stored_bytes, f"entries hold {stored}, counted {self.stored_bytes}"
        for region in regions:
            found = live.get(region.sequence, 0)
            assert found == region.num_live, (
                f"{region.name}: {found} entries, num_live {region.num_live}"
            )


class RegionTable:
    """The regions that exist, and the bytes they take on the disk.

    ``physical_bytes`` also counts room reserved for a region about to be created and regions
    already unlinked that a reader still holds open: the disk has not got those back yet.
    """

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        self.physical_bytes = 0
        self.retiring_bytes = 0
        self._hits = 0

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    def __len__(self) -> int:
        return len(self._regions)

    def __contains__(self, region: Region) -> bool:
        return self._regions.get(region.sequence) is region

    def add(self, region: Region) -> None:
        """Adopt a region whose bytes were reserved before."""
        assert region.sequence not in self._regions, f"{region.name} is there twice"
        self._regions[region.sequence] = region

    def reserve(self, nbytes: int) -> None:
        self.physical_bytes += nbytes

    def unreserve(self, nbytes: int) -> None:
        self.physical_bytes -= nbytes

    def touch(self, region: Region) -> None:
        self._hits += 1
        region.last_hit = self._hits

    def pin(self, region: Region) -> None:
        """Keep the region's descriptor open until the matching ``unpin``."""
        assert not region.retired, f"{region.name} is retired"
        region.pins += 1

    def unpin(self, region: Region) -> bool:
        """True when this was the last pin of a retired region: the caller closes its descriptor,
        then calls ``closed``."""
        region.pins -= 1
        return region.retired and region.pins == 0

    def retire(self, region: Region) -> bool:
        """Take the region out of service; its file is gone. Returns what ``unpin`` returns."""
        del self._regions[region.sequence]
        region.retired = True
        self.retiring_bytes += region.nbytes
        return region.pins == 0

    def closed(self, region: Region) -> None:
        self.retiring_bytes -= region.nbytes
        self.physical_bytes -= region.nbytes

    def check_integrity(self, *, idle: bool) -> None:
        taken = sum(region.nbytes for region in self)
        assert self.physical_bytes >= taken + self.retiring_bytes, (
            f"physical {self.physical_bytes} < regions {taken} + retiring {self.retiring_bytes}"
        )
        for region in self:
            assert region.sealed or 0 < region.tail <= region.nbytes, (
                f"{region.name}: tail {region.tail} of {region.nbytes}"
            )
        if idle:
            assert self.physical_bytes == taken, f"physical {self.physical_bytes}, regions {taken}"
            pinned = [region.name for region in self if region.pins]
            assert not pinned, f"pinned while idle: {pinned}"

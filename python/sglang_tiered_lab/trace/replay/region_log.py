"""The NVMe tier's log in memory: what the region store would hold and write, without a disk.

Sizes of headers and footers, the choice of what is saved from a victim and the credit it spends
are the store's own functions. Modelled here is their sequence: pages are appended to the open
region in extents, and a full region makes the oldest one go. A test drives this and the real store
with the same pages and compares hits and written bytes.
"""

from __future__ import annotations

import bisect
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    MAX_EXTENT_PAGES,
    extent_header_bytes,
    fits_region,
    footer_bytes,
    max_page_bytes,
    padded,
)
from sglang_tiered.storage.region.index import choose_reinsertion
from sglang_tiered.storage.region.pending import MAX_EXTENT_BYTES
from sglang_tiered.storage.region.reclaim import earned_credit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


_MAX_HITS = 255  # the index counts in a byte


class _Region:
    __slots__ = ("lengths", "num_extents", "sequence", "tail", "units")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.tail = BLOCK_BYTES  # behind the region's header
        self.num_extents = 0
        self.units: list[int] = []
        self.lengths: list[int] = []  # bytes, parallel


class RegionLog:
    """Pages by number, in regions that go first in, first out. Not thread-safe.

    State is bounded by the capacity: about 120 bytes per page held.
    """

    def __init__(self, capacity_bytes: int, region_bytes: int) -> None:
        self._region_bytes = region_bytes
        self._num_regions = capacity_bytes // region_bytes
        if self._num_regions < 2:
            raise ValueError(f"{capacity_bytes} bytes do not hold two regions of {region_bytes}")
        self._max_page_bytes = max_page_bytes(region_bytes)
        self._regions: deque[_Region] = deque()  # oldest first; the last one is open
        self._is_open = False
        self._next_sequence = 0
        self._held: dict[int, int] = {}  # to the sequence of its region, one object per region
        self._hits: dict[int, int] = {}  # loads since it was written, if any
        self._credit_bytes = 0.0
        self.num_stored = 0
        self.num_reinserted = 0
        self.num_evicted = 0
        self.bytes_stored = 0
        self.bytes_reinserted = 0
        self.bytes_evicted = 0
        self.bytes_written = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, unit: int) -> bool:
        return unit in self._held

    @property
    def units(self) -> Mapping[int, int]:
        """Return the units that are held, for lookups."""
        return self._held

    def num_leading(self, units: Sequence[int], start: int = 0) -> int:
        """Count the units that are held without a gap from ``start`` on."""
        held = self._held
        position = start
        while position < len(units) and units[position] in held:
            position += 1
        return position - start

    def loaded(self, units: Sequence[int]) -> None:
        """Count a load of each of these units; skip those that are no longer held."""
        held, hits = self._held, self._hits
        for unit in units:
            if unit in held:
                hits[unit] = min(_MAX_HITS, hits.get(unit, 0) + 1)

    def store(self, units: Sequence[int], lengths: Sequence[int]) -> int:
        """Append units that are not held yet, of so many bytes each; return how many pages those
        are."""
        held = self._held
        new = [position for position, unit in enumerate(units) if unit not in held]
        if not new:
            return 0
        if len(new) < len(units):
            units = [units[position] for position in new]
            lengths = [lengths[position] for position in new]
        largest = max(lengths)
        if largest > self._max_page_bytes:
            raise ValueError(f"{largest} bytes do not fit a region of {self._region_bytes}")
        self.num_stored += len(units)
        self.bytes_stored += sum(lengths)
        self._append(units, lengths)
        return len(units)

    def _append(self, units: Sequence[int], lengths: Sequence[int]) -> None:
        position = 0
        while position < len(units):
            if self._is_open:
                count = self._place(units, lengths, position)
                position += count
                if count:
                    continue
                self._seal()
            saved_units, saved_lengths = self._open()
            if saved_units:
                units = [*saved_units, *units[position:]]
                lengths = [*saved_lengths, *lengths[position:]]
                position = 0

    def _place(self, units: Sequence[int], lengths: Sequence[int], start: int) -> int:
        """Put leading pages into the open region; 0 when the first does not fit."""
        region = self._regions[-1]
        size = padded(lengths[start])
        # Pages of one size go in whole extents of the largest kind, by arithmetic.
        per_extent = min(MAX_EXTENT_PAGES, max(1, MAX_EXTENT_BYTES // size))
        stop = len(units)
        if lengths[-1] != lengths[start]:  # the last page of a chain is filled in part
            stop -= 1
        if lengths.count(lengths[start]) < stop:
            stop = start + 1  # reinserted pages of several sizes
        num_full = (stop - start) // per_extent
        full_bytes = extent_header_bytes(per_extent) + per_extent * size
        num_full = self._largest(
            num_full,
            lambda count: fits_region(
                self._region_bytes,
                region.tail + count * full_bytes,
                region.num_extents + count,
                len(region.units) + count * per_extent,
            ),
        )
        placed = num_full * per_extent
        region.tail += num_full * full_bytes
        region.num_extents += num_full
        self.bytes_written += num_full * full_bytes
        if not placed:
            placed = self._largest(
                min(per_extent, stop - start),
                lambda count: fits_region(
                    self._region_bytes,
                    region.tail + extent_header_bytes(count) + count * size,
                    region.num_extents + 1,
                    len(region.units) + count,
                ),
            )
            if placed:
                written = extent_header_bytes(placed) + placed * size
                region.tail += written
                region.num_extents += 1
                self.bytes_written += written
        chosen = units[start : start + placed]
        region.units += chosen
        region.lengths += lengths[start : start + placed]
        self._held.update(dict.fromkeys(chosen, region.sequence))
        return placed

    @staticmethod
    def _largest(most: int, fits: Callable[[int], bool]) -> int:
        """Return the largest number from 0 to ``most`` that fits; every smaller one then does
        too."""
        if most <= 0 or fits(most):
            return max(0, most)
        return bisect.bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))

    def _seal(self) -> None:
        region = self._regions[-1]
        self._is_open = False
        self.bytes_written += footer_bytes(region.num_extents, len(region.units)) + BLOCK_BYTES

    def _open(self) -> tuple[list[int], list[int]]:
        """Begin a region; return what was kept of the one that was evicted for it."""
        saved: tuple[list[int], list[int]] = ([], [])
        if len(self._regions) == self._num_regions:
            saved = self._evict()
        self._regions.append(_Region(self._next_sequence))
        self._next_sequence += 1
        self._is_open = True
        self.bytes_written += BLOCK_BYTES
        return saved

    def _evict(self) -> tuple[list[int], list[int]]:
        region = self._regions.popleft()
        held, hits = self._held, self._hits
        hot = []
        for position, unit in enumerate(region.units):
            del held[unit]
            if unit in hits:
                hot.append((position, hits.pop(unit)))
        self.num_evicted += len(region.units)
        self.bytes_evicted += sum(region.lengths)
        self._credit_bytes = earned_credit(self._credit_bytes, self._region_bytes)
        if not hot:
            return [], []
        sizes = np.array([padded(region.lengths[position]) for position, _ in hot], np.int64)
        counts = np.array([count for _, count in hot], np.uint8)
        chosen = sorted(
            hot[row][0]
            for row in choose_reinsertion(counts, sizes, int(self._credit_bytes)).tolist()
        )
        self._credit_bytes -= sum(padded(region.lengths[position]) for position in chosen)
        lengths = [region.lengths[position] for position in chosen]
        self.num_reinserted += len(chosen)
        self.bytes_reinserted += sum(lengths)
        return [region.units[position] for position in chosen], lengths

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books do not balance."""
        held = sum(len(region.units) for region in self._regions)
        assert held == len(self._held), (held, len(self._held))
        held_bytes = sum(sum(region.lengths) for region in self._regions)
        came = self.bytes_stored + self.bytes_reinserted
        assert came == held_bytes + self.bytes_evicted, (came, held_bytes, self.bytes_evicted)
        assert self.num_stored + self.num_reinserted == held + self.num_evicted
        assert len(self._regions) <= self._num_regions
        assert self._hits.keys() <= self._held.keys()
        for region in self._regions:
            assert fits_region(
                self._region_bytes, region.tail, region.num_extents, len(region.units)
            ), region.sequence

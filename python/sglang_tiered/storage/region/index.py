"""key -> where the page is, in 66 bytes of columns and 8 to 16 of hash table per page. No I/O.

An open-addressing hash table (linear probing, at most 60% full) of row numbers, over columns with
one row per page. Every operation takes a whole run and works on arrays. So a chain of a thousand
pages costs a few numpy calls per probe step, not a thousand dictionary lookups. A million pages
cost no Python object at all. Nothing here locks: the owner's lock guards every call.

To erase a tenant takes no time that grows with its pages. Its place in the tenant table is declared
dead, which hides them, and ``sweep`` removes their rows in small steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.storage.region.format import BLOCK_BYTES
from sglang_tiered.storage.region.regions import TenantTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt


_EMPTY, _DELETED = -1, -2
_MAX_FILL = 0.6  # of the table, deleted places included; beyond it probe chains grow quickly
_MIN_TABLE = 1 << 10
_GROWTH = 1.25
_NO_ROWS = np.zeros(0, np.int32)
_MAX_ARRAYS = 64
_LEADING = (16, 240)  # keys looked at first: most lookups of a cold prompt miss at once


class PageIndex:
    """Pages by key, with the live count and the pinned bytes of every region slot kept in step.
    ``tenants`` counts the pages of each; ``pinned_bytes`` is what all pinned pages take, padded."""

    def __init__(self) -> None:
        self._table = np.full(_MIN_TABLE, _EMPTY, np.int32)
        self._num_deleted = 0  # places in the table
        self._num_rows = 0  # rows ever used; those on _free are unused again
        self._free: list[npt.NDArray[np.int32]] = []
        self._words = np.zeros((0, 4), np.uint64)
        self._checksums = np.zeros(0, np.uint64)
        self._blocks = np.zeros(0, np.uint32)
        self._lengths = np.zeros(0, np.uint32)
        self._slots = np.zeros(0, np.int32)  # -1: the row is free
        self._hits = np.zeros(0, np.uint8)
        self._owners = np.zeros(0, np.int32)  # places of the tenants
        self._pinned = np.zeros(0, np.bool_)
        self.tenants = TenantTable()
        self._swept = 0  # where the next sweep of erased rows goes on
        self._live = np.zeros(0, np.int64)  # by region slot
        self._pinned_in = np.zeros(0, np.int64)  # by region slot: bytes, padded
        # Rows by the region slot they were put in; they may be of another region by now, or free.
        self._rows_put: dict[int, list[npt.NDArray[np.int32]]] = {}
        self._num_pages = 0
        self._stored_bytes = 0
        self.pinned_bytes = 0

    def __len__(self) -> int:
        return self._num_pages - self.tenants.dead_totals()[0]

    @property
    def stored_bytes(self) -> int:
        return self._stored_bytes - self.tenants.dead_totals()[1]

    def num_live(self, slot: int) -> int:
        """Return how many pages are in the region of that slot."""
        return int(self._live[slot]) if slot < len(self._live) else 0

    @property
    def live(self) -> npt.NDArray[np.int64]:
        """Return how many pages are in the region of each slot, of those that ever had one."""
        return self._live

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are held."""
        start = 0
        for size in (*_LEADING, len(keys)):
            chunk = keys[start : start + size]
            if not chunk:
                break
            held = self.find(key_words(chunk)) >= 0
            if not held.all():
                return start + int(held.argmin())
            start += len(chunk)
        return start

    def find(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the row of each key, -1 where it is not held."""
        rows = self._find(words, hash_words(words))
        if self.tenants.any_dead:
            rows[self.tenants.is_dead(self._owners[rows])] = -1
        return rows

    def _find(
        self, words: npt.NDArray[np.uint64], hashes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        rows = np.full(len(words), -1, np.int64)
        mask = len(self._table) - 1
        place = (hashes & np.uint64(mask)).astype(np.int64)
        left = np.arange(len(words))
        while left.size:
            found = self._table[place]
            used = found >= 0
            same = np.zeros(left.size, np.bool_)
            same[used] = (self._words[found[used]] == words[left[used]]).all(axis=1)
            rows[left[same]] = found[same]
            on = ~same & (found != _EMPTY)
            left = left[on]
            place = (place[on] + 1) & mask
        return rows

    def places(self, rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int, int]]:
        """Yield where the pages of these rows are: the slot of the region, the offset in it, the
        bytes without padding, and their checksum."""
        offsets = self._blocks[rows].astype(np.int64) * BLOCK_BYTES
        columns = self._slots[rows], offsets, self._lengths[rows], self._checksums[rows]
        return zip(*(column.tolist() for column in columns), strict=True)

    def hit(self, rows: npt.NDArray[np.int64]) -> None:
        """Count a load of each page; reinsertion asks for it."""
        hits = self._hits[rows]
        self._hits[rows] = hits + (hits < 255)

    def put(
        self,
        words: npt.NDArray[np.uint64],
        slots: npt.NDArray[np.int32] | int,
        offsets: npt.NDArray[np.int64],
        lengths: npt.NDArray[Any],
        checksums: npt.NDArray[Any],
        owners: npt.NDArray[np.int32] | int,
    ) -> None:
        """Point keys at pages of a region, or of several one after the other, whatever they pointed
        at before. Where a key occurs twice the later page counts. ``owners`` are what
        ``tenants.place_of`` said of their tenants."""
        if not len(words):
            return
        named = placed = np.broadcast_to(np.asarray(owners, np.int32), len(words))
        holders = np.broadcast_to(np.asarray(slots, np.int32), len(words))
        hashes = hash_words(words)
        if len(set(hashes.tolist())) != len(hashes):
            last = np.array(sorted({row.tobytes(): i for i, row in enumerate(words)}.values()))
            words, hashes = words[last], hashes[last]
            offsets, lengths, checksums = offsets[last], lengths[last], checksums[last]
            holders, placed = holders[last], placed[last]
        self._reserve(len(words), int(holders.max()))
        rows = self._find(words, hashes)
        known = rows >= 0
        before = self._uncount(rows[known])
        new = ~known
        num_new = int(new.sum())
        if num_new:
            rows[new] = self._take_rows(num_new)
            self._words[rows[new]] = words[new]
            self._enter(rows[new], hashes[new])
        self._num_pages += len(rows)
        self._checksums[rows] = checksums
        self._blocks[rows] = offsets // BLOCK_BYTES
        self._lengths[rows] = lengths
        self._slots[rows] = holders
        self._hits[rows] = 0
        self._live += np.bincount(holders, minlength=len(self._live))
        starts = np.flatnonzero(np.diff(holders, prepend=-1))
        for slot, put in zip(holders[starts].tolist(), np.split(rows, starts[1:]), strict=True):
            self._note_rows(slot, put.astype(np.int32))
        self._stored_bytes += int(lengths.sum(dtype=np.int64))
        self._owners[rows] = placed
        self.tenants.add(placed, lengths.astype(np.int64))
        self.tenants.free_empty(np.concatenate([before, named]))

    def _note_rows(self, slot: int, rows: npt.NDArray[np.int32]) -> None:
        put = self._rows_put.setdefault(slot, [])
        put.append(rows)
        if len(put) > _MAX_ARRAYS:  # an array takes more memory than the rows of a short run
            self._rows_put[slot] = [np.concatenate(put)]

    def drop(self, key: bytes, slot: int, offset: int) -> None:
        """Forget a key if it still points there."""
        rows = self.find(key_words([key]))
        if rows[0] < 0:
            return
        row = rows[0]
        if self._slots[row] == slot and int(self._blocks[row]) * BLOCK_BYTES == offset:
            self._remove(rows)

    def some_rows(self, limit: int) -> npt.NDArray[np.int64]:
        """Return at most ``limit`` rows in use, of the first one's region if it has as many."""
        used = np.flatnonzero(self._slots[: self._num_rows] >= 0)
        same: npt.NDArray[np.int64] = used[self._slots[used] == self._slots[used[:1]]]
        return same[:limit]

    def rows_of(self, slot: int) -> npt.NDArray[np.int64]:
        """Return the rows of all pages in a region, in ascending order."""
        put = np.concatenate([_NO_ROWS, *self._rows_put.get(slot, ())])
        rows = np.unique(put).astype(np.int64)
        still_there: npt.NDArray[np.int64] = rows[self._slots[rows] == slot]
        return still_there

    def live_rows(self, slot: int) -> npt.NDArray[np.int64]:
        """Return the rows of the pages in a region that a lookup can hit."""
        rows = self.rows_of(slot)
        return rows[~self.tenants.is_dead(self._owners[rows])]

    def are_in(self, slot: int, words: npt.NDArray[np.uint64]) -> list[bool]:
        """Return whether each key could be hit in that region."""
        rows = self.find(words)
        held: list[bool] = ((rows >= 0) & (self._slots[rows] == slot)).tolist()
        return held

    def hot_rows(self, slot: int, max_bytes: int) -> npt.NDArray[np.int64]:
        """Return the rows of pages of a region that were loaded since they were written, the most
        loaded first as far as ``max_bytes`` reach, in the order of their offsets."""
        rows = self.live_rows(slot)
        rows = rows[self._hits[rows] > 0]
        rows = rows[choose_reinsertion(self._hits[rows], self._padded(rows), max_bytes)]
        return self.in_order(rows)

    def in_order(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Sort rows of one region by their offsets."""
        return rows[np.argsort(self._blocks[rows])]

    def padded_bytes(self, rows: npt.NDArray[np.int64]) -> int:
        return int(self._padded(rows).sum())

    def _padded(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        lengths: npt.NDArray[np.int64] = self._lengths[rows].astype(np.int64)
        return -(-lengths // BLOCK_BYTES) * BLOCK_BYTES

    def keys(self, rows: npt.NDArray[np.int64]) -> list[bytes]:
        return [words.tobytes() for words in self._words[rows]]

    def fingerprints(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        """Return the first words of the keys that a lookup can hit, of the rows from ``start`` on;
        the last row is ``num_rows`` at most."""
        stop = min(stop, self._num_rows)
        used = self._slots[start:stop] >= 0
        if self.tenants.any_dead:
            used &= ~self.tenants.is_dead(self._owners[start:stop])
        return self._words[start:stop, 0][used]

    @property
    def num_rows(self) -> int:
        """Return how many rows were ever used: all that are in use lie before it."""
        return self._num_rows

    def tenants_of(self, rows: npt.NDArray[np.int64]) -> list[bytes]:
        return self.tenants.names(self._owners[rows])

    def drop_region(self, slot: int) -> int:
        """Forget every key that points into the region; returns how many could be hit."""
        rows = self.rows_of(slot)
        self._rows_put.pop(slot, None)
        num_live = int((~self.tenants.is_dead(self._owners[rows])).sum())
        self._remove(rows)
        return num_live

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        num_slots = len(self._live)
        self.__init__()  # type: ignore[misc]
        self._live, self._pinned_in = np.zeros((2, num_slots), np.int64)

    def sweep(self, max_rows: int) -> bool:
        """Look at some rows and remove those of erased tenants; true when all are removed."""
        if self.tenants.any_dead:
            rows = np.arange(self._swept, min(self._swept + max_rows, self._num_rows))
            self._swept += max_rows
            if self._swept >= self._num_rows:
                self._swept = 0
            rows = rows[self._slots[rows] >= 0]
            self._remove(rows[self.tenants.is_dead(self._owners[rows])])
        return not self.tenants.any_dead

    # ---- Pins ----

    def pinned_in(self, slot: int) -> int:
        """Return what the pinned pages in a region take, with padding."""
        return int(self._pinned_in[slot]) if slot < len(self._pinned_in) else 0

    def pinned_rows(self, slot: int) -> npt.NDArray[np.int64]:
        """Return the rows of the pinned pages in a region that a lookup can hit, in the order of
        their offsets."""
        if not self.pinned_in(slot):
            return np.zeros(0, np.int64)
        rows = self.live_rows(slot)
        return self.in_order(rows[self._pinned[rows]])

    def pinned_bytes_of(self, slot: int, tenant: bytes) -> int:
        """Return what the pinned pages of a tenant in a region take, with padding."""
        rows = self.pinned_rows(slot)
        own = [name == tenant for name in self.tenants_of(rows)]
        return self.padded_bytes(rows[np.array(own, np.bool_)])

    def held_bytes(self, words: npt.NDArray[np.uint64], *, pinned: bool) -> int:
        """Return what those of these pages take that are held, and pinned or not; every key
        once."""
        rows = self.find(words)
        rows = rows[rows >= 0]
        return self.padded_bytes(rows[self._pinned[rows] == pinned])

    def pin(self, words: npt.NDArray[np.uint64], max_bytes: int) -> list[int]:
        """Pin those of these pages that are held, as far as ``max_bytes`` reach; returns which
        are left out. Every key once."""
        found = self.find(words)
        places = np.flatnonzero(found >= 0)
        places = places[~self._pinned[found[places]]]
        rows = found[places]
        fits = np.cumsum(self._padded(rows)) <= max_bytes
        self._pin(rows[fits], pinned=True)
        left_out: list[int] = places[~fits].tolist()
        return left_out

    def unpin(self, words: npt.NDArray[np.uint64]) -> None:
        """Unpin those of these pages that are pinned. Every key once."""
        rows = self.find(words)
        self._pin(rows[rows >= 0], pinned=False)

    def _pin(self, rows: npt.NDArray[np.int64], *, pinned: bool) -> None:
        rows = rows[self._pinned[rows] != pinned]
        self._pinned[rows] = pinned
        sizes = self._padded(rows) * (1 if pinned else -1)
        np.add.at(self._pinned_in, self._slots[rows], sizes)
        self.pinned_bytes += int(sizes.sum())

    def discard(self, words: npt.NDArray[np.uint64]) -> int:
        """Forget keys; returns how many could be hit. Every key once."""
        rows = self.find(words)
        rows = rows[rows >= 0]
        self._remove(rows)
        return len(rows)

    def _uncount(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Take rows out of all counts; returns the places of their tenants, which may be empty
        now."""
        if self.pinned_bytes:
            self._pin(rows, pinned=False)
        gone = np.bincount(self._slots[rows], minlength=len(self._live))
        self._live -= gone
        lengths = self._lengths[rows].astype(np.int64)
        self._stored_bytes -= int(lengths.sum())
        self._num_pages -= len(rows)
        owners = self._owners[rows]
        self.tenants.remove(owners, lengths)
        return owners

    def _remove(self, rows: npt.NDArray[np.int64]) -> None:
        if not rows.size:
            return
        self.tenants.free_empty(self._uncount(rows))
        mask = len(self._table) - 1
        left = rows
        place = (hash_words(self._words[rows]) & np.uint64(mask)).astype(np.int64)
        while left.size:
            same = self._table[place] == left
            self._table[place[same]] = _DELETED
            left = left[~same]
            place = (place[~same] + 1) & mask
        self._num_deleted += len(rows)
        self._slots[rows] = -1
        self._free.append(rows.astype(np.int32))

    def _enter(self, rows: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64]) -> None:
        """Put rows whose keys are not in the table into it."""
        mask = len(self._table) - 1
        place = (hashes & np.uint64(mask)).astype(np.int64)
        while rows.size:
            found = self._table[place]
            vacant = found < 0
            self._table[place[vacant]] = rows[vacant]
            # Of several rows for one place the last assignment stays; the others go on.
            placed = self._table[place] == rows
            self._num_deleted -= int((found[placed] == _DELETED).sum())
            rows = rows[~placed]
            place = (place[~placed] + 1) & mask

    def _take_rows(self, count: int) -> npt.NDArray[np.int64]:
        taken: list[npt.NDArray[np.int32]] = []
        while count and self._free:
            rows = self._free.pop()
            taken.append(rows[:count])
            if len(rows) > count:
                self._free.append(rows[count:].copy())
            count -= len(taken[-1])
        taken.append(np.arange(self._num_rows, self._num_rows + count, dtype=np.int32))
        self._num_rows += count
        return np.concatenate(taken).astype(np.int64)

    def _reserve(self, count: int, slot: int) -> None:
        """Make room for more pages, in the columns and in the table."""
        if slot >= len(self._live):
            self._live = np.concatenate([self._live, np.zeros(slot + 64, np.int64)])
            self._pinned_in = np.append(self._pinned_in, np.zeros(slot + 64, np.int64))
        needed = self._num_rows + count
        if needed > len(self._slots):
            size = max(needed, int(len(self._slots) * _GROWTH), 1024)
            # In place, so that growing a large index needs no second copy of it. No view of a
            # column leaves this class.
            self._words.resize((size, 4), refcheck=False)
            columns = (self._checksums, self._blocks, self._lengths, self._slots, self._hits)
            for column in (*columns, self._owners, self._pinned):
                column.resize(size, refcheck=False)
        if self._num_pages + self._num_deleted + count > _MAX_FILL * len(self._table):
            self._rebuild(self._num_pages + count)

    def _rebuild(self, num_pages: int) -> None:
        size = _MIN_TABLE
        while num_pages > _MAX_FILL / 1.5 * size:
            size *= 2
        self._table = np.full(size, _EMPTY, np.int32)
        self._num_deleted = 0
        rows = np.flatnonzero(self._slots[: self._num_rows] >= 0)
        for start in range(0, len(rows), 1 << 16):
            chunk = rows[start : start + (1 << 16)]
            self._enter(chunk, hash_words(self._words[chunk]))

    def check_integrity(self, slots: dict[int, int]) -> None:
        """Recount everything; ``slots`` gives the bytes of each region in service."""
        rows = np.flatnonzero(self._slots[: self._num_rows] >= 0)
        assert len(rows) == self._num_pages, f"{len(rows)} rows in use, counted {self._num_pages}"
        stored = int(self._lengths[rows].sum(dtype=np.int64))
        assert stored == self._stored_bytes, f"rows hold {stored}, counted {self._stored_bytes}"
        self.tenants.check_integrity(self._owners[rows], self._lengths[rows])
        pinned = rows[self._pinned[rows]]
        assert len(pinned) == self._pinned.sum(), "a row without a page is pinned"
        sizes = np.zeros_like(self._pinned_in)
        np.add.at(sizes, self._slots[pinned], self._padded(pinned))
        assert (sizes == self._pinned_in).all(), f"pinned {sizes}, counted {self._pinned_in}"
        assert sizes.sum() == self.pinned_bytes, f"{self.pinned_bytes} counted as pinned"
        for slot, live in enumerate(np.bincount(self._slots[rows], minlength=len(self._live))):
            counted = self.num_live(slot)
            assert live == counted, f"region slot {slot}: {live} rows, counted {counted}"
            assert live == 0 or slot in slots, f"{live} rows point into unused region slot {slot}"
        for row in rows:
            end = int(self._blocks[row]) * BLOCK_BYTES + int(self._lengths[row])
            slot = int(self._slots[row])
            assert end <= slots[slot], f"a page ends at {end} in region slot {slot}"
        if rows.size:
            words = self._words[rows]
            found = self._find(words, hash_words(words))
            assert (found == rows).all(), "a row is not found by its key"
        occupied = int((self._table >= 0).sum())
        assert occupied == self._num_pages, f"{occupied} places taken for {self._num_pages} pages"
        deleted = int((self._table == _DELETED).sum())
        assert deleted == self._num_deleted, f"{deleted} deleted, counted {self._num_deleted}"


_MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)


def key_words(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return keys of 32 bytes as an array ``[keys, 4]``."""
    return np.frombuffer(b"".join(keys), "<u8").reshape(-1, 4)


def hash_words(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed: npt.NDArray[np.uint64] = (words * _MULTIPLIERS).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MULTIPLIERS[0]
    return mixed ^ (mixed >> np.uint64(29))


def choose_reinsertion(
    hits: npt.NDArray[Any], sizes: npt.NDArray[np.int64], max_bytes: int
) -> npt.NDArray[np.int64]:
    """Return the positions to save: the most loaded first as far as ``max_bytes`` reach."""
    order: npt.NDArray[np.int64] = np.argsort(hits, kind="stable")[::-1]
    return order[np.cumsum(sizes[order]) <= max_bytes]

"""``RegionView``: what a store holds, for those who copy from it. Memory only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered.storage.region.index import key_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from sglang_tiered.storage.region.state import StoreState


_ALL_BYTES = 1 << 62
_ROWS_AT_ONCE = 1 << 15  # read under the store's lock, which lookups of a scheduler wait for


class StoredPage(NamedTuple):
    """A page that a load could serve. ``is_used``: it was loaded since it was written."""

    key: bytes
    length: int  # payload bytes
    tenant: bytes
    is_used: bool
    checksum: int  # XXH3-64 of namespace, key and payload, as stored


class RegionView:
    """What a store holds now. Any thread; each call takes the store's lock for a moment. The
    device's health is left out: what is listed may turn out unreadable."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._books: tuple[int, ...] = ()  # when fingerprints were last given
        self._version = 0

    def fingerprints(self, version: int) -> tuple[int, npt.NDArray[np.uint64]] | None:
        """Return the first words of the keys of all pages that a load could serve, in any order,
        and the version of that. None if it is still ``version``, which is above 0. For one thread.

        Read in pieces, so pages that come or go meanwhile may be there or not, or twice; the
        version is the one before, so they are right the next time.
        """
        state = self._state
        pieces: list[npt.NDArray[np.uint64]] = []
        start, num_rows = 0, 1
        while start < num_rows:
            with state.lock:
                if not start:
                    # Every page that came counts up; every other change lowers the number held.
                    books = (
                        state.generation,
                        state.num_pages_stored,
                        state.num_pages_reinserted,
                        len(state.index),
                    )
                    if books == self._books and version == self._version:
                        return None
                    self._version += books != self._books
                    self._books = books
                pieces.append(state.index.fingerprints(start, start + _ROWS_AT_ONCE))
                num_rows = state.index.num_rows
            start += _ROWS_AT_ONCE
        return self._version, np.concatenate(pieces)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether each key is held."""
        if not keys:
            return []
        with self._state.lock:
            held: list[bool] = (self._state.index.find(key_words(keys)) >= 0).tolist()
        return held

    @property
    def is_pressed(self) -> bool:
        """Return whether reads for requests here wait for a reader: those for others would make
        them wait longer."""
        with self._state.lock:  # which is the scheduler's too: the first one is enough
            return any(ticket.for_request for ticket, _ in self._state.loads)

    def find(self, keys: Sequence[bytes]) -> list[StoredPage | None]:
        """Return each page, or None where it is not held."""
        found: list[StoredPage | None] = [None] * len(keys)
        if not keys:
            return found
        with self._state.lock:
            rows = self._state.index.find(key_words(keys))
            positions = np.flatnonzero(rows >= 0)
            pages = self._pages(rows[positions], np.zeros(len(positions), np.bool_))
        for position, page in zip(positions.tolist(), pages, strict=True):
            found[position] = page
        return found

    def use(self, keys: Sequence[bytes]) -> None:
        """Count a use of each page that is held, as a load of it does. When its region is evicted,
        used pages are written again first, once for all uses, as far as that is affordable."""
        if not keys:
            return
        with self._state.lock:
            rows = self._state.index.find(key_words(keys))
            self._state.index.hit(rows[rows >= 0])

    def pages_behind(self, sequence: int) -> tuple[int, list[StoredPage]] | None:
        """Return the oldest region behind that sequence number (-1: of all), with its pages in the
        order they were written; None behind the last. Older regions are reclaimed first."""
        state = self._state
        with state.lock:
            later = [region for region in state.regions if region.sequence > sequence]
            if not later:
                return None
            region = min(later, key=lambda region: region.sequence)
            rows = state.index.in_order(state.index.live_rows(region.slot))
            used = state.index.hot_rows(region.slot, _ALL_BYTES)
            return region.sequence, self._pages(rows, np.isin(rows, used))

    def _pages(self, rows: npt.NDArray[np.int64], used: npt.NDArray[np.bool_]) -> list[StoredPage]:
        index = self._state.index
        whose = index.keys(rows), index.tenants_of(rows), used.tolist(), index.places(rows)
        return [
            StoredPage(key, length, tenant, is_used, checksum)
            for key, tenant, is_used, (_, _, length, checksum) in zip(*whose, strict=True)
        ]

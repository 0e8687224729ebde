"""The pages that other servers hold, as this one knows them. Memory only.

One thread writes (the reader of Redis); ``find`` takes no lock, ``lacks`` and ``avoid`` take one
for a moment. A page is found at a peer only while the records of all peers are fresh, its snapshot
is here, it answers, and it has applied exactly the purges that this server has: so a page that was
purged here cannot come back from a peer that has not purged it yet.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered.sharing.locality.formats import fingerprints_of
from sglang_tiered.sharing.locality.replica_choice import choose_slots
from sglang_tiered.sharing.locality.table import WORD_BITS, PageTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from sglang_tiered.sharing.locality.formats import ServerRecord

    Fingerprints = npt.NDArray[np.uint64]

__all__ = ["Mirror", "MirroredPeer", "Peer", "distinct"]

_PIECE = 1 << 11  # pages added while the lock is held once
_ROOM = 0.9  # of the bound: below it, pages that did not fit are read again


class Peer(NamedTuple):
    """Another server."""

    server: str  # random hex id of one process's rank
    address: str  # "tcp://host:port" of its page server


@dataclass(eq=False, slots=True)
class MirroredPeer:
    """The state of one server, guarded by the mirror's lock."""

    record: ServerRecord
    slot: int
    position: int = 0  # sequence number of the last change that was applied
    is_loaded: bool = False
    num_pages: int = 0
    num_cut: int = 0  # pages beyond the bound
    avoided_until: float = 0.0
    retry_at: float = 0.0  # when its snapshot may be asked for again
    num_failures: int = 0  # in a row
    loaded_at: float = 0.0

    @property
    def peer(self) -> Peer:
        return Peer(self.record.server, self.record.address)


class _View(NamedTuple):
    """The data that ``find`` reads, replaced as a whole."""

    table: PageTable
    usable: npt.NDArray[np.uint64]  # [words], the bits of peers that pages are found at
    peers: npt.NDArray[np.object_]  # Peer or None by slot; the last is None, which -1 means
    any_usable: bool


class Mirror:
    """``digest`` returns the digest of the purges that this server has applied or begun."""

    def __init__(
        self,
        max_pages: int,
        max_peers: int,
        *,
        salt: int,
        digest: Callable[[], bytes],
        clock: Callable[[], float],
    ) -> None:
        self.lock = threading.Lock()
        self._max_pages = max_pages
        self._max_peers = max_peers
        self._salt = salt
        self._digest = digest
        self._clock = clock
        self._peers: dict[str, MirroredPeer] = {}
        self._slots: list[MirroredPeer | None] = []
        self._num_held = 0
        self._lacking: list[tuple[int, Fingerprints]] | None = None  # set while the table is copied
        self._valid_until = float("-inf")
        self._epoch = self._epoch_wanted = 0  # of the namespace
        self._table = PageTable(0)
        self._view = _View(self._table, np.zeros(1, np.uint64), np.full(1, None), False)

    # ---- Any thread ----

    def find(self, keys: Sequence[bytes]) -> list[Peer | None]:
        """A usable peer that holds each page, or None."""
        view = self._view
        if not keys or not view.any_usable or self._clock() >= self._valid_until:
            return [None] * len(keys)
        pages = fingerprints_of(keys)
        bits = view.table.holders(view.table.find(pages)) & view.usable[:, None]
        if not bits.any():
            return [None] * len(keys)
        found: list[Peer | None] = view.peers.take(choose_slots(bits, pages, self._salt)).tolist()
        return found

    def lacks(self, server: str, keys: Sequence[bytes]) -> None:
        pages = distinct(fingerprints_of(keys))
        with self.lock:
            known = self._peers.get(server)
            if known is not None:
                self._hide(known.slot, pages)

    def hide_pages(self, keys: Sequence[bytes]) -> None:
        """Find these pages at no peer until it publishes them again."""
        pages = distinct(fingerprints_of(keys))
        with self.lock:
            for known in self._peers.values():
                self._hide(known.slot, pages)

    def _hide(self, slot: int, pages: Fingerprints) -> None:
        """Remove a holder of pages, in a copy under way too. The caller holds the lock."""
        if slot < self._table.num_words * WORD_BITS:
            self._clear(slot, pages)
        if self._lacking is not None:
            self._lacking.append((slot, pages))

    def avoid(self, server: str, seconds: float) -> None:
        with self.lock:
            known = self._peers.get(server)
            if known is not None:
                known.avoided_until = self._clock() + seconds
                self._choose()

    def choose(self) -> None:
        """Decide again at which peers pages are found."""
        with self.lock:
            self._choose()

    def hide(self, epoch: int) -> None:
        """Find nothing until the reader has reached that namespace too."""
        with self.lock:
            self._epoch_wanted = epoch
            self._choose()

    def figures(self) -> tuple[int, int, int, int, int]:
        """The numbers of live peers, usable peers, known pages, pages beyond the bound, and
        bytes."""
        fresh = self._clock() < self._valid_until
        with self.lock:
            usable = sum(word.bit_count() for word in self._view.usable.tolist())
            return (
                len(self._peers) if fresh else 0,
                usable if fresh else 0,
                self._num_held,
                sum(known.num_cut for known in self._peers.values()),
                self._table.num_bytes,
            )

    # ---- The reader's thread ----

    @property
    def peers(self) -> list[MirroredPeer]:
        return list(self._peers.values())

    def begin_namespace(self, epoch: int) -> None:
        """Begin with a namespace of which no holder is known yet."""
        with self.lock:
            self._epoch = epoch
            self._peers.clear()
            self._slots.clear()
            self._num_held = 0
            self._valid_until = float("-inf")
            self._table = PageTable(0)
            self._choose()

    def update(self, records: Iterable[ServerRecord], valid_until: float) -> None:
        """Set the servers that live; beyond ``max_peers``, those known already stay."""
        alive = {record.server: record for record in records}
        for server in self._peers.keys() - alive.keys():
            self._drop(self._peers[server])
        for server, record in alive.items():
            known = self._peers.get(server)
            if known is None:
                self._join(record)
                continue
            with self.lock:
                before, known.record = known.record, record
                if before.address != record.address:
                    known.avoided_until = 0.0
            if before.incarnation != record.incarnation:
                self.unload(known)
                known.num_failures, known.retry_at = 0, 0.0
        with self.lock:
            self._valid_until = valid_until
            self._choose()

    def unload(self, known: MirroredPeer) -> None:
        """Forget the pages of a server."""
        with self.lock:
            known.is_loaded = False
            known.num_cut = 0
            self._choose()
            if not known.num_pages:
                return
        for rows in self._table.rows_of(known.slot):
            with self.lock:
                num_cleared, num_unheld = self._table.clear_bit(rows, known.slot)
                self._num_held -= num_unheld
                known.num_pages -= num_cleared

    def loaded(self, known: MirroredPeer, position: int) -> None:
        """Note that all pages of a server as of a sequence number were added."""
        with self.lock:
            known.is_loaded = True
            known.position = position
            known.loaded_at = self._clock()
            self._choose()

    def may_hold_more(self, known: MirroredPeer) -> bool:
        """Whether there is room by now for pages that did not fit."""
        return known.num_cut > 0 and self._num_held < _ROOM * self._max_pages

    @property
    def is_full(self) -> bool:
        return self._num_held >= self._max_pages

    def add_pages(self, known: MirroredPeer, pages: Fingerprints) -> None:
        """Note that a server holds pages."""
        pages = distinct(pages)
        for start in range(0, len(pages), _PIECE):
            self._add(known, pages[start : start + _PIECE])

    def remove_pages(self, known: MirroredPeer, pages: Fingerprints) -> None:
        """Note that a server no longer holds pages."""
        pages = distinct(pages)
        for start in range(0, len(pages), _PIECE):
            with self.lock:
                self._clear(known.slot, pages[start : start + _PIECE])

    def _add(self, known: MirroredPeer, pages: Fingerprints) -> None:
        table = self._table
        if table.num_used + len(pages) > table.capacity or known.slot >= (
            table.num_words * WORD_BITS
        ):
            self._grow(len(pages))
        with self.lock:
            table = self._table
            rows = table.find(pages)
            unheld = np.flatnonzero(~table.holders(rows).any(axis=0))
            cut = unheld[max(self._max_pages - self._num_held, 0) :]
            if len(cut):
                known.num_cut += len(cut)
                pages, rows = np.delete(pages, cut), np.delete(rows, cut)
            new = rows < 0
            rows[new] = table.add(pages[new])
            num_new, num_unheld = table.set_bit(rows, known.slot)
            known.num_pages += num_new
            self._num_held += num_unheld

    def _grow(self, num_new: int) -> None:
        """Make a larger table, without the places of pages that have lost their last holder."""
        with self.lock:
            self._lacking = []
            table, num_held = self._table, self._num_held
        wanted = min(num_held + max(num_held // 2, 1 << 13), self._max_pages) + num_new
        num_words = max(-(-len(self._slots) // WORD_BITS), table.num_words)
        copy = table.copied(wanted, num_words)
        with self.lock:
            self._table = copy
            missed, self._lacking = self._lacking or [], None
            for slot, pages in missed:
                rows = copy.find(pages)
                copy.clear_bit(rows[rows >= 0], slot)
            self._choose()

    def _clear(self, slot: int, pages: Fingerprints) -> None:
        """Remove a holder of pages. The caller holds the lock."""
        rows = self._table.find(pages)
        num_cleared, num_unheld = self._table.clear_bit(rows[rows >= 0], slot)
        known = self._slots[slot]
        self._num_held -= num_unheld
        if known is not None:
            known.num_pages -= num_cleared

    def _join(self, record: ServerRecord) -> None:
        with self.lock:
            slot = next((i for i, known in enumerate(self._slots) if known is None), None)
            if slot is None:
                slot = len(self._slots)
                if slot >= self._max_peers:
                    return
                self._slots.append(None)
            known = MirroredPeer(record, slot)
            self._slots[slot] = self._peers[record.server] = known

    def _drop(self, known: MirroredPeer) -> None:
        self.unload(known)
        with self.lock:
            del self._peers[known.record.server]
            self._slots[known.slot] = None
            self._choose()

    def _choose(self) -> None:
        """Replace the view. The caller holds the lock."""
        now, digest = self._clock(), self._digest()
        usable = [0] * self._table.num_words
        for known in self._peers.values() if self._epoch == self._epoch_wanted else ():
            word = known.slot // WORD_BITS
            if (
                known.is_loaded
                and word < len(usable)
                and known.avoided_until <= now
                and known.record.purges == digest
            ):
                usable[word] |= 1 << known.slot % WORD_BITS
        peers = np.full(len(self._slots) + 1, None)
        for known in self._peers.values():
            peers[known.slot] = known.peer
        self._view = _View(self._table, np.array(usable, np.uint64), peers, any(usable))

    def check_integrity(self) -> None:
        with self.lock:
            self._table.check_integrity(self._num_held)
            assert self._num_held <= self._max_pages, f"{self._num_held} pages mirrored"
            for slot, known in enumerate(self._slots):
                counted = 0 if known is None else known.num_pages
                bits = (
                    sum(len(rows) for rows in self._table.rows_of(slot))
                    if slot < (self._table.num_words * WORD_BITS)
                    else 0
                )
                assert bits == counted, f"slot {slot} has {bits} pages, counted {counted}"
                assert known is None or known.slot == slot, f"slot {slot} has the number of another"
            taken = [known for known in self._slots if known is not None]
            assert len(taken) == len(self._peers), f"{len(taken)} slots, {len(self._peers)} peers"


def distinct(pages: Fingerprints) -> Fingerprints:
    """Pages sorted, each once, without zero. (``numpy.unique`` may hold the GIL for long.)"""
    pages = np.sort(pages)
    if not len(pages):
        return pages
    first = np.empty(len(pages), np.bool_)
    first[0] = True
    np.not_equal(pages[1:], pages[:-1], out=first[1:])
    first &= pages != 0
    return pages[first]

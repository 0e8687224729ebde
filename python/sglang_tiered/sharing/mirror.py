"""The pages that other servers hold, as this one knows them, of one namespace. Memory only.

One thread writes (the follower); ``find`` takes no lock, ``hide_pages`` and ``avoid`` take one for
a moment. A page is found at a peer only while it is followed, its snapshot is here, it answers, and
it has applied exactly the erasures that this server has. So a page that was erased here cannot come
back from a peer that has not erased it yet.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered.sharing.table import WORD_BITS, PageTable, choose_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    Fingerprints = npt.NDArray[np.uint64]


_PIECE = 1 << 11  # pages added while the lock is held once
_ROOM = 0.95  # of the bound is for servers that begin; the rest for what those known store since


class Peer(NamedTuple):
    """Another server."""

    server: str  # random hex id of one process's rank
    address: str  # "tcp://IP:port" of its page server


class MirrorFigures(NamedTuple):
    """What is known now."""

    num_peers: int  # followed
    num_usable: int  # of those, that pages are found at
    num_pages: int  # different ones
    num_bytes: int


@dataclass(eq=False, slots=True)
class MirroredPeer:
    """The state of one server. Its follower sets ``digest``, ``agreed_with`` and ``is_live``, and
    then calls ``choose``; the rest is guarded by the mirror's lock."""

    peer: Peer
    slot: int
    digest: bytes = b""  # of the erasures that it has applied
    agreed_with: bytes = b""  # another digest, whose difference from that one is settled
    is_live: bool = False  # connected, and of this namespace
    is_loaded: bool = False  # all its pages are known
    num_pages: int = 0
    num_cut: int = 0  # of its pages, of which nothing is known while there is no room for all
    avoided_until: float = 0.0


class _View(NamedTuple):
    """The data that ``find`` reads, replaced as a whole."""

    table: PageTable
    usable: npt.NDArray[np.uint64]  # [words], the bits of peers that pages are found at
    peers: npt.NDArray[np.object_]  # Peer or None by slot; the last is None, which -1 means
    digest: bytes | None  # with which those agree; None where there is none


class Mirror:
    """``digest`` returns that of the erasures that this server has applied or begun."""

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
        self.max_pages = max_pages
        self._max_peers = max_peers
        self._salt = salt
        self._digest = digest
        self._clock = clock
        self._peers: dict[str, MirroredPeer] = {}
        self._num_held = 0
        self._hidden: list[Fingerprints] | None = None  # since a copy of the table began
        self._table = PageTable(0)
        self._view = _View(self._table, np.zeros(1, np.uint64), np.full(1, None), None)

    # ---- Any thread ----

    def find(self, keys: Sequence[bytes], without: Iterable[Peer] = ()) -> list[Peer | None]:
        """A usable peer that holds each page, none of those ``without``; or None."""
        view = self._view
        if not keys or view.digest is None or view.digest != self._digest():
            return [None] * len(keys)
        pages = fingerprints_of(keys)
        bits = view.table.holders(view.table.find(pages)) & view.usable[:, None]
        for peer in without:
            known = self._peers.get(peer.server)
            if known is not None and known.slot < len(bits) * WORD_BITS:
                bits[known.slot // WORD_BITS] &= ~np.uint64(1 << known.slot % WORD_BITS)
        if not bits.any():
            return [None] * len(keys)
        found: list[Peer | None] = view.peers.take(choose_slots(bits, pages, self._salt)).tolist()
        return found

    def holders(self, pages: Fingerprints) -> npt.NDArray[np.uint64]:
        """Return the bits of the servers that hold each page, by their slots, whether pages are
        found there or not: ``[words, pages]``. Takes no lock."""
        table = self._view.table
        return table.holders(table.find(pages))

    def hide_pages(self, keys: Sequence[bytes]) -> None:
        """Find these pages at no peer until it publishes them again."""
        pages = distinct(fingerprints_of(keys))
        with self.lock:
            self._clear(self._peers.values(), pages)
            if self._hidden is not None:
                self._hidden.append(pages)

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

    @property
    def has_peers(self) -> bool:
        """Whether any server is followed. Takes no lock."""
        return any(known.is_live for known in tuple(self._peers.values()))

    def figures(self) -> MirrorFigures:
        with self.lock:
            return MirrorFigures(
                sum(known.is_live for known in self._peers.values()),
                sum(word.bit_count() for word in self._view.usable.tolist()),
                self._num_held,
                self._table.num_bytes,
            )

    # ---- The follower's thread ----

    def join(self, peer: Peer) -> MirroredPeer | None:
        """Know a server from now on; None if it is known, or beyond ``max_peers``."""
        with self.lock:
            if peer.server in self._peers or len(self._peers) >= self._max_peers:
                return None
            taken = {known.slot for known in self._peers.values()}
            slot = next(slot for slot in range(self._max_peers) if slot not in taken)
            known = self._peers[peer.server] = MirroredPeer(peer, slot)
            return known

    @property
    def _num_slots(self) -> int:
        return max((known.slot + 1 for known in self._peers.values()), default=0)

    def drop(self, known: MirroredPeer) -> None:
        """Know a server no longer."""
        self.unload(known)
        with self.lock:
            if self._peers.get(known.peer.server) is known:
                del self._peers[known.peer.server]
            self._choose()

    def unload(self, known: MirroredPeer) -> None:
        """Forget the pages of a server."""
        with self.lock:
            known.is_loaded, known.num_cut = False, 0
            self._choose()
            if not known.num_pages:
                return
        for rows in self._table.rows_of(known.slot):
            with self.lock:
                num_cleared, num_unheld = self._table.clear_bit(rows, known.slot)
                self._num_held -= num_unheld
                known.num_pages -= num_cleared

    def loaded(self, known: MirroredPeer) -> None:
        """Note that all pages of a server were added."""
        with self.lock:
            known.is_loaded = True
            self._choose()

    def has_room(self, known: MirroredPeer) -> bool:
        """Whether the pages of a server that is cut would fit by now."""
        return 0 < known.num_cut < _ROOM * self.max_pages - self._num_held

    def add_pages(self, known: MirroredPeer, pages: Fingerprints) -> bool:
        """Note that a server holds pages. Returns false where they do not fit: ``cut`` it."""
        pages = distinct(pages)
        starts = range(0, len(pages), _PIECE)
        return all(self._add(known, pages[start : start + _PIECE]) for start in starts)

    def cut(self, known: MirroredPeer, num_pages: int) -> None:
        """Find nothing at a server that has about so many pages. A conversation is found up to its
        first page that is not known, so most pages of a server are worth little."""
        self.unload(known)  # which is by pieces
        known.num_cut = max(num_pages, 1)

    def remove_pages(self, known: MirroredPeer, pages: Fingerprints) -> None:
        """Note that a server no longer holds pages."""
        pages = distinct(pages)
        for start in range(0, len(pages), _PIECE):
            with self.lock:
                self._clear([known], pages[start : start + _PIECE])

    def _add(self, known: MirroredPeer, pages: Fingerprints) -> bool:
        table = self._table
        if table.num_used + len(pages) > table.capacity or known.slot >= (
            table.num_words * WORD_BITS
        ):
            self._grow(len(pages))
        with self.lock:
            table = self._table
            rows = table.find(pages)
            wanted = int(np.count_nonzero(~table.holders(rows).any(axis=0)))
            most = self.max_pages if known.is_loaded else _ROOM * self.max_pages
            if wanted and self._num_held + wanted > most:
                return False
            new = rows < 0
            rows[new] = table.add(pages[new])
            num_new, num_unheld = table.set_bit(rows, known.slot)
            known.num_pages += num_new
            self._num_held += num_unheld
            return True

    def _grow(self, num_new: int) -> None:
        """Make a larger table, without the places of pages that have lost their last holder."""
        with self.lock:
            self._hidden = []
            table, num_held = self._table, self._num_held
        wanted = min(num_held + max(num_held // 2, 1 << 13), self.max_pages) + num_new
        num_words = max(-(-self._num_slots // WORD_BITS), table.num_words)
        copy = table.copied(wanted, num_words)
        with self.lock:
            self._table = copy
            hidden, self._hidden = self._hidden or [], None
            for pages in hidden:  # counted already
                rows = copy.find(pages)
                for known in self._peers.values():
                    copy.clear_bit(rows[rows >= 0], known.slot)
            self._choose()

    def _clear(self, peers: Iterable[MirroredPeer], pages: Fingerprints) -> None:
        """Remove holders of pages. The caller holds the lock."""
        rows = self._table.find(pages)
        rows = rows[rows >= 0]
        for known in peers:
            if known.slot >= self._table.num_words * WORD_BITS:
                continue  # no page of it is known yet
            num_cleared, num_unheld = self._table.clear_bit(rows, known.slot)
            self._num_held -= num_unheld
            known.num_pages -= num_cleared

    def _choose(self) -> None:
        """Replace the view. The caller holds the lock."""
        now, digest = self._clock(), self._digest()
        usable = [0] * self._table.num_words
        for known in self._peers.values():
            word = known.slot // WORD_BITS
            if (
                known.is_live
                and known.is_loaded
                and word < len(usable)
                and known.avoided_until <= now
                and digest in (known.digest, known.agreed_with)
            ):
                usable[word] |= 1 << known.slot % WORD_BITS
        peers = np.full(self._num_slots + 1, None)
        for known in self._peers.values():
            peers[known.slot] = known.peer
        agreed = digest if any(usable) else None
        self._view = _View(self._table, np.array(usable, np.uint64), peers, agreed)

    def check_integrity(self) -> None:
        with self.lock:
            self._table.check_integrity(self._num_held)
            assert self._num_held <= self.max_pages, f"{self._num_held} pages mirrored"
            counted = {known.slot: known.num_pages for known in self._peers.values()}
            assert len(counted) == len(self._peers), "two servers have the same slot"
            for slot in range(self._table.num_words * WORD_BITS):
                bits, most = sum(map(len, self._table.rows_of(slot))), counted.pop(slot, 0)
                assert bits == most, f"slot {slot} has {bits} pages, counted {most}"
            assert not any(counted.values()), f"{counted} pages of servers without a place"


def fingerprints_of(keys: Sequence[bytes]) -> Fingerprints:
    """The first 8 bytes of each key of 32, little-endian."""
    return np.frombuffer(b"".join(keys), "<u8")[::4]


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

"""The pages that other servers hold, as this one knows them, of one namespace. Memory only.

One thread writes (the follower); ``find`` takes no lock, ``hide_pages`` and ``avoid`` take one for
a moment. An answer that does not follow on what is known of a server changes nothing: the same is
asked again, and a server answers from any position.

A page is found at a peer only while it is followed, its snapshot is here, it answers, and it has
applied exactly the erasures that this server has. So a page that was erased here cannot come back
from a peer that has not erased it yet.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered.errors import TransferError
from sglang_tiered.sharing.pages.messages import ID_BYTES, MAX_FINGERPRINTS
from sglang_tiered.sharing.table import WORD_BITS, PageTable, choose_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from sglang_tiered.sharing.pages.messages import Changes

    Fingerprints = npt.NDArray[np.uint64]


_PIECE = 1 << 11  # pages added while the lock is held once
_ROOM = 0.95  # of the bound is for servers that begin; the rest for what those known store since


UNTOLD = b"\xff" * ID_BYTES
"""No digest: who says that it was told this one is answered at once."""


@dataclass(eq=False, slots=True)
class MirroredPeer:
    """What is known of one server. Its follower sets ``digest``, ``agreed_with`` and ``is_live``,
    and then calls ``choose``. The mirror's lock guards the rest, but for the position, which is the
    follower's."""

    server: str  # random hex id of one process's rank
    address: str  # "tcp://IP:port" of its page server
    slot: int
    digest: bytes = b""  # of the erasures that it has applied
    agreed_with: bytes = b""  # another digest, whose difference from that one is settled
    is_live: bool = False  # connected, and of this namespace
    is_loaded: bool = False  # all its pages are known
    num_pages: int = 0
    num_cut: int = 0  # of its pages, of which nothing is known while there is no room for all
    avoided_until: float = 0.0
    epoch: int = 0
    sequence: int = 0  # of the last change that is known
    cursor: int | None = 0  # the next fingerprint of a snapshot; None: all of it is known
    num_taken: int = 0  # fingerprints of the snapshot

    @property
    def position(self) -> tuple[int, int, int | None]:
        """How far it was read, as ``Follow`` says it."""
        return self.epoch, self.sequence, self.cursor


class _View(NamedTuple):
    """The data that ``find`` reads, replaced as a whole."""

    table: PageTable
    usable: npt.NDArray[np.uint64]  # [words], the bits of peers that pages are found at
    addresses: npt.NDArray[np.object_]  # by slot, or None; the last is None, which -1 means
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

    def find(self, keys: Sequence[bytes], without: Iterable[str] = ()) -> list[str | None]:
        """The address of a usable server that holds each page, none of those ``without``."""
        view = self._view
        if not keys or view.digest is None or view.digest != self._digest():
            return [None] * len(keys)
        pages = fingerprints_of(keys)
        bits = view.table.holders(view.table.find(pages)) & view.usable[:, None]
        for slot in [known.slot for each in without for known in self._at(each)]:
            if slot < len(bits) * WORD_BITS:
                bits[slot // WORD_BITS] &= ~np.uint64(1 << slot % WORD_BITS)
        if not bits.any():
            return [None] * len(keys)
        slots = choose_slots(bits, pages, self._salt)
        found: list[str | None] = view.addresses.take(slots).tolist()
        return found

    def _at(self, address: str) -> list[MirroredPeer]:
        return [known for known in tuple(self._peers.values()) if known.address == address]

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

    def avoid(self, address: str, seconds: float) -> None:
        with self.lock:
            for known in self._at(address):
                known.avoided_until = self._clock() + seconds
            self._choose()

    def choose(self) -> None:
        """Decide again at which peers pages are found."""
        with self.lock:
            self._choose()

    @property
    def num_peers(self) -> int:
        """Of servers that are followed and answer. Takes no lock."""
        return sum(known.is_live for known in tuple(self._peers.values()))

    @property
    def num_usable(self) -> int:
        """Of those, that pages are found at."""
        return sum(word.bit_count() for word in self._view.usable.tolist())

    @property
    def num_pages(self) -> int:
        """Different ones."""
        return self._num_held

    # ---- The follower's thread ----

    def join(self, server: str, address: str) -> MirroredPeer | None:
        """Know a server from now on; None if it is known, or beyond ``max_peers``."""
        with self.lock:
            if server in self._peers or len(self._peers) >= self._max_peers:
                return None
            taken = {known.slot for known in self._peers.values()}
            slot = next(slot for slot in range(self._max_peers) if slot not in taken)
            known = self._peers[server] = MirroredPeer(server, address, slot)
            return known

    @property
    def _num_slots(self) -> int:
        return max((known.slot + 1 for known in self._peers.values()), default=0)

    def drop(self, known: MirroredPeer) -> None:
        """Know a server no longer."""
        self.unload(known)
        with self.lock:
            if self._peers.get(known.server) is known:
                del self._peers[known.server]
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

    def take(
        self, known: MirroredPeer, message: Changes, payload: Iterable[bytes | memoryview]
    ) -> None:
        """Take up what came and went of the pages of a server. Where they do not all fit, only
        their number is kept (``num_cut``), until there is room. Raises ``TransferError`` for a
        breach of the protocol."""
        added, removed = _changed_pages(message, payload)
        if message.start == 0:
            self.unload(known)
            known.epoch, known.sequence, known.cursor = message.epoch, message.sequence, 0
            known.num_taken = 0
        if message.epoch != known.epoch:
            return
        if message.start is not None:
            if message.start == known.cursor and message.sequence >= known.sequence:
                self._take_piece(known, message.end, added)
        elif known.cursor is None and message.sequence == known.sequence + 1:
            self._take_change(known, added, removed)
        if known.cursor is None and 0 < known.num_cut < _ROOM * self.max_pages - self._num_held:
            known.cursor = 0  # they would fit by now

    def _take_piece(self, known: MirroredPeer, end: int | None, added: Fingerprints) -> None:
        known.num_taken += max(len(added), 1)
        if known.num_taken > 4 * self.max_pages + MAX_FINGERPRINTS:
            raise TransferError("a page server names pages without an end.")
        cursor = None if end is None else end + 1
        if not self.add_pages(known, added):
            part = (cursor or 1 << 64) / (1 << 64)  # fingerprints are spread evenly
            self.cut(known, int(known.num_taken / part))
            cursor = None
        elif cursor is None:
            self.loaded(known)
        known.cursor = cursor

    def _take_change(self, known: MirroredPeer, added: Fingerprints, removed: Fingerprints) -> None:
        if known.num_cut:
            known.num_cut = max(known.num_cut + len(added) - len(removed), 1)
        else:
            self.remove_pages(known, removed)
            if not self.add_pages(known, added):
                self.cut(known, known.num_pages + len(added))
        known.sequence += 1

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
        addresses = np.full(self._num_slots + 1, None)
        for known in self._peers.values():
            addresses[known.slot] = known.address
        agreed = digest if any(usable) else None
        self._view = _View(self._table, np.array(usable, np.uint64), addresses, agreed)

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


def _changed_pages(
    message: Changes, payload: Iterable[bytes | memoryview]
) -> tuple[Fingerprints, Fingerprints]:
    """Return the fingerprints that came and went. Raises ``TransferError`` for a breach."""
    data = b"".join(payload)
    if len(data) != 8 * (message.num_added + message.num_removed):
        raise TransferError(
            f"a page server sent {len(data)} bytes for {message.num_added} pages that came and "
            f"{message.num_removed} that went."
        )
    if message.end is not None and not (message.start or 0) <= message.end < 1 << 64:
        raise TransferError("a page server sent a piece that ends before it begins.")
    pages = np.frombuffer(data, "<u8")
    return pages[: message.num_added], pages[message.num_added :]


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

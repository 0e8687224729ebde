"""``LocalityIndex``: which other server holds a page. Lookups are memory only.

Two threads, each with a connection of its own: one publishes (``publisher``), one reads
(``reader``). Their common state is in ``state``, the pages of other servers in ``mirror``.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.sharing.locality.applied_purges import AppliedPurges
from sglang_tiered.sharing.locality.connection import IndexConnection
from sglang_tiered.sharing.locality.formats import is_address, is_serving
from sglang_tiered.sharing.locality.mirror import Peer
from sglang_tiered.sharing.locality.publisher import Publisher
from sglang_tiered.sharing.locality.reader import Reader
from sglang_tiered.sharing.locality.state import IndexState
from sglang_tiered.sharing.locality.url import parse_index_url
from sglang_tiered.storage.promises import ended, is_true, keep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt

    from sglang_tiered.sharing.locality.applied_purges import NoteStore
    from sglang_tiered.sharing.locality.formats import Serving
    from sglang_tiered.sharing.locality.purge_reader import EraseWanted
    from sglang_tiered.sharing.settings import PeerSettings
    from sglang_tiered.storage.base import Erasure

    Held = Callable[[int], tuple[int, npt.NDArray[np.uint64]] | None]

__all__ = ["LocalityIndex", "LocalityStats", "Peer"]

NAMESPACE_BYTES = 32
_CLOSE_S = 2.0
_LEAVE_S = 0.5  # for removing this server's record from Redis


@dataclass(frozen=True, slots=True)
class LocalityStats:
    """Counters since opening, and gauges of now. Reading them takes no I/O."""

    connected: bool  # Redis answered the latest question who holds what
    trouble: str  # why it does not answer, or refuses what we publish, as one clause; or empty
    num_peers: int  # live servers whose pages are mirrored
    num_usable_peers: int  # of those, that pages are found at now
    num_mirrored_pages: int  # different pages known to be held by others
    num_not_mirrored: int  # pages of live servers beyond ``max_pages``, as last seen
    mirror_bytes: int
    num_published_pages: int  # that others may find here
    num_fingerprints_published: int  # told to others, snapshots included
    num_fingerprints_read: int
    num_snapshots_published: int
    num_snapshots_read: int
    num_errors: int  # failed exchanges with Redis, connections refused included
    num_garbage: int  # values that were ignored
    num_published_anew: int  # what we had in Redis was gone or not ours any more
    num_purges_told: int  # begun here and in Redis
    num_purges_applied: int  # told by others
    num_purges_waiting: int  # begun here, not yet in Redis


class LocalityIndex:
    """Opening returns at once: while Redis cannot be reached, no page is found, and connecting is
    retried with backoff. Raises ``ConfigError`` (one sentence, no password) only for settings that
    cannot work. Every method may be called from any thread.

    ``held(version)`` returns the pages that this server can serve now as (a version above 0,
    fingerprints in any order), or None if nothing changed since ``version``; ``RegionView`` has it.
    ``erase_wanted(what)`` must hide this server's own pages before it returns, and returns whether
    that is durable; it must spread nothing. Both are called on threads of the index and may block.
    ``notes`` keep what was erased over a restart; without them it is called again for what was
    erased in the last days.
    """

    def __init__(
        self,
        settings: PeerSettings,
        *,
        namespace: bytes,
        held: Held,
        erase_wanted: EraseWanted,
        notes: NoteStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_namespace(namespace)
        self._pid = os.getpid()
        url = parse_index_url(settings.index_url)
        self._state = state = IndexState(settings, namespace, clock)
        memory = None if notes is None else AppliedPurges(notes, state.book, clock)
        if memory is not None:
            memory.recall()
        self._connections = [IndexConnection(url, settings.index_timeout_s) for _ in range(2)]
        reader = Reader(state, self._connections[1], erase_wanted)
        bodies = (
            ("locality-publisher", Publisher(state, self._connections[0], held, memory).run),
            ("locality-reader", reader.run),
        )
        self._threads = [
            threading.Thread(target=body, name=name, daemon=True) for name, body in bodies
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"LocalityIndex({self._state.settings.shown_url})"

    @property
    def server(self) -> str:
        """This server's id, as others see it. It changes if another server is found to use it."""
        return self._state.server

    @property
    def connected(self) -> bool:
        """Whether Redis answered the latest question of the reader."""
        return not self._state.closed and self._state.trouble.works("reader")

    def announce(self, address: str) -> None:
        """Publish this server's pages at ``tcp://host:port``. Raises ``ValueError`` for an address
        that other servers would not accept."""
        if not is_address(address):
            raise ValueError(f"{address!r} is not an address of the form tcp://host:port")
        state = self._state
        with state.lock:
            state.address = address
            state.publisher_wakes.notify_all()

    def announce_serving(self, serving: Serving) -> None:
        """Publish where this server answers requests, beside its pages, from its next sign of life
        on. Raises ``ValueError`` for what readers would not accept."""
        if not is_serving(serving):
            raise ValueError(f"{serving} is not where a server answers requests")
        state = self._state
        with state.lock:
            state.serving = serving
            state.beat_now = True
            state.publisher_wakes.notify_all()

    def find(self, keys: Sequence[bytes]) -> list[Peer | None]:
        """Another live server that holds each page, or None; consecutive pages at one server if
        possible. Memory only, so also for the scheduler's thread."""
        return self._state.mirror.find(keys)

    def lacks(self, peer: Peer, keys: Sequence[bytes]) -> None:
        """Note that a server does not hold pages: they are not found there until it publishes them
        again."""
        self._state.mirror.lacks(peer.server, keys)

    def avoid(self, peer: Peer, seconds: float) -> None:
        """Find nothing at a server for a while, since it does not answer."""
        self._state.mirror.avoid(peer.server, seconds)

    def erase(self, what: Erasure, local: Future[bool] | None = None) -> Future[bool]:
        """Ask every server to erase, unless one of them told it, as this one has begun to; what is
        ``local`` is true once that is durable here. Memory only. No page is found at another server
        until it says that it has done so, and single pages only once it publishes them again. True
        once Redis has it; of single pages, once every server that lives says that it has done so:
        the others do it when they are back."""
        state = self._state
        if what.keys:
            state.mirror.hide_pages(what.keys)
        if what.is_empty or not what.spread:
            return ended(True)
        is_done = state.book.begin(what, local)
        state.mirror.choose()
        with state.lock:
            if state.closed:
                keep(is_done, False)
            state.look_now = state.look_now or what.keys is not None
            state.publisher_wakes.notify_all()
            state.reader_wakes.notify_all()
        return is_done

    def set_namespace(self, namespace: bytes) -> None:
        """Continue under another namespace: pages of the old one are neither found nor published.
        Raises ``ValueError`` for a digest of the wrong length."""
        _check_namespace(namespace)
        state = self._state
        with state.lock:
            if namespace == state.namespace:
                return
            state.namespace = namespace
            state.epoch += 1
            state.book.change_namespace(namespace)
            state.mirror.hide(state.epoch)
            state.look_now = True
            state.publisher_wakes.notify_all()
            state.reader_wakes.notify_all()

    def refresh(self, timeout_s: float) -> bool:
        """Publish this server's changes and read those of others. Returns whether both succeeded in
        time."""
        state, order = self._state, self._state.promises.make()
        with state.lock:
            if state.closed:
                return False
            state.to_publish.append(order)
            state.publisher_wakes.notify_all()
        return is_true(order, timeout_s)

    def stats(self) -> LocalityStats:
        state = self._state
        num_peers, num_usable, num_pages, num_cut, num_bytes = state.mirror.figures()
        trouble, book = state.trouble, state.book
        return LocalityStats(
            connected=self.connected,
            trouble=trouble.clause,
            num_peers=num_peers,
            num_usable_peers=num_usable,
            num_mirrored_pages=num_pages,
            num_not_mirrored=num_cut,
            mirror_bytes=num_bytes,
            num_published_pages=state.num_published_pages,
            num_fingerprints_published=state.num_fingerprints_published,
            num_fingerprints_read=state.num_fingerprints_read,
            num_snapshots_published=state.num_snapshots_published,
            num_snapshots_read=state.num_snapshots_read,
            num_errors=trouble.num_errors,
            num_garbage=state.num_garbage,
            num_published_anew=state.num_published_anew,
            num_purges_told=book.num_told,
            num_purges_applied=book.num_applied,
            num_purges_waiting=book.num_due,
        )

    def close(self) -> None:
        """Leave the index, if Redis answers at once. Idempotent. In a process forked from the one
        that opened it, this ends only the copy of that process."""
        state = self._state
        with state.lock:
            state.closed = True
            state.publisher_wakes.notify_all()
            state.reader_wakes.notify_all()
        state.promises.close()
        state.mirror.hide(-1)
        if os.getpid() != self._pid:
            return
        self._connections[1].interrupt()
        self._threads[0].join(_LEAVE_S)
        if self._threads[0].is_alive():
            self._connections[0].interrupt()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        state.book.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming every term when the books do not balance."""
        self._state.mirror.check_integrity()
        self._state.book.check_integrity()


def _check_namespace(namespace: bytes) -> None:
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"a namespace has {len(namespace)} bytes, must be {NAMESPACE_BYTES}")

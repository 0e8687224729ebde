"""``LocalityIndex``: which other server holds a page. Lookups are memory only.

Two threads, each with a connection of its own: one publishes (``publisher``), one reads
(``reader``). What they share is in ``state``, what others hold in ``mirror``.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from sglang_tiered.sharing.locality.applied_purges import PurgeMemory
from sglang_tiered.sharing.locality.connection import IndexConnection
from sglang_tiered.sharing.locality.formats import is_address
from sglang_tiered.sharing.locality.mirror import Peer
from sglang_tiered.sharing.locality.publisher import Publisher
from sglang_tiered.sharing.locality.reader import Reader
from sglang_tiered.sharing.locality.state import IndexState
from sglang_tiered.sharing.locality.stats import LocalityStats
from sglang_tiered.sharing.locality.url import parse_index_url
from sglang_tiered.storage.promises import is_true, keep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt

    from sglang_tiered.sharing.locality.applied_purges import NoteStore
    from sglang_tiered.sharing.locality.purge_reader import PurgeWanted
    from sglang_tiered.sharing.settings import PeerSettings

    Held = Callable[[int], tuple[int, npt.NDArray[np.uint64]] | None]

__all__ = ["LocalityIndex", "Peer"]

NAMESPACE_BYTES = 32
_CLOSE_S = 2.0
_LEAVE_S = 0.5  # for taking our record out of Redis


class LocalityIndex:
    """Opening returns at once: a Redis that cannot be reached is "nobody holds anything", and is
    tried again with backoff. Raises ``ConfigError`` (one sentence, no password) only for settings
    that cannot work. Every method may be called from any thread.

    ``held(version)`` gives the pages that this server can serve now as (a version above 0,
    fingerprints in any order), or None if nothing changed since ``version``; ``RegionView`` has
    it. ``purge_wanted(tenant)`` must forget what this server itself keeps of a tenant (None: of
    everyone) before it returns, and returns what tells when it has done so for good (None: it has);
    it must not begin a purge here, nor in a store that servers share. Both are called on threads of
    the index and may take their time. ``notes`` keep what was applied for good over a restart;
    without them ``purge_wanted`` is called again for purges of days ago.
    """

    def __init__(
        self,
        settings: PeerSettings,
        *,
        namespace: bytes,
        held: Held,
        purge_wanted: PurgeWanted,
        notes: NoteStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_namespace(namespace)
        self._pid = os.getpid()
        url = parse_index_url(settings.index_url)
        self._state = state = IndexState(settings, namespace, clock)
        memory = None if notes is None else PurgeMemory(notes, state.book, clock)
        if memory is not None:
            memory.recall()
        self._connections = [IndexConnection(url, settings.index_timeout_s) for _ in range(2)]
        bodies = (
            ("locality-publisher", Publisher(state, self._connections[0], held, memory).run),
            ("locality-reader", Reader(state, self._connections[1], purge_wanted).run),
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
        """Our own id, as others see it. Another one if somebody else is found to use it."""
        return self._state.server

    @property
    def connected(self) -> bool:
        """Whether Redis answered the latest question who holds what."""
        return not self._state.closed and self._state.trouble.works("reader")

    def announce(self, address: str) -> None:
        """From now on others may ask for our pages at ``tcp://host:port``. Raises ``ValueError``
        for an address that no other server would take."""
        if not is_address(address):
            raise ValueError(f"{address!r} is no address of the form tcp://host:port")
        state = self._state
        with state.lock:
            state.address = address
            state.publisher_wakes.notify_all()

    def find(self, keys: Sequence[bytes]) -> list[Peer | None]:
        """Another live server that holds each page; consecutive pages at one server as far as
        possible. Memory only, for the scheduler thread too."""
        return self._state.mirror.find(keys)

    def lacks(self, peer: Peer, keys: Sequence[bytes]) -> None:
        """It answered that it does not hold them: not found there until it says so anew."""
        self._state.mirror.lacks(peer.server, keys)

    def avoid(self, peer: Peer, seconds: float) -> None:
        """It does not answer: nothing is found there for a while."""
        self._state.mirror.avoid(peer.server, seconds)

    def begin_purge(self, tenant: bytes | None, local: Future[bool] | None = None) -> Future[bool]:
        """Tell every server to forget a tenant (None: everyone), which this one has forgotten;
        ``local`` tells when for good. Memory only. Until another server says that it has done so,
        nothing is found there."""
        state = self._state
        purge = state.book.begin(tenant, local)
        state.mirror.choose()
        with state.lock:
            if state.closed:
                keep(purge, False)
            state.publisher_wakes.notify_all()
        return purge

    def set_namespace(self, namespace: bytes) -> None:
        """Continue under another namespace: nothing of the old one is found any more, nor
        published. Raises ``ValueError`` for a digest of the wrong length."""
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
        """Whether our changes are published and the others' read, within that time."""
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
        """Leave the index, as far as Redis answers at once. Idempotent. In a process forked from
        the one that opened it, only this process' part of it ends."""
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

"""``LocalityIndex``: which other server holds a page. Lookups are memory only."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.sharing.locality.stats import LocalityStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from sglang_tiered.sharing.settings import PeerSettings

    Held = Callable[[int], tuple[int, npt.NDArray[np.uint64]] | None]

__all__ = ["LocalityIndex", "Peer", "ToldPurge"]


class Peer(NamedTuple):
    """Another server."""

    server: str  # random hex id of one process's rank
    address: str  # "tcp://host:port" of its page server


class ToldPurge:
    """A purge begun here, on its way to the others."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._told = False

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it is in Redis; false when the time runs out or the index was closed before."""
        return self._ended.wait(timeout_s) and self._told

    def end(self, *, told: bool) -> None:
        self._told = told
        self._ended.set()


class LocalityIndex:
    """Opening returns at once: a Redis that cannot be reached is "nobody holds anything", and is
    tried again with backoff. Raises ``ConfigError`` (one sentence, no password) only for settings
    that cannot work. Every method may be called from any thread.

    ``held(version)`` gives the pages that this server can serve now as (a version above 0,
    fingerprints in any order), or None if nothing changed since ``version``; ``RegionView`` has
    it. ``purge_wanted(tenant)`` must forget what this server itself keeps of a tenant (None: of
    everyone) before it returns; it must not begin a purge here, nor in a store that servers share.
    Both are called on threads of the index and may take their time.
    """

    def __init__(
        self,
        settings: PeerSettings,
        *,
        namespace: bytes,
        held: Held,
        purge_wanted: Callable[[bytes | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings

    @property
    def server(self) -> str:
        """Our own id, as others see it."""
        return ""

    def announce(self, address: str) -> None:
        """From now on others may ask for our pages at ``tcp://host:port``."""

    def find(self, keys: Sequence[bytes]) -> list[Peer | None]:
        """Another live server that holds each page; consecutive pages at one server as far as
        possible. Memory only, for the scheduler thread too."""
        return [None] * len(keys)

    def lacks(self, peer: Peer, keys: Sequence[bytes]) -> None:
        """It answered that it does not hold them: not found there until it says so anew."""

    def avoid(self, peer: Peer, seconds: float) -> None:
        """It does not answer: nothing is found there for a while."""

    def begin_purge(self, tenant: bytes | None) -> ToldPurge:
        """Tell every server to forget a tenant (None: everyone). Memory only: until it is in
        Redis and another server has applied it, nothing is found there."""
        purge = ToldPurge()
        purge.end(told=False)
        return purge

    def set_namespace(self, namespace: bytes) -> None:
        """Continue under another namespace: nothing of the old one is found any more."""

    def refresh(self, timeout_s: float) -> bool:
        """Whether our changes are published and the others' read, within that time."""
        return False

    def stats(self) -> LocalityStats:
        return LocalityStats(False, "not built yet", *[0] * 16)

    def close(self) -> None:
        """Leave the index, as far as Redis answers at once. Idempotent."""

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming every term when the books do not balance."""

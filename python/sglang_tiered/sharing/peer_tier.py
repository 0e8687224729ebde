"""``PeerTier``: pages that other servers hold on their NVMe, as a source for loads.

The locality index knows the holders, in memory; pages come over ZeroMQ from the holder and are
verified before a job reports them. The tier also serves the pages of the own region store to other
servers. It stores nothing: the caller keeps the pages that it fetched.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError, TransferError
from sglang_tiered.sharing.locality.index import LocalityIndex
from sglang_tiered.sharing.own_address import own_address
from sglang_tiered.sharing.page_source import PageSource
from sglang_tiered.sharing.pages.client import PageClient
from sglang_tiered.sharing.pages.landing import Outcome
from sglang_tiered.sharing.pages.server import PageServer
from sglang_tiered.sharing.pages.settings import PageSettings
from sglang_tiered.sharing.peer_loading import PeerLoader
from sglang_tiered.storage.base import (
    Health,
    LookupResult,
    RemoteTier,
    Stop,
    Tier,
    TierStats,
)
from sglang_tiered.wire.keys import PEER, load_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.sharing.locality.formats import Serving
    from sglang_tiered.sharing.locality.purge_reader import EraseWanted
    from sglang_tiered.sharing.settings import PeerSettings
    from sglang_tiered.storage.base import Erasure, Job, Run
    from sglang_tiered.storage.region.engine import RegionEngine

__all__ = ["PeerStats", "PeerTier"]

logger = logging.getLogger(__name__)

_MANY_KEYS = 8  # own keys looked up for each that is wanted


@dataclass(frozen=True, slots=True)
class PeerStats(TierStats):
    """``health`` is of what can be fetched."""

    # Fetched from others, in pages unless the name says otherwise.
    num_fetched: int = 0
    bytes_fetched: int = 0
    num_missed: int = 0  # the holder no longer had them
    num_damaged: int = 0  # did not verify
    num_late: int = 0  # the deadline passed first
    num_busy: int = 0  # the holder had too much to do
    num_lost: int = 0  # the holder could not be reached, or did not answer
    num_recovered: int = 0  # that a second holder served
    num_inflight_jobs: int = 0
    # Served to others.
    num_served: int = 0
    bytes_served: int = 0
    num_served_misses: int = 0
    num_refused: int = 0  # answered "busy"
    num_breaches: int = 0  # messages, either way, that broke the protocol
    serving_bytes: int = 0  # being read for others, or not yet sent
    # The index.
    is_connected: bool = False
    num_peers: int = 0  # alive
    num_pages_mirrored: int = 0
    num_index_errors: int = 0
    num_purges_told: int = 0
    num_purges_applied: int = 0


class PeerTier(RemoteTier):
    """``erase`` erases on this server what another one told; it is called on a thread of the index,
    and may block. The tier reads from ``region``, which its owner closes after the tier.

    Raises ``ConfigError`` for an invalid URL, missing keys, or an address that it cannot listen on.
    A Redis that cannot be reached is not an error.
    """

    tier = Tier.PEER

    def __init__(
        self,
        settings: PeerSettings,
        *,
        namespace: bytes,
        region: RegionEngine,
        erase: EraseWanted,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        keys = None
        if settings.keys_directory is not None:
            keys = load_keys(Path(settings.keys_directory), PEER)
        pages = PageSettings(
            connect_timeout_s=settings.connect_timeout_s,
            window_bytes=settings.window_bytes,
            max_serving_bytes=settings.max_serving_bytes,
        )
        self._region = region
        self._namespace = namespace
        self._closed = False
        self._lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            try:
                self._server = PageServer(
                    PageSource(region, max_free_bytes=settings.max_serving_bytes // 2),
                    namespace=namespace,
                    host=settings.listen_host,
                    port=settings.listen_port,
                    settings=pages,
                    keys=keys,
                )
            except TransferError as error:
                raise ConfigError(str(error)) from error
            undo.callback(self._server.stop)
            self.address = own_address(settings, self._server.port)
            self._client = PageClient(pages, keys=keys, clock=clock)
            undo.callback(self._client.close)
            self._index = LocalityIndex(
                settings,
                namespace=namespace,
                held=region.view.fingerprints,
                erase_wanted=erase,
                notes=region.notes,
                clock=clock,
            )
            undo.pop_all()
        self._loader = PeerLoader(self._index, self._client, clock)
        self._index.announce(self.address)
        logger.info(
            "pages are shared at %s, found through the index at %s",
            self.address,
            settings.shown_url,
        )

    @property
    def server(self) -> str:
        """This server's id in the index; it changes if another server is found to use it."""
        return self._index.server

    def announce_serving(self, serving: Serving) -> None:
        """Have the index say where this server answers requests. Raises ``ValueError`` for what
        others would not accept."""
        self._index.announce_serving(serving)

    # ---- Lookups ----

    @property
    def health(self) -> Health:
        """RUNNING, MISS_ONLY while the index does not answer, FAILED once closed."""
        if self._closed:
            return Health.FAILED
        return Health.RUNNING if self._index.stats().connected else Health.MISS_ONLY

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        if self.health is not Health.RUNNING:
            return LookupResult(0, Stop.UNHEALTHY)
        found = self._index.find(keys)
        if None not in found:
            return LookupResult(len(keys), Stop.END)
        return LookupResult(found.index(None), Stop.MISS)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self.health is not Health.RUNNING:
            return [False] * len(keys)
        return [peer is not None for peer in self._index.find(keys)]

    def some_keys(self, limit: int) -> list[bytes]:
        """Keys that the own store holds too, since the index does not know whole keys."""
        own = self._region.some_keys(_MANY_KEYS * limit)
        held = zip(own, self.contains(own), strict=True)
        return list(itertools.islice((key for key, is_held in held if is_held), limit))

    # ---- Loads ----

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        answers = self.health is Health.RUNNING
        return self._loader.submit(run, self._namespace, deadline_s=deadline_s, answers=answers)

    # ---- Others ----

    def stats(self) -> PeerStats:
        health = self.health
        index, client, server = self._index.stats(), self._client.stats, self._server.stats
        trouble = index.trouble or "the index does not answer"
        reasons = {Health.RUNNING: "", Health.MISS_ONLY: trouble, Health.FAILED: "closed"}
        outcomes = client.outcomes
        return PeerStats(
            health=health,
            health_reason=reasons[health],
            num_fetched=outcomes[Outcome.OK],
            bytes_fetched=client.num_bytes,
            num_missed=outcomes[Outcome.MISS],
            num_damaged=outcomes[Outcome.DAMAGED],
            num_late=outcomes[Outcome.LATE],
            num_busy=outcomes[Outcome.BUSY],
            num_lost=outcomes[Outcome.LOST],
            num_recovered=self._loader.num_recovered,
            num_inflight_jobs=self._loader.num_inflight,
            num_served=server.num_served,
            bytes_served=server.bytes_served,
            num_served_misses=server.num_missed,
            num_refused=server.num_busy,
            num_breaches=client.num_breaches + server.num_breaches,
            serving_bytes=self._server.held_bytes,
            is_connected=index.connected,
            num_peers=index.num_peers,
            num_pages_mirrored=index.num_mirrored_pages,
            num_index_errors=index.num_errors,
            num_purges_told=index.num_purges_told,
            num_purges_applied=index.num_purges_applied,
        )

    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        """Ask every server to erase, as this one has begun to; ``local`` is true once that is
        durable here. Memory only; from now on no page is found at a server that has not done so.
        True once Redis has it; of single pages, once every server that lives has done so. Without
        ``spread`` the server that told it has asked every other one."""
        return self._index.erase(what, local)

    def set_namespace(self, namespace: bytes) -> None:
        """As the contract says; pages of the old namespace are no longer served either."""
        self._server.set_namespace(namespace)
        self._index.set_namespace(namespace)
        self._namespace = namespace

    def refresh(self, timeout_s: float) -> bool:
        """Publish this server's changes and read those of others. Returns whether both
        succeeded."""
        return self._index.refresh(timeout_s)

    def close(self) -> None:
        """End every job, leave the index, stop serving. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loader.close()
        self._client.close()
        self._index.close()
        self._server.stop()

    def check_integrity(self) -> None:
        num_inflight = self._loader.num_inflight
        assert not num_inflight, f"{num_inflight} loads under way"
        self._client.check_integrity()
        self._server.check_integrity()
        self._index.check_integrity()

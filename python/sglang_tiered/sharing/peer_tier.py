"""``PeerTier``: pages that other servers hold on their NVMe, as a source for loads.

Servers follow each other and know the holders, in memory; pages come over ZeroMQ from the holder
and are verified before a job reports them. The tier also serves the pages of the own region store
to other servers. It stores nothing: the caller keeps the pages that it fetched.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from sglang_tiered.errors import ConfigError, TransferError
from sglang_tiered.sharing.page_source import PageSource
from sglang_tiered.sharing.pages.client import PageClient
from sglang_tiered.sharing.pages.link import PageOutcome
from sglang_tiered.sharing.pages.server import PageServer
from sglang_tiered.sharing.settings import PageSettings
from sglang_tiered.sharing.sync import PeerSync
from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.base import (
    Health,
    Job,
    JobKind,
    Tier,
    TierEngine,
    TierStats,
)
from sglang_tiered.storage.promises import ended
from sglang_tiered.wire.keys import PEER, load_keys
from sglang_tiered.wire.sockets import endpoint_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.sharing.membership import Membership
    from sglang_tiered.sharing.mirror import Mirror
    from sglang_tiered.sharing.pages.link import PageFetch
    from sglang_tiered.sharing.settings import PeerSettings, Serving
    from sglang_tiered.sharing.sync import EraseWanted
    from sglang_tiered.storage.base import Erasure, Run
    from sglang_tiered.storage.jobs import LoadPart
    from sglang_tiered.storage.region.engine import RegionEngine


logger = logging.getLogger(__name__)


_BUSY_S = 0.2  # a holder that has too much to do is left alone for so long
_FIRST_AVOID_S = 0.5  # one that fails; twice as long each time
_MAX_AVOID_S = 30.0
_MAX_FAILING = 1024


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
    # Served to others.
    num_served: int = 0
    bytes_served: int = 0
    num_served_misses: int = 0
    num_refused: int = 0  # answered "busy"
    num_breaches: int = 0  # messages, either way, that broke the protocol
    serving_bytes: int = 0  # being read for others, or not yet sent
    # What they know of each other.
    is_discovering: bool = False  # names resolve, and the Redis answers
    num_peers: int = 0  # followed
    num_peers_withheld: int = 0  # of those, that no page is taken from: they erased other things
    num_pages_mirrored: int = 0
    num_failures: int = 0  # connections that ended, and names that were not found
    num_purges_told: int = 0
    num_purges_applied: int = 0


class PeerTier(TierEngine):
    """``erase`` erases on this server what another one told, where ``region`` did not yet; it is
    called on a thread of the tier, and may block. The tier reads from ``region``, which its owner
    closes after the tier.

    Raises ``ConfigError`` for an invalid URL, missing keys, or an address that it cannot listen on.
    Servers, names and a Redis that cannot be reached are no error.
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
        pages = PageSettings(connect_timeout_s=1.0)
        self._host = settings.listen_host
        self._closed = False
        self._lock = threading.Lock()
        self._sync = PeerSync(
            settings,
            namespace=namespace,
            held=region.view.fingerprints,
            erase=lambda what: region.erase_told(what, erase),
            notes=region,
            clock=clock,
        )
        # One thread for what arrives and one for what leaves: encryption is theirs.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2)
        try:
            self._server = PageServer(
                PageSource.of_region(region, max_free_bytes=pages.max_serving_bytes // 2),
                namespace=namespace,
                endpoint=endpoint_of(settings.listen_host, settings.listen_port or "*"),
                settings=pages,
                keys=keys,
                followers=self._sync.followers,
                context=self._context,
            )
        except TransferError as error:
            self._context.destroy(linger=0)
            raise ConfigError(str(error)) from error
        try:
            self._membership = self._join(settings)
        except BaseException:
            self._server.stop()
            self._context.destroy(linger=0)
            raise
        self._client = PageClient(pages, keys=keys, context=self._context, clock=clock)
        self._loader = PeerLoader(lambda: self._sync.mirror, self._client, clock)
        self._sync.start(self._server, self._membership, pages, keys)
        logger.info(
            "pages are shared at %s port %d, with the servers at %s",
            settings.listen_host,
            self._server.port,
            settings.shown_peers or "no address yet",
        )

    def _join(self, settings: PeerSettings) -> Membership | None:
        if settings.index is None:
            return None
        # Imported late: without a Redis its client is not needed.
        from sglang_tiered.sharing.membership import Membership

        return Membership(
            settings.index,
            namespace=lambda: self._sync.namespace,
            server=self.server,
            host=settings.listen_host,
            port=self._server.port,
            expiry_s=settings.expiry_s,
        )

    @property
    def server(self) -> str:
        """This server's id, as others see it."""
        return self._sync.followers.server.hex()

    @property
    def port(self) -> int:
        """The port at which others ask for pages."""
        return self._server.port

    @property
    def address(self) -> str:
        """Where others ask for pages, ``tcp://HOST:port``; the host as it was configured."""
        return endpoint_of(self._host, self.port)

    def announce_serving(self, serving: Callable[[str], Serving]) -> None:
        """Have the Redis, if there is one, say where this server answers requests: what ``serving``
        returns for the address, ``tcp://IP:port``, at which others find its pages."""
        if self._membership is not None:
            self._membership.serve(serving)

    # ---- Lookups ----

    @property
    def health(self) -> Health:
        """RUNNING, MISS_ONLY while no other server answers though there should be some, FAILED once
        closed."""
        if self._closed:
            return Health.FAILED
        return Health.MISS_ONLY if self._sync.trouble else Health.RUNNING

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self._closed:
            return [False] * len(keys)
        return [address is not None for address in self._sync.mirror.find(keys)]

    # ---- Loads ----

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        return self._loader.submit(run, self._sync.namespace, deadline_s=deadline_s)

    # ---- Others ----

    def stats(self) -> PeerStats:
        sync, client, server = self._sync, self._client, self._server
        mirror, trouble = sync.mirror, sync.trouble
        health = Health.FAILED if self._closed else self.health
        reasons = {Health.RUNNING: "", Health.MISS_ONLY: trouble, Health.FAILED: "closed"}
        return PeerStats(
            health=health,
            health_reason=reasons[health],
            num_fetched=client.outcomes[PageOutcome.OK],
            bytes_fetched=client.num_bytes,
            num_missed=client.outcomes[PageOutcome.MISS],
            num_damaged=client.outcomes[PageOutcome.DAMAGED],
            num_late=client.outcomes[PageOutcome.LATE],
            num_busy=client.outcomes[PageOutcome.BUSY],
            num_lost=client.outcomes[PageOutcome.LOST],
            num_recovered=self._loader.num_recovered,
            num_inflight_jobs=self._loader.num_inflight,
            num_served=server.num_served,
            bytes_served=server.bytes_served,
            num_served_misses=server.num_missed,
            num_refused=server.num_busy,
            num_breaches=client.num_breaches + server.num_breaches + sync.follower.num_breaches,
            serving_bytes=server.held_bytes,
            is_discovering=not (self._closed or sync.discovery.trouble),
            num_peers=mirror.num_peers,
            num_peers_withheld=max(0, mirror.num_peers - mirror.num_usable),
            num_pages_mirrored=mirror.num_pages,
            num_failures=sync.follower.num_failures + sync.discovery.num_failures,
            num_purges_told=sync.book.num_told,
            num_purges_applied=sync.book.num_applied,
        )

    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        """Ask every server to erase, as this one has begun to; ``local`` is true once that is
        durable here. Memory only; from now on no page is found at a server that has not done so.
        True once that is noted here and every server that lives has done so; those that do not
        learn it from any other when they are back. Without ``spread`` one of them told it."""
        if self._closed:
            return ended(False)
        return self._sync.begin(what, local)

    def set_namespace(self, namespace: bytes, *, keep: bool = True) -> None:
        """As the contract says; pages of the old namespace are no longer served either."""
        self._sync.set_namespace(namespace)
        self._server.set_namespace(namespace)

    def close(self) -> None:
        """End every job, leave the others, stop serving. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loader.close()
        self._client.close()
        self._sync.close()
        self._server.stop()
        with contextlib.suppress(zmq.ZMQError):
            self._context.destroy(linger=0)

    def check_integrity(self) -> None:
        num_inflight = self._loader.num_inflight
        assert not num_inflight, f"{num_inflight} loads under way"
        self._client.check_integrity()
        self._sync.check_integrity()


class PeerLoader:
    """Loads from other servers: each page from one holder, or from a second if that fails. A server
    that fails is avoided for a while. One that has a page no longer says so within a second.

    ``submit`` from any thread, memory only; parts end on the page client's thread. Does not own
    what it works with.
    """

    def __init__(
        self, mirror: Callable[[], Mirror], client: PageClient, clock: Callable[[], float]
    ) -> None:
        self._mirror = mirror
        self._client = client
        self._clock = clock
        self._inflight: set[Job] = set()
        self._backoffs: dict[str, Backoff] = {}  # of addresses that failed last
        self._closed = False
        self.num_recovered = 0  # pages that a second server had; the client's thread only

    def submit(self, run: Run, namespace: bytes, *, deadline_s: float | None) -> Job:
        """See ``PeerTier.submit_load``."""
        job = Job(JobKind.LOAD, run)
        if self._closed:
            job.finish()
            return job
        self._inflight.add(job)
        self._client.load(
            job,
            namespace,
            self._find,
            deadline_s=deadline_s,
            learn=self._learn,
            over=self._inflight.discard,
        )
        return job

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    def close(self) -> None:
        """Stop fetching. Loads under way end with the client."""
        self._closed = True

    def _find(self, keys: Sequence[bytes], failed: frozenset[str]) -> list[str | None]:
        """Find holders in the mirror, but never the same again, nor a third."""
        if self._closed or len(failed) > 1:
            return [None] * len(keys)
        return self._mirror().find(keys, failed)

    def _learn(self, part: LoadPart[str], fetch: PageFetch) -> None:
        address, seen = part.holder, set(fetch.outcomes)
        if part.failed:
            self.num_recovered += fetch.outcomes.count(PageOutcome.OK)
        if fetch.is_silent or seen & {PageOutcome.LOST, PageOutcome.DAMAGED}:
            if len(self._backoffs) >= _MAX_FAILING:
                self._backoffs.clear()
            fresh = Backoff(self._clock, _FIRST_AVOID_S, _MAX_AVOID_S)
            backoff = self._backoffs.setdefault(address, fresh)
            backoff.fail()
            self._mirror().avoid(address, backoff.wait_s)
        elif PageOutcome.OK in seen:
            self._backoffs.pop(address, None)
        if PageOutcome.BUSY in seen:
            self._mirror().avoid(address, _BUSY_S)

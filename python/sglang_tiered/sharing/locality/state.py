"""The state that the two threads of an index share with it."""

from __future__ import annotations

import logging
import secrets
import threading
from typing import TYPE_CHECKING

from sglang_tiered.sharing.locality.mirror import Mirror
from sglang_tiered.sharing.locality.purges import PurgeBook
from sglang_tiered.sharing.locality.redis_keys import RedisKeys
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.promises import Promises

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from sglang_tiered.sharing.locality.formats import Serving
    from sglang_tiered.sharing.settings import PeerSettings

__all__ = ["ConnectionHealth", "IndexState", "new_server"]

logger = logging.getLogger(__name__)


def new_server() -> str:
    """A random id for this server."""
    return secrets.token_hex(16)


class ConnectionHealth:
    """The last outcome of the two connections, by name. Thread-safe."""

    def __init__(self, shown_url: str) -> None:
        self._shown_url = shown_url
        self._lock = threading.Lock()
        self._clauses: dict[str, str] = {}
        self._answered: set[str] = set()
        self._log = OnceLog(logger)
        self.num_errors = 0

    @property
    def clause(self) -> str:
        """Empty while every connection works, or none was tried yet."""
        with self._lock:
            return next(iter(self._clauses.values()), "")

    def works(self, connection: str) -> bool:
        """Whether it was answered when last used."""
        return connection in self._answered and connection not in self._clauses

    def answered(self, connection: str) -> None:
        with self._lock:
            self._answered.add(connection)
            self._clauses.pop(connection, None)
            works = not self._clauses
        if works and self._log.settle_all():
            logger.info("the locality index at %s works again", self._shown_url)

    def failed(self, connection: str, clause: str) -> None:
        with self._lock:
            self.num_errors += 1
            self._clauses[connection] = clause
        self._log.report(
            clause,
            "the locality index at %s fails: %s; pages are shared with other servers only while it "
            "works; trying again",
            self._shown_url,
            clause,
        )


class IndexState:
    """``lock`` guards every attribute that is assigned; each counter has one writer."""

    def __init__(
        self, settings: PeerSettings, namespace: bytes, clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.lock = threading.Lock()
        self.publisher_wakes = threading.Condition(self.lock)
        self.reader_wakes = threading.Condition(self.lock)
        self.closed = False
        self.epoch = 0  # counts changes of the namespace
        self.namespace = namespace
        self.server = new_server()
        self.address: str | None = None
        self.serving: Serving | None = None  # where this server answers requests
        self.beat_now = False  # the publisher must not wait for its next sign of life
        self.look_now = False  # the reader must not wait
        self.promises = Promises()
        self.to_publish: list[Future[bool]] = []
        self.to_read: list[Future[bool]] = []
        self.gone: set[str] = set()  # ids without a record, for the publisher to remove
        self.trouble = ConnectionHealth(settings.shown_url)
        self.book = PurgeBook(namespace, settings.purge_retention_s, clock)
        self.mirror = Mirror(
            settings.max_pages,
            settings.max_peers,
            salt=secrets.randbits(63),
            digest=lambda: self.book.digest,
            clock=clock,
        )
        self.num_published_pages = 0
        self.num_fingerprints_published = 0
        self.num_snapshots_published = 0
        self.num_published_anew = 0
        self.num_fingerprints_read = 0
        self.num_snapshots_read = 0
        self.num_garbage = 0

    @property
    def names(self) -> RedisKeys:
        return RedisKeys.of(self.namespace)

    def wake_publisher(self) -> None:
        with self.lock:
            self.publisher_wakes.notify_all()

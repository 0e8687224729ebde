"""The state that the two threads of an index share with it."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_tiered.sharing.locality.connection_health import ConnectionHealth
from sglang_tiered.sharing.locality.mirror import Mirror
from sglang_tiered.sharing.locality.purges import PurgeBook
from sglang_tiered.sharing.locality.redis_keys import RedisKeys

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.sharing.settings import PeerSettings

__all__ = ["IndexState", "RefreshOrder", "new_server"]


def new_server() -> str:
    """A random id for this server."""
    return secrets.token_hex(16)


@dataclass(eq=False, slots=True)
class RefreshOrder:
    """Publish, then read, now."""

    published: threading.Event = field(default_factory=threading.Event)
    read: threading.Event = field(default_factory=threading.Event)
    succeeded: bool = False  # valid once ``read``


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
        self.look_now = False  # the reader must not wait
        self.to_publish: list[RefreshOrder] = []
        self.to_read: list[RefreshOrder] = []
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

"""What the two threads of an index share with it."""

from __future__ import annotations

import secrets
import threading
from typing import TYPE_CHECKING

from sglang_tiered.sharing.locality.connection_health import Trouble
from sglang_tiered.sharing.locality.mirror import Mirror
from sglang_tiered.sharing.locality.purges import PurgeBook
from sglang_tiered.sharing.locality.redis_keys import Names
from sglang_tiered.storage.promises import Promises

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from sglang_tiered.sharing.settings import PeerSettings

__all__ = ["IndexState", "new_server"]


def new_server() -> str:
    """A random id."""
    return secrets.token_hex(16)


class IndexState:
    """``lock`` guards what is assigned; counters have one writer each."""

    def __init__(
        self, settings: PeerSettings, namespace: bytes, clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.lock = threading.Lock()
        self.publisher_wakes = threading.Condition(self.lock)
        self.reader_wakes = threading.Condition(self.lock)
        self.closed = False
        self.epoch = 0  # of the namespace
        self.namespace = namespace
        self.server = new_server()
        self.address: str | None = None
        self.look_now = False  # the reader's wait is over
        self.promises = Promises()
        self.to_publish: list[Future[bool]] = []  # whoever waits for it, and to read
        self.to_read: list[Future[bool]] = []
        self.gone: set[str] = set()  # ids without a record, for the publisher to remove
        self.trouble = Trouble(settings.shown_url)
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
    def names(self) -> Names:
        return Names.of(self.namespace)

    def wake_publisher(self) -> None:
        with self.lock:
            self.publisher_wakes.notify_all()

    def wake_reader(self) -> None:
        with self.lock:
            self.look_now = True
            self.reader_wakes.notify_all()

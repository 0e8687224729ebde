"""Servers that share one locality index on a real Redis, without anything to serve.

As a program it is one of them: ``python -m locality_servers URL FIRST COUNT`` holds the pages
``FIRST`` and so on, says its id when others can find them, and then waits to be killed.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from kit.waiting import eventually
from sglang_tiered.sharing.locality.index import LocalityIndex
from sglang_tiered.sharing.locality.redis_keys import RedisKeys
from sglang_tiered.sharing.settings import PeerSettings
from sglang_tiered.storage.promises import ended

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future
    from types import TracebackType

    import numpy.typing as npt

    from sglang_tiered.storage.base import Erasure

__all__ = ["EXPIRY_S", "NAMESPACE", "NAMES", "Server", "Servers", "key"]

NAMESPACE = bytes(range(32))
NAMES = RedisKeys.of(NAMESPACE)
WAIT_S = 20.0
EXPIRY_S = 2.0  # 20 heartbeats, so that a busy machine does not let anybody seem dead


def key(page: int) -> bytes:
    return page.to_bytes(8, "little") + bytes(24)


class Server:
    """One server of the index: its pages, what it was told to purge, and its index."""

    def __init__(
        self,
        url: str,
        number: int,
        pages: Iterable[int] = (),
        *,
        announced: bool = True,
        **more: Any,
    ) -> None:
        namespace = more.pop("namespace", NAMESPACE)
        notes = more.pop("notes", None)
        values = {
            "publish_s": 0.02,
            "heartbeat_s": 0.1,
            "expiry_s": EXPIRY_S,
            "index_timeout_s": 1.0,
            **more,
        }
        self.settings = PeerSettings(index_url=url, **values)
        self._pages = np.array(sorted(pages), np.uint64)
        self._version = 1
        self._lock = threading.Lock()
        self.purged: list[bytes | None] = []
        self.forgotten: list[bytes] = []
        self.refuses_purges = False
        self.index = LocalityIndex(
            self.settings,
            namespace=namespace,
            held=self._held,
            erase_wanted=self._erase,
            notes=notes,
        )
        if announced:
            self.index.announce(f"tcp://192.0.2.1:{7000 + number}")

    def hold(self, pages: Iterable[int]) -> None:
        """From now on it has these pages and no others."""
        with self._lock:
            self._pages = np.array(sorted(pages), np.uint64)
            self._version += 1

    def _held(self, version: int) -> tuple[int, npt.NDArray[np.uint64]] | None:
        with self._lock:
            return None if version == self._version else (self._version, self._pages)

    def _erase(self, what: Erasure) -> Future[bool]:
        if self.refuses_purges:
            raise OSError("the store refuses")
        if what.keys is None:
            self.purged.append(what.tenant)
        else:
            self.forgotten += what.keys
        return ended(True)

    def finds(self, *pages: int) -> list[bool]:
        return [peer is not None for peer in self.index.find([key(page) for page in pages])]

    def finds_at(self, page: int) -> str | None:
        """The id of the server it finds a page at."""
        (peer,) = self.index.find([key(page)])
        return None if peer is None else peer.server

    def refresh(self) -> None:
        assert self.index.refresh(WAIT_S)

    def close(self) -> None:
        self.index.close()
        self.index.check_integrity()


class Servers:
    """Those of one test, closed and checked at its end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._servers: list[Server] = []

    def open(self, pages: Iterable[int] = (), **more: Any) -> Server:
        server = Server(more.pop("url", self._url), len(self._servers), pages, **more)
        self._servers.append(server)
        return server

    def know_each_other(self) -> None:
        """Everything was published, and then everything was read."""
        for _ in range(2):
            for server in self._servers:
                server.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for server in self._servers:
            server.close()


def main(url: str, first: str, count: str) -> None:
    server = Server(url, 99, range(int(first), int(first) + int(count)))
    eventually(lambda: server.index.refresh(1.0))
    print(server.index.server, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

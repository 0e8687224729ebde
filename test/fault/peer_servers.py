"""Servers that follow each other over real sockets, without stores: what they hold is a set.

As a program it is one of them: ``python -m peer_servers ROSTER FIRST COUNT`` holds the pages
``FIRST`` and so on, says its id and port, and then waits to be killed.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from page_peers import HOST, DictReader

from kit.waiting import eventually
from sglang_tiered.sharing.addresses import Target
from sglang_tiered.sharing.pages.server import PageServer
from sglang_tiered.sharing.pages.settings import PageSettings
from sglang_tiered.sharing.settings import PeerSettings
from sglang_tiered.sharing.sync import PeerSync
from sglang_tiered.storage.promises import ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future
    from types import TracebackType

    import numpy.typing as npt

    from sglang_tiered.storage.base import Erasure

__all__ = ["NAMESPACE", "OTHER", "Server", "Servers", "key", "quick"]

NAMESPACE, OTHER = bytes(range(32)), b"x" * 32
WAIT_S = 20.0


def key(page: int) -> bytes:
    return page.to_bytes(8, "little") + bytes(24)


def quick(roster: list[Target], **changes: Any) -> PeerSettings:
    """Settings of a server that looks at ``roster``, which may grow, again and again."""
    values = {"publish_s": 0.02, "look_s": 0.05, "peers": roster, **changes}
    return PeerSettings(**values)


class Server:
    """One server: its pages, what it was told to erase, and what it knows of the others.
    ``listed``: others find its address in the roster."""

    def __init__(
        self,
        roster: list[Target],
        pages: Iterable[int] = (),
        *,
        listed: bool = True,
        namespace: bytes = NAMESPACE,
        notes: Any = None,
        port: int = 0,
        **more: Any,
    ) -> None:
        self._pages = np.array(sorted(pages), np.uint64)
        self._version = 1
        self._lock = threading.Lock()
        self.erased: list[Erasure] = []
        self.refuses = False
        self.erase_store: Callable[[Erasure], Future[bool]] = lambda _: ended(True)
        settings = quick(roster, **more)
        self.sync = PeerSync(
            settings, namespace=namespace, held=self._held, erase=self._erase, notes=notes
        )
        self.pages = PageServer(
            DictReader({}), namespace=namespace, host=HOST, port=port, told=self.sync
        )
        self.target = Target(HOST, self.pages.port)
        if listed:
            roster.append(self.target)
        self._roster = roster
        links = PageSettings(connect_timeout_s=5.0)
        self.sync.start(self.pages, None, links, None)

    @property
    def name(self) -> str:
        return self.sync.server.hex()

    @property
    def purged(self) -> list[bytes | None]:
        return [what.tenant for what in self.erased if what.keys is None]

    @property
    def forgotten(self) -> list[bytes]:
        return [key for what in self.erased for key in what.keys or ()]

    def hold(self, pages: Iterable[int]) -> None:
        """From now on it has these pages and no others."""
        with self._lock:
            self._pages = np.array(sorted(pages), np.uint64)
            self._version += 1

    def _held(self, version: int) -> tuple[int, npt.NDArray[np.uint64]] | None:
        with self._lock:
            return None if version == self._version else (self._version, self._pages)

    def _erase(self, what: Erasure) -> Future[bool]:
        if self.refuses:
            raise OSError("the store refuses")
        self.erased.append(what)
        return self.erase_store(what)

    def erase(self, what: Erasure) -> Future[bool]:
        """As its user would."""
        return self.sync.begin(what, ended(True))

    def finds(self, *pages: int) -> list[bool]:
        return [peer is not None for peer in self.sync.mirror.find([key(page) for page in pages])]

    def finds_at(self, page: int) -> str | None:
        """The id of the server it finds a page at."""
        (peer,) = self.sync.mirror.find([key(page)])
        return None if peer is None else peer.server

    @property
    def num_followed(self) -> int:
        return self.sync.mirror.figures().num_peers

    def set_namespace(self, namespace: bytes) -> None:
        self.sync.set_namespace(namespace)
        self.pages.set_namespace(namespace)

    def lose_sight(self) -> None:
        """Name no other server, and end the links to those that were named."""
        self.sync.discovery._targets = ()
        self.refresh()
        self.sync.follower._loop.call(self.sync.follower._end_all)

    def refresh(self) -> None:
        assert self.sync.refresh(WAIT_S)

    def close(self) -> None:
        if self.target in self._roster:
            self._roster.remove(self.target)
        self.sync.close()
        self.pages.stop()
        self.sync.check_integrity()


class Servers:
    """Those of one test, closed and checked at its end."""

    def __init__(self) -> None:
        self.roster: list[Target] = []
        self._servers: list[Server] = []

    def open(self, pages: Iterable[int] = (), **more: Any) -> Server:
        server = Server(self.roster, pages, **more)
        self._servers.append(server)
        return server

    def know_each_other(self) -> None:
        """Everything was told and heard."""
        for _ in range(2):
            for server in self._servers:
                if not server.sync._is_closed:
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


def main(ports: str, first: str, count: str) -> None:
    roster = [Target(HOST, int(port)) for port in ports.split(",")]
    pages = range(int(first), int(first) + int(count))
    server = Server(roster, pages)
    eventually(lambda: server.sync.refresh(1.0))
    print(server.name, server.target.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

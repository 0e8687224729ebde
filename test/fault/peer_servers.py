"""Servers that follow each other over real sockets, without stores: what they hold is a set.

As a program it is one of them: ``python -m peer_servers ROSTER FIRST COUNT`` holds the pages
``FIRST`` and so on, says its port, and then waits to be killed.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from page_peers import HOST

from kit.waiting import eventually
from sglang_tiered.sharing.pages.server import PageServer
from sglang_tiered.sharing.settings import PageSettings, PeerSettings, Target
from sglang_tiered.sharing.sync import PeerSync
from sglang_tiered.storage.promises import ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    import numpy.typing as npt

    from sglang_tiered.storage.base import Erasure


NAMESPACE, OTHER = bytes(range(32)), b"x" * 32


def key(page: int) -> bytes:
    return page.to_bytes(8, "little") + bytes(24)


def quick(roster: list[Target], **changes: Any) -> PeerSettings:
    """Settings of a server that looks at ``roster``, which may grow, again and again."""
    values = {"publish_s": 0.02, "look_s": 0.05, "peers": roster, **changes}
    return PeerSettings(**values)


def know_each_other(*syncs: PeerSync) -> None:
    """Wait until each has heard all that those it follows have to tell, these among them."""
    servers = {sync.followers.server.hex(): sync for sync in syncs}
    eventually(lambda: all(_has_heard(sync, servers) for sync in syncs))


def _has_heard(sync: PeerSync, servers: dict[str, PeerSync]) -> bool:
    holdings, discovery, followed = sync.followers.holdings, sync.discovery, sync.follower._all()
    targets = {f"{target.host}:{target.port}" for target in discovery._targets}
    found = {address for addresses in discovery._known.values() for address in addresses}
    return (
        holdings._held(holdings._version) is None
        and sync.followers.digest == sync.book.noted_digest
        and targets == discovery._known.keys() | discovery._troubles.keys()
        and found == {each.address for each in followed if each.is_named}
        and all(_is_heard(each, each.known and servers.get(each.known.server)) for each in followed)
    )


def _is_heard(each: Any, other: PeerSync | None) -> bool:
    """Whether all is known of the server at an address, or why it is not."""
    if each.is_live and other is not None:
        holdings, known = other.followers.holdings, each.known
        is_read = known.position == (holdings.epoch, holdings.sequence, None)
        return is_read and known.digest == other.followers.digest and each.is_asked
    return bool(each.trouble or each.aside_until or not each.is_named)


def end_links(sync: PeerSync) -> None:
    """End the links to servers that are named no more."""
    eventually(lambda: not any(each.is_named for each in sync.follower._all()))
    sync.follower._loop.call(sync.follower._end_all)


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
            settings, namespace=namespace, held=self._held, erase=self._erase, notes=None
        )
        self.pages = PageServer(
            None,  # type: ignore[arg-type]  # nobody asks for pages
            namespace=namespace,
            endpoint=f"tcp://{HOST}:{port or '*'}",
            followers=self.sync.followers,
        )
        self.target = Target(HOST, self.pages.port)
        if listed:
            roster.append(self.target)
        self._roster = roster
        links = PageSettings(connect_timeout_s=5.0)
        self.sync.start(self.pages, None, links, None)

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
        return [each is not None for each in self.sync.mirror.find([key(page) for page in pages])]

    def finds_at(self, page: int) -> str | None:
        """The address of the server it finds a page at."""
        (address,) = self.sync.mirror.find([key(page)])
        return address

    @property
    def num_followed(self) -> int:
        return self.sync.mirror.num_peers

    def set_namespace(self, namespace: bytes) -> None:
        self.sync.set_namespace(namespace)
        self.pages.set_namespace(namespace)

    def lose_sight(self) -> None:
        """Name no other server, and end the links to those that were named."""
        self.sync.discovery._targets = ()
        end_links(self.sync)

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
        know_each_other(*(one.sync for one in self._servers if not one.sync._is_closed))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()


def main(ports: str, first: str, count: str) -> None:
    roster = [Target(HOST, int(port)) for port in ports.split(",")]
    pages = range(int(first), int(first) + int(count))
    server = Server(roster, pages)
    print(server.target.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

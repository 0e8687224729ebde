"""What is found at other servers, and when it must not be."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_tiered.sharing.mirror import Mirror, MirroredPeer, Peer


def server(number: int) -> str:
    return f"{number:032x}"


def keys(*pages: int) -> list[bytes]:
    return [page.to_bytes(8, "little") + bytes(24) for page in pages]


class World:
    """A mirror of servers that all have erased nothing."""

    def __init__(self, max_pages: int = 1000, max_peers: int = 4) -> None:
        self.mirror = Mirror(max_pages, max_peers, salt=7, digest=bytes, clock=lambda: 0.0)

    def see(self, *numbers: int) -> None:
        """Follow these servers, and no others."""
        for known in self.mirror._peers.copy().values():
            if int(known.peer.server, 16) not in numbers:
                self.mirror.drop(known)
        for number in numbers:
            peer = Peer(server(number), f"tcp://192.0.2.{number}:7000")
            known = self.mirror.join(peer) or self.mirror._peers.get(peer.server)
            if known is not None:
                known.is_live = True
        self.mirror.choose()

    def peer(self, number: int) -> MirroredPeer:
        return self.mirror._peers[server(number)]

    def load(self, number: int, *pages: int) -> None:
        known = self.peer(number)
        if self.mirror.add_pages(known, np.array(pages, np.uint64)):
            self.mirror.loaded(known)
        else:
            self.mirror.cut(known, len(pages))

    def found(self, *pages: int) -> list[int | None]:
        """The number of the server that each page is found at."""
        self.mirror.check_integrity()
        return [peer and int(peer.server, 16) for peer in self.mirror.find(keys(*pages))]


def test_page_lacking_during_growth_stays_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(max_pages=200_000)
    world.see(1)
    world.load(1, 1, 2, 3)
    table = world.mirror._table
    copied = type(table).copied

    def copy_and_hear(self: object, *arguments: int) -> object:
        copy = copied(table, *arguments)
        world.mirror.lacks(server(1), keys(2))
        return copy

    monkeypatch.setattr(type(table), "copied", copy_and_hear)
    world.load(1, *range(10, 9000))
    assert world.mirror._table is not table
    assert world.found(1, 2, 3) == [1, None, 1]


def test_nothing_is_found_while_the_namespace_changes() -> None:
    world = World()
    world.see(1)
    world.load(1, 10)
    world.mirror.hide()
    world.see(1)  # by a follower that has not noticed
    assert world.found(10) == [None]
    world.mirror.hide()
    for is_last in (False, True):
        world.mirror.begin_namespace()
        assert not world.mirror._peers
        world.see(1)
        world.load(1, 10)
        assert world.found(10) == [1 if is_last else None]

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


def test_no_more_pages_than_the_bound_are_kept() -> None:
    world = World(max_pages=100)
    world.see(1, 2)
    world.load(1, *range(1, 91))
    world.load(2, *range(81, 131))
    assert world.mirror.figures()[2:4] == (90, 50), "a server is known whole or not at all"
    assert world.found(85, 120) == [1, None]
    assert not world.mirror.may_hold_more(world.peer(2))
    world.mirror.remove_pages(world.peer(1), np.arange(1, 61, dtype=np.uint64))
    assert world.mirror.may_hold_more(world.peer(2))
    world.mirror.unload(world.peer(2))
    world.load(2, *range(81, 131))
    assert world.found(70, 120) == [1, 2]
    assert not world.mirror.add_pages(world.peer(2), np.arange(200, 250, dtype=np.uint64))


def test_few_pages_beyond_the_bound_are_left_out() -> None:
    world = World(max_pages=1000)
    world.see(1)
    world.load(1, *range(1, 991))
    assert world.mirror.add_pages(world.peer(1), np.arange(2000, 2020, dtype=np.uint64))
    assert world.mirror.figures()[2:4] == (1000, 10)
    assert world.found(500, 2000, 2019) == [1, 1, None]


def test_servers_too_large_at_once_leave_some_whole() -> None:
    """Snapshots come side by side: the first that finds no room makes room for the others."""
    pages = {number: range(number * 1000, number * 1000 + 30) for number in range(1, 6)}
    world = World(max_pages=100, max_peers=8)
    world.see(*pages)
    for at in range(0, 30, 5):
        for number, of_it in pages.items():
            known = world.peer(number)
            part = np.array(of_it[at : at + 5], np.uint64)
            if not known.is_cut and not world.mirror.add_pages(known, part):
                world.mirror.cut(known, 30)
    whole = [number for number in pages if not world.peer(number).is_cut]
    for number in whole:
        world.mirror.loaded(world.peer(number))
    assert len(whole) == 3
    for number in whole:
        assert None not in world.found(*pages[number])


def test_servers_beyond_the_bound_are_not_mirrored() -> None:
    world = World(max_peers=3)
    world.see(5, 6, 7, 8)
    assert world.mirror.figures().num_peers == 3
    world.see(6, 8)
    assert set(world.mirror._peers) == {server(6), server(8)}


def test_many_servers_hold_one_page() -> None:
    world = World(max_peers=200)
    world.see(*range(1, 181))
    for number in range(1, 181):
        world.load(number, 10, 1000 + number)
    assert world.found(10)[0] in range(1, 181)
    assert world.found(*range(1001, 1181)) == list(range(1, 181))
    world.see(180)
    assert world.found(10, 1001) == [180, None]


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


def test_forgotten_pages_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each server, on the thread that serves requests."""
    world = World(max_peers=200)
    world.see(*range(1, 101))
    for number in range(1, 101):
        world.load(number, 10, 11, 1000 + number)
    table, looked_up = world.mirror._table, list[int]()
    find = type(table).find

    def count(self: object, pages: np.ndarray) -> np.ndarray:
        looked_up.append(len(pages))
        return find(table, pages)

    monkeypatch.setattr(type(table), "find", count)
    world.mirror.hide_pages(keys(10, 1001, 77))
    assert looked_up == [3]
    monkeypatch.undo()
    assert world.found(10, 1001, 1002) == [None, None, 2]
    assert world.found(11)[0] in range(1, 101)


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

"""What is found at other servers, and when it must not be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.sharing.locality.formats import ServerRecord
from sglang_tiered.sharing.locality.mirror import Mirror, MirroredPeer, distinct

if TYPE_CHECKING:
    import pytest

NAMESPACE = bytes(32)
NO_PURGES, ONE_PURGE = bytes(16), b"p" * 16


def server(number: int) -> str:
    return f"{number:032x}"


def record(number: int, *, purges: bytes = NO_PURGES, incarnation: int = 1) -> ServerRecord:
    address = f"tcp://192.0.2.{number}:7000"
    return ServerRecord(NAMESPACE, server(number), incarnation, 1, 1, 0, purges, address)


def keys(*pages: int) -> list[bytes]:
    return [page.to_bytes(8, "little") + bytes(24) for page in pages]


class World:
    """A mirror, its clock and what this server has purged."""

    def __init__(self, max_pages: int = 1000, max_peers: int = 4) -> None:
        self.now = 100.0
        self.digest = NO_PURGES
        self.mirror = Mirror(
            max_pages, max_peers, salt=7, digest=lambda: self.digest, clock=lambda: self.now
        )

    def see(self, *records: ServerRecord, expiry_s: float = 10.0) -> None:
        self.mirror.update(records, self.now + expiry_s)

    def peer(self, number: int) -> MirroredPeer:
        return next(p for p in self.mirror.peers if p.record.server == server(number))

    def load(self, number: int, *pages: int) -> None:
        known = self.peer(number)
        self.mirror.add_pages(known, np.array(pages, np.uint64))
        self.mirror.loaded(known, 1)

    def found(self, *pages: int) -> list[int | None]:
        """The number of the server that each page is found at."""
        self.mirror.check_integrity()
        return [peer and int(peer.server, 16) for peer in self.mirror.find(keys(*pages))]


def test_a_page_is_found_at_its_holder() -> None:
    world = World()
    world.see(record(1), record(2))
    world.load(1, 10, 11)
    world.load(2, 20)
    assert world.found(10, 11, 20, 30) == [1, 1, 2, None]
    assert world.mirror.find([]) == []
    assert world.mirror.find(keys(10))[0].address == "tcp://192.0.2.1:7000"  # type: ignore[union-attr]


def test_a_snapshot_half_read_is_not_found() -> None:
    world = World()
    world.see(record(1))
    world.mirror.add_pages(world.peer(1), np.array([10], np.uint64))
    assert world.found(10) == [None]


def test_server_without_a_record_loses_its_pages() -> None:
    world = World()
    world.see(record(1), record(2))
    world.load(1, 10)
    world.load(2, 10, 20)
    world.see(record(2))
    assert world.found(10, 20) == [2, 2]
    world.see()
    assert world.found(10, 20) == [None, None]
    assert world.mirror.figures()[2] == 0


def test_nothing_is_found_once_the_records_are_old() -> None:
    world = World()
    world.see(record(1), expiry_s=10.0)
    world.load(1, 10)
    world.now += 9.9
    assert world.found(10) == [1]
    world.now += 0.2
    assert world.found(10) == [None]
    assert world.mirror.figures()[:2] == (0, 0)


def test_lacking_page_stays_missing_until_published_again() -> None:
    world = World()
    world.see(record(1))
    world.load(1, 10, 11)
    world.mirror.lacks(server(1), keys(10, 99))
    world.see(record(1))
    assert world.found(10, 11) == [None, 1]
    world.mirror.add_pages(world.peer(1), np.array([10], np.uint64))
    assert world.found(10) == [1]
    world.mirror.lacks(server(9), keys(10))  # it has left meanwhile
    assert world.found(10) == [1]


def test_avoided_peer_is_asked_again_later() -> None:
    world = World()
    world.see(record(1), record(2))
    world.load(1, 10)
    world.load(2, 10)
    world.mirror.avoid(server(1), 5.0)
    assert world.found(10) == [2]
    world.mirror.avoid(server(2), 20.0)
    assert world.found(10) == [None]
    world.now += 6.0
    world.mirror.choose()
    assert world.found(10) == [1]


def test_server_behind_on_purges_is_not_used() -> None:
    world = World()
    world.see(record(1), record(2))
    world.load(1, 10)
    world.load(2, 20)
    world.digest = ONE_PURGE
    world.mirror.choose()
    assert world.found(10, 20) == [None, None]
    world.see(record(1, purges=ONE_PURGE), record(2))
    assert world.found(10, 20) == [1, None]


def test_nor_at_one_that_has_applied_more() -> None:
    world = World()
    world.see(record(1, purges=ONE_PURGE))
    world.load(1, 10)
    assert world.found(10) == [None]


def test_new_incarnation_is_empty_until_its_snapshot() -> None:
    world = World()
    world.see(record(1))
    world.load(1, 10)
    world.see(record(1, incarnation=2))
    assert world.found(10) == [None]
    world.load(1, 11)
    assert world.found(10, 11) == [None, 1]


def test_no_more_pages_than_the_bound_are_kept() -> None:
    world = World(max_pages=100)
    world.see(record(1), record(2))
    world.load(1, *range(1, 91))
    world.load(2, *range(81, 131))
    num_pages, num_cut = world.mirror.figures()[2:4]
    assert (num_pages, num_cut) == (100, 30)
    assert world.found(*range(81, 91)) == [world.found(81)[0]] * 10
    assert world.mirror.is_full
    world.mirror.remove_pages(world.peer(1), np.arange(1, 81, dtype=np.uint64))
    assert world.mirror.may_hold_more(world.peer(2))
    world.mirror.check_integrity()


def test_servers_beyond_the_bound_are_not_mirrored() -> None:
    world = World(max_peers=3)
    world.see(*(record(number) for number in (5, 6, 7)))
    world.see(*(record(number) for number in range(1, 200)))
    assert {int(p.record.server, 16) for p in world.mirror.peers} == {5, 6, 7}
    world.see(*(record(number) for number in range(6, 200)))
    assert len(world.mirror.peers) == 3


def test_many_servers_hold_one_page() -> None:
    world = World(max_peers=200)
    world.see(*(record(number) for number in range(1, 181)))
    for number in range(1, 181):
        world.load(number, 10, 1000 + number)
    assert world.found(10)[0] in range(1, 181)
    assert world.found(*range(1001, 1181)) == list(range(1, 181))
    world.see(record(180))
    assert world.found(10, 1001) == [180, None]


def test_a_table_that_grows_forgets_nothing() -> None:
    world = World(max_pages=200_000)
    world.see(record(1), record(2))
    world.load(1, *range(1, 60_000, 2))
    world.load(2, *range(2, 60_000, 2))
    assert world.found(*range(1, 60_000)) == [1, 2] * 29_999 + [1]


def test_page_lacking_during_growth_stays_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(max_pages=200_000)
    world.see(record(1))
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
    world.see(record(1))
    world.load(1, 10)
    world.mirror.hide(1)
    assert world.found(10) == [None]
    world.see(record(1))  # by a reader that has not noticed
    assert world.found(10) == [None]
    world.mirror.hide(2)
    world.mirror.begin_namespace(1)
    world.see(record(1))
    world.load(1, 10)
    assert world.found(10) == [None]
    world.mirror.begin_namespace(2)
    assert world.mirror.peers == []
    world.see(record(1))
    world.load(1, 10)
    assert world.found(10) == [1]


def test_distinct_pages_are_sorted_and_without_zero() -> None:
    assert distinct(np.array([5, 0, 3, 5, 0], np.uint64)).tolist() == [3, 5]
    assert distinct(np.zeros(0, np.uint64)).tolist() == []

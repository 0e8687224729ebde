"""Servers that follow each other: what one holds the others find, and no longer than that."""

from __future__ import annotations

import pytest
from line_process import LineProcess
from peer_servers import OTHER, Servers, key

from kit.waiting import eventually
from sglang_tiered.sharing.addresses import Target

pytestmark = pytest.mark.timeout(120)


def test_only_pages_of_others_are_found(servers: Servers) -> None:
    one, two = servers.open(range(1, 100)), servers.open(range(90, 200))
    servers.know_each_other()
    assert one.finds(1, 95, 150, 500) == [False, True, True, False]
    assert two.finds(1, 95, 150, 500) == [True, True, False, False]
    (peer,) = two.sync.mirror.find([key(1)])
    assert peer == (one.name, f"tcp://127.0.0.1:{one.target.port}")
    figures = two.sync.mirror.figures()
    assert (figures.num_peers, figures.num_usable, figures.num_pages) == (1, 1, 99)
    assert two.sync.trouble == ""
    assert two.sync.follower.num_breaches == 0


def test_a_server_that_nobody_lists_only_looks(servers: Servers) -> None:
    one, two = servers.open(range(1, 10)), servers.open(range(20, 30), listed=False)
    servers.know_each_other()
    assert two.finds(1) == [True]
    assert one.finds(20) == [False]
    servers.roster.append(two.target)
    servers.know_each_other()
    assert one.finds(20) == [True]


def test_two_addresses_of_one_server_are_one(servers: Servers) -> None:
    one, two = servers.open([1]), servers.open([2])
    servers.roster.append(Target("localhost", one.target.port))
    servers.roster.append(Target("127.0.0.2", one.target.port))  # of the same loopback, refused
    servers.know_each_other()
    assert two.num_followed == 1
    assert two.finds(1) == [True]
    assert one.finds(1) == [False], "it is itself"


def test_a_killed_server_is_gone_at_once(servers: Servers) -> None:
    one = servers.open()
    with LineProcess("peer_servers", one.target.port, 100, 50) as other:
        name, port = other.line().split()
        servers.roster.append(Target("127.0.0.1", int(port)))
        eventually(lambda: one.finds_at(149) == name)
        other.strike()
        eventually(lambda: one.finds(149) == [False], timeout_s=3.0)
    assert one.sync.follower.num_failures > 0
    assert port in one.sync.trouble


def test_a_hanging_server_is_gone_within_its_expiry(servers: Servers) -> None:
    one = servers.open(expiry_s=4.0)
    with LineProcess("peer_servers", one.target.port, 100, 50) as other:
        name, port = other.line().split()
        servers.roster.append(Target("127.0.0.1", int(port)))
        eventually(lambda: one.finds_at(149) == name)
        other.freeze()
        eventually(lambda: one.finds(149) == [False], timeout_s=10.0)
        assert "has said nothing" in one.sync.trouble or "closed" in one.sync.trouble
        other.thaw()
        eventually(lambda: one.finds_at(149) == name)


def test_a_server_that_starts_again_is_known_anew(servers: Servers) -> None:
    one, two = servers.open([1]), servers.open()
    servers.know_each_other()
    one.close()
    eventually(lambda: two.finds(1) == [False])
    again = servers.open([2], port=one.target.port)
    eventually(lambda: two.finds(1, 2) == [False, True])
    assert two.finds_at(2) == again.name


def test_a_short_loss_costs_no_snapshot(servers: Servers) -> None:
    one, two = servers.open(range(1, 1000)), servers.open()
    servers.know_each_other()
    follower = two.sync.follower
    (each,) = [each for each in follower._all() if each.is_live]
    follower._loop.call(follower._lose, each, "a cable was pulled")
    one.hold(range(1, 1001))
    eventually(lambda: two.finds(1000) == [True])
    assert each.position.num_snapshots == 1


def test_namespaces_do_not_see_each_other(servers: Servers) -> None:
    one, two = servers.open([1]), servers.open([2], namespace=OTHER)
    servers.know_each_other()
    assert one.finds(2) == two.finds(1) == [False]
    assert "another model" in one.sync.trouble
    one.set_namespace(OTHER)
    eventually(lambda: one.finds(2) == two.finds(1) == [True])
    assert one.sync.trouble == ""
    two.set_namespace(bytes(32))
    assert two.finds(1) == [False], "at once"
    servers.know_each_other()
    assert one.finds(2) == two.finds(1) == [False]


def test_more_servers_than_the_bound_leave_the_bound(servers: Servers) -> None:
    one = servers.open(max_peers=2)
    others = [servers.open([number]) for number in range(1, 4)]
    servers.know_each_other()
    assert sum(one.finds(1, 2, 3)) == one.num_followed == 2
    assert sum(each.link is not None for each in one.sync.follower._all()) == 2
    assert len(others) == 3


def test_pages_beyond_the_bound_wait_for_room(servers: Servers) -> None:
    one = servers.open(max_pages=100)
    two = servers.open(range(1, 151))
    servers.know_each_other()
    assert "more than 100 to be known" in next(iter(one.sync.follower.troubles.values()))
    two.hold(range(61, 151))
    eventually(lambda: all(one.finds(*range(61, 151))))

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
    assert two.sync.trouble == ""


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

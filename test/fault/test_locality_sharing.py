"""Servers that share an index: what one holds is found by the others, and no longer than that."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest
from line_process import LineProcess
from locality_servers import NAMES, key

from kit.waiting import eventually
from sglang_tiered.sharing.locality.connection import IndexFailure
from sglang_tiered.storage.base import Erasure

if TYPE_CHECKING:
    from locality_servers import Servers
    from redis_server import RedisServer


def test_only_pages_of_others_are_found(servers: Servers) -> None:
    one, two = servers.open(range(1, 100)), servers.open(range(90, 200))
    servers.know_each_other()
    assert one.finds(1, 95, 150, 500) == [False, True, True, False]
    assert two.finds(1, 95, 150, 500) == [True, True, False, False]
    (peer,) = two.index.find([key(1)])
    assert peer == (one.index.server, "tcp://192.0.2.1:7000")
    figures = two.index.stats()
    assert figures.connected
    assert figures.trouble == ""
    assert (figures.num_peers, figures.num_usable_peers) == (1, 1)
    assert (figures.num_mirrored_pages, figures.num_published_pages) == (99, 110)
    assert figures.num_errors == figures.num_garbage == 0


def test_a_server_without_address_only_looks(servers: Servers) -> None:
    one, two = servers.open(range(1, 10)), servers.open(range(20, 30), announced=False)
    servers.know_each_other()
    assert two.finds(1) == [True]
    assert one.finds(20) == [False]
    two.index.announce("tcp://192.0.2.9:1")
    servers.know_each_other()
    assert one.finds(20) == [True]


def test_changes_arrive_without_another_snapshot(servers: Servers) -> None:
    one, two = servers.open(range(1, 20_000)), servers.open()
    servers.know_each_other()
    source = random.Random(0)
    pages = set(range(1, 20_000))
    for _ in range(8):
        pages -= set(source.sample(sorted(pages), 500))
        pages |= {source.randrange(1, 1 << 60) for _ in range(600)}
        one.hold(pages)
        one.refresh()
    two.refresh()
    everything = sorted(pages)
    assert all(two.finds(*everything))
    assert two.index.stats().num_mirrored_pages == len(pages)
    assert two.index.stats().num_snapshots_read == 1
    assert one.index.stats().num_snapshots_published == 1


def test_a_renewed_snapshot_disturbs_nobody_and_serves_newcomers(
    servers: Servers, redis_server: RedisServer
) -> None:
    one, two = servers.open(range(1, 1000)), servers.open()
    servers.know_each_other()
    pages = set(range(1, 1000))
    for step in range(1, 6):
        pages |= set(range(step * 100_000, step * 100_000 + 20_000))
        pages -= set(range(step * 100_000, step * 100_000 + 5_000))
        one.hold(pages)
        one.refresh()
    three = servers.open()
    servers.know_each_other()
    for server in (two, three):
        assert server.index.stats().num_mirrored_pages == len(pages)
        assert all(server.finds(*sorted(pages)))
    assert one.index.stats().num_snapshots_published > 1
    entries = redis_server.client.xlen(NAMES.changes(one.index.server, 1))
    assert entries < 100


def test_a_page_held_twice_survives_one_holder(servers: Servers) -> None:
    one, two, three = servers.open([7, 8]), servers.open([7]), servers.open()
    servers.know_each_other()
    assert three.finds(7, 8) == [True, True]
    one.close()
    eventually(lambda: three.finds(8) == [False])
    assert three.finds_at(7) == two.index.server


def test_a_killed_server_is_gone_within_its_expiry(
    servers: Servers, redis_server: RedisServer
) -> None:
    one = servers.open()
    with LineProcess("locality_servers", redis_server.url, 100, 50) as other:
        name = other.line()
        eventually(lambda: one.finds_at(149) == name)
        other.strike()
        eventually(lambda: one.finds(149) == [False], timeout_s=10.0)
    eventually(lambda: not redis_server.client.exists(NAMES.record(name)))
    eventually(lambda: not redis_server.client.keys(f"{NAMES.prefix}:pages:{name}:*"))
    eventually(lambda: not redis_server.client.keys(f"{NAMES.prefix}:changes:{name}:*"))


def test_a_server_that_leaves_takes_its_keys_along(
    servers: Servers, redis_server: RedisServer
) -> None:
    one, two = servers.open([1], expiry_s=60.0), servers.open(expiry_s=60.0)  # nothing expires
    servers.know_each_other()
    one.close()
    eventually(lambda: two.finds(1) == [False])
    assert redis_server.client.keys(f"*{one.index.server}*") == []
    assert redis_server.client.smembers(NAMES.servers) == {two.index.server.encode()}


def test_no_key_is_without_expiry(servers: Servers, redis_server: RedisServer) -> None:
    one, two = servers.open(range(1, 200_000)), servers.open([5])
    one.index.erase(Erasure(tenant=b"t" * 16))
    servers.know_each_other()
    one.hold(range(1, 250_000))
    servers.know_each_other()
    two.close()
    keys = redis_server.client.keys("*")
    assert len(keys) >= 6
    for name in keys:
        assert redis_server.client.pttl(name) > 0 or not redis_server.client.exists(name), name


def test_namespaces_do_not_see_each_other(servers: Servers) -> None:
    other = b"x" * 32
    one, two = servers.open([1]), servers.open([2], namespace=other)
    servers.know_each_other()
    assert one.finds(2) == two.finds(1) == [False]
    one.index.set_namespace(other)
    assert one.finds(2) == [False]
    servers.know_each_other()
    assert one.finds(2) == two.finds(1) == [True]


def test_a_new_namespace_finds_no_old_page(servers: Servers, redis_server: RedisServer) -> None:
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    assert two.finds(1) == [True]
    two.index.set_namespace(b"x" * 32)
    assert two.finds(1) == [False]
    two.refresh()
    assert two.finds(1) == [False]
    eventually(lambda: one.finds(2) == [False])
    assert not redis_server.client.exists(NAMES.record(two.index.server))


def test_an_id_used_by_another_is_dropped(servers: Servers, redis_server: RedisServer) -> None:
    one, two = servers.open([1]), servers.open()
    servers.know_each_other()
    before = one.index.server
    redis_server.client.set(NAMES.record(before), b"of somebody else", px=60_000)
    eventually(lambda: one.index.server != before)
    eventually(lambda: two.finds_at(1) == one.index.server)


@pytest.mark.parametrize("lost", ["pages", "changes"])
def test_what_is_evicted_is_published_anew(
    servers: Servers, redis_server: RedisServer, lost: str
) -> None:
    one = servers.open(range(1, 50))
    one.refresh()
    (name,) = redis_server.client.keys(f"{NAMES.prefix}:{lost}:*")
    redis_server.client.delete(name)
    two = servers.open()
    eventually(lambda: two.finds(1, 49) == [True, True])
    one.hold(range(1, 60))
    eventually(lambda: two.finds(59) == [True])
    assert one.index.stats().num_published_anew >= 1


def test_a_reader_fallen_behind_rereads_the_snapshot(
    servers: Servers, redis_server: RedisServer
) -> None:
    one, two = servers.open(range(1, 100_000)), servers.open()
    servers.know_each_other()
    stream = NAMES.changes(one.index.server, 1)
    # Its reader does not get to read while changes come, a renewed snapshot too, and go.
    with two.index._state.mirror.lock:
        two.index._connections[1].interrupt()
        one.hold(range(1, 140_000))
        one.refresh()
        one.hold(range(1, 141_000))
        one.refresh()
        assert one.index.stats().num_snapshots_published == 2
        last = redis_server.client.xinfo_stream(stream)["last-generated-id"]
        redis_server.client.xtrim(stream, minid=last, approximate=False)
    eventually(lambda: two.finds(99, 139_000, 140_999) == [True] * 3)
    assert two.index.stats().num_mirrored_pages == 140_999
    # A reader that had just looked knows the old snapshot only, and takes that one again first.
    stats = two.index.stats()
    num_old = stats.num_snapshots_read - 2
    assert num_old in (0, 1)
    assert stats.num_garbage == num_old


def test_a_fork_harms_neither_process(servers: Servers) -> None:
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            two.index.erase(Erasure(tenant=b"t" * 16))
            with pytest.raises(IndexFailure):
                two.index._connections[0].exchange(("FLUSHALL",))
            two.index.close()
            failed = int(two.finds(1) != [False])
        finally:
            os._exit(failed)
    assert os.waitpid(child, 0)[1] == 0
    servers.know_each_other()
    assert one.finds(2) == two.finds(1) == [True]
    assert one.purged == []

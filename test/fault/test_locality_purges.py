"""What one server purges is purged everywhere, and comes back from nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from locality_servers import NAMES

from kit.waiting import eventually
from sglang_tiered.sharing.locality.formats import FORGET_KEYS
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.notes import Notes

if TYPE_CHECKING:
    from pathlib import Path

    from locality_servers import Servers
    from redis_server import RedisServer

TENANT, ANOTHER = b"t" * 16, b"a" * 16


@pytest.mark.parametrize("tenant", [TENANT, bytes(16), None])
def test_a_purge_reaches_every_server_once(servers: Servers, tenant: bytes | None) -> None:
    one, two, three = servers.open([1]), servers.open([2]), servers.open([3])
    servers.know_each_other()
    purge = one.index.erase(Erasure(tenant=tenant))
    assert is_true(purge, 20.0)
    assert purge.done()
    eventually(lambda: two.purged == three.purged == [tenant])
    eventually(lambda: one.finds(2, 3) == [True, True])
    servers.know_each_other()
    assert two.purged == three.purged == [tenant]
    assert one.purged == []
    assert one.index.stats().num_purges_told == 1
    assert two.index.stats().num_purges_applied == 1


def test_a_server_before_the_purge_is_not_asked(servers: Servers) -> None:
    one, two, three = servers.open([1]), servers.open([2]), servers.open([3])
    servers.know_each_other()
    two.refuses_purges = True
    purge = one.index.erase(Erasure(tenant=TENANT))
    assert one.finds(2, 3) == [False, False]  # at once
    assert is_true(purge, 20.0)
    eventually(lambda: one.finds(3) == [True])
    servers.know_each_other()
    assert one.finds(2) == three.finds(2) == [False]
    assert two.finds(1, 3) == [False, False]
    two.refuses_purges = False
    eventually(lambda: one.finds(2) == three.finds(2) == [True])
    assert two.purged == [TENANT]


def test_a_purge_waits_for_an_absent_redis(servers: Servers, redis_server: RedisServer) -> None:
    one, two = servers.open([1], expiry_s=30.0), servers.open([2], expiry_s=30.0)
    servers.know_each_other()
    redis_server.kill()
    purges = [one.index.erase(Erasure(tenant=tenant)) for tenant in (TENANT, ANOTHER)]
    assert one.finds(2) == [False]
    assert not any(is_true(purge, 0.05) for purge in purges)
    assert one.index.stats().num_purges_waiting == 2
    redis_server.start()
    assert all(is_true(purge, 20.0) for purge in purges)
    eventually(lambda: set(two.purged) == {TENANT, ANOTHER})
    eventually(lambda: one.finds(2) == [True])


def test_a_later_server_applies_earlier_purges(servers: Servers) -> None:
    one = servers.open([1])
    assert is_true(one.index.erase(Erasure(tenant=TENANT)), 20.0)
    late = servers.open([2])
    eventually(lambda: late.purged == [TENANT])
    eventually(lambda: one.finds(2) == [True])


def test_a_server_that_starts_again_applies_nothing_twice(servers: Servers, tmp_path: Path) -> None:
    device = FileDevice(tmp_path, direct=False)
    one, two = servers.open([1]), servers.open([2], notes=Notes(device))
    servers.know_each_other()
    assert is_true(one.index.erase(Erasure(tenant=TENANT)), 20.0)
    eventually(lambda: two.purged == [TENANT])
    assert is_true(two.index.erase(Erasure(tenant=ANOTHER)), 20.0)
    two.close()
    again = servers.open([2], notes=Notes(device))
    eventually(lambda: one.finds(2) == again.finds(1) == [True])
    assert again.purged == []
    fresh = servers.open([3])
    eventually(lambda: set(fresh.purged) == {TENANT, ANOTHER})


def test_a_purge_lost_by_redis_applies_once(servers: Servers, redis_server: RedisServer) -> None:
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    assert is_true(one.index.erase(Erasure(tenant=TENANT)), 20.0)
    eventually(lambda: two.purged == [TENANT])
    one.close()  # only the other knows of it now
    redis_server.restart_empty()
    eventually(lambda: redis_server.client.zcard(NAMES.purges) == 1)
    late = servers.open([3])
    eventually(lambda: late.purged == [TENANT])
    eventually(lambda: late.finds(2) == two.finds(3) == [True])
    assert two.purged == [TENANT]


def test_servers_that_purge_at_once_come_to_agree(servers: Servers) -> None:
    several = [servers.open([number]) for number in range(1, 5)]
    servers.know_each_other()
    tenants = [bytes([number]) * 16 for number in range(40)]
    for number, tenant in enumerate(tenants):
        several[number % 4].index.erase(Erasure(tenant=tenant))
    for number, server in enumerate(several):
        told = {tenant for i, tenant in enumerate(tenants) if i % 4 != number}
        eventually(lambda server=server, told=told: set(server.purged) == told)
        others = [page for page in range(1, 5) if page != number + 1]
        eventually(lambda server=server, others=others: all(server.finds(*others)))


def test_a_purge_before_namespace_change_reaches_others(
    servers: Servers, redis_server: RedisServer
) -> None:
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    redis_server.pause()
    one.index.erase(Erasure(tenant=TENANT))
    one.index.set_namespace(b"x" * 32)
    redis_server.resume()
    eventually(lambda: two.purged == [TENANT])


def test_closing_says_that_a_purge_was_not_told(
    servers: Servers, redis_server: RedisServer
) -> None:
    one = servers.open([1])
    one.refresh()
    redis_server.kill()
    purge = one.index.erase(Erasure(tenant=TENANT))
    one.close()
    assert purge.done()
    assert not is_true(purge, 20.0)
    after = one.index.erase(Erasure(tenant=TENANT))
    assert after.done
    assert not is_true(after, 20.0)


FORGOTTEN = [bytes([number]) * 32 for number in range(1, 4)]


def test_forgotten_pages_reach_every_server_once(servers: Servers) -> None:
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    forget = one.index.erase(Erasure.of(FORGOTTEN))
    assert one.finds(2) == [False]  # at once
    assert is_true(forget, 20.0)
    assert two.forgotten == FORGOTTEN, "it answered before the other server had forgotten"
    eventually(lambda: one.finds(2) == two.finds(1) == [True])
    late = servers.open([3])
    eventually(lambda: late.forgotten == FORGOTTEN)
    servers.know_each_other()
    assert one.forgotten == [] and two.forgotten == FORGOTTEN
    assert one.purged == two.purged == late.purged == []


def test_forget_waits_for_a_server_that_cannot(servers: Servers) -> None:
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    two.refuses_purges = True
    forget = one.index.erase(Erasure.of(FORGOTTEN))
    eventually(lambda: one.index.stats().num_purges_told == 1)
    one.refresh()
    assert not forget.done()
    two.refuses_purges = False
    assert is_true(forget, 20.0)
    assert two.forgotten == FORGOTTEN


def test_more_keys_than_a_piece_are_all_forgotten(servers: Servers) -> None:
    keys = [number.to_bytes(32, "little") for number in range(2 * FORGET_KEYS + 1)]
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    assert is_true(one.index.erase(Erasure.of(keys)), 20.0)
    assert sorted(two.forgotten) == sorted(keys)


def test_keys_lost_by_redis_are_added_again(servers: Servers, redis_server: RedisServer) -> None:
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    assert is_true(one.index.erase(Erasure.of(FORGOTTEN)), 20.0)
    one.close()  # only the other knows of it now
    redis_server.restart_empty()
    eventually(lambda: redis_server.client.zcard(NAMES.purges) == 1)
    late = servers.open([3])
    eventually(lambda: late.forgotten == FORGOTTEN)
    assert two.forgotten == FORGOTTEN


def test_forget_is_applied_once_over_a_restart(servers: Servers, tmp_path: Path) -> None:
    device = FileDevice(tmp_path, direct=False)
    one, two = servers.open([1]), servers.open([2], notes=Notes(device))
    servers.know_each_other()
    assert is_true(one.index.erase(Erasure.of(FORGOTTEN)), 20.0)
    two.close()
    again = servers.open([2], notes=Notes(device))
    eventually(lambda: one.finds(2) == again.finds(1) == [True])
    assert again.forgotten == []


def test_closing_says_that_pages_were_not_forgotten(
    servers: Servers, redis_server: RedisServer
) -> None:
    one = servers.open([1])
    one.refresh()
    redis_server.kill()
    forget = one.index.erase(Erasure.of(FORGOTTEN))
    one.close()
    assert forget.done() and not is_true(forget, 20.0)

"""What one server erases is erased everywhere, and comes back from nowhere: a table of what is
erased x where the other server is when it happens, and what may go wrong besides."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from peer_servers import Server, Servers

from kit.waiting import eventually
from sglang_tiered.sharing.following import Follower
from sglang_tiered.sharing.pages.messages import MAX_ERASED_KEYS
from sglang_tiered.sharing.settings import PageSettings, Target
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import ended, is_true, keep, promise

pytestmark = pytest.mark.timeout(120)

TENANT, ANOTHER = b"t" * 16, b"a" * 16
KEYS = [bytes([number]) * 32 for number in range(1, 4)]
SELECTORS = {
    "pages": Erasure.of(KEYS),
    "many pages": Erasure.of([n.to_bytes(32, "big") for n in range(20 * MAX_ERASED_KEYS + 1)]),
    "tenant": Erasure(tenant=TENANT),
    "no tenant": Erasure(tenant=bytes(16)),
    "everything": Erasure(),
}


def has_applied(server: Server, what: Erasure) -> bool:
    if what.keys is None:
        return server.purged == [what.tenant]
    return sorted(server.forgotten) == sorted(what.keys)


@pytest.mark.parametrize("what", SELECTORS.values(), ids=SELECTORS)
@pytest.mark.parametrize("other_is", ["there", "down", "away", "refusing", "unlisted"])
def test_an_erasure_is_applied_once_before_pages_move(
    servers: Servers, what: Erasure, other_is: str
) -> None:
    one = servers.open([1])
    two = servers.open([2], listed=other_is != "unlisted")
    if other_is == "down":
        two.close()
    elif other_is == "away":
        servers.know_each_other()
        for server in (one, two):
            server.lose_sight()  # neither knows where the other is
        eventually(lambda: one.num_followed == two.num_followed == 0)
    servers.know_each_other()
    two.refuses = other_is == "refusing"
    done = one.erase(what)
    assert one.finds(2) == [False] or has_applied(two, what), "at once"
    if other_is == "refusing":
        eventually(lambda: two.sync._log._active != set())
        eventually(lambda: one.finds(2) == two.finds(1) == [False])
        assert not done.done() and two.sync.book.num_applied == 0
        two.refuses = False
    assert is_true(done, 20.0)
    assert other_is != "there" or has_applied(two, what), "it answered before the other had"
    if other_is == "down":
        two = servers.open([2])
    elif other_is == "away":
        for server in (one, two):
            server.sync.discovery._targets = servers.roster
    elif other_is == "unlisted":  # told by nobody but the next answer
        eventually(lambda: two.finds(1) == [False] or has_applied(two, what))
    eventually(lambda: two.finds(1) == [True])
    assert has_applied(two, what), "it took a page first"
    if other_is != "unlisted":
        eventually(lambda: one.finds(2) == [True])
    servers.know_each_other()
    assert has_applied(two, what), "twice"
    assert one.erased == []


def test_an_unlisted_server_tells_those_it_follows(servers: Servers) -> None:
    """Also those that it could not tell when it happened."""
    one, two = servers.open([1]), servers.open([2], listed=False)
    servers.know_each_other()
    two.lose_sight()
    eventually(lambda: two.num_followed == 0)
    assert is_true(two.erase(Erasure(tenant=TENANT)), 20.0)
    two.sync.discovery._targets = servers.roster
    eventually(lambda: one.purged == [TENANT])
    eventually(lambda: two.finds(1) == [True])


def test_servers_that_erase_at_once_come_to_agree(servers: Servers) -> None:
    several = [servers.open([number]) for number in range(1, 5)]
    servers.know_each_other()
    tenants = [bytes([number]) * 16 for number in range(40)]
    done = [several[n % 4].erase(Erasure(tenant=tenant)) for n, tenant in enumerate(tenants)]
    assert all(is_true(each, 20.0) for each in done)
    for number, server in enumerate(several):
        told = {tenant for i, tenant in enumerate(tenants) if i % 4 != number}
        assert set(server.purged) == told
        others = [page for page in range(1, 5) if page != number + 1]
        eventually(lambda server=server, others=others: all(server.finds(*others)))
    several[0].close()  # what it erased is known to others only
    late = servers.open([5])
    eventually(lambda: set(late.purged) == set(tenants))


def test_what_is_too_old_here_separates_nobody(servers: Servers) -> None:
    """Each drops a record by its own clock: they differ by what neither is to apply again."""
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    assert is_true(one.erase(Erasure(tenant=TENANT)), 20.0)
    with one.sync.book._lock:
        one.sync.book._shelf.drop(next(iter(one.sync.book._shelf.records)))
    one.pages.tell()
    assert one.sync.book.digest != two.sync.book.digest
    eventually(lambda: one.finds(2) == two.finds(1) == [True])
    assert one.erased == [] and two.purged == [TENANT]


def test_a_server_named_no_more_counts_while_alive(servers: Servers) -> None:
    """As where a Redis lost all it knew."""
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    one.sync.discovery._targets = ()
    follower = one.sync.follower
    eventually(lambda: not any(each.is_named for each in follower._all()))
    assert one.finds(2) == [True]
    assert is_true(one.erase(Erasure(tenant=TENANT)), 20.0)
    assert two.purged == [TENANT]
    two.close()
    eventually(lambda: not any(each.is_live for each in follower._all()))
    for each in follower._all():
        each.heard_at -= 60.0
    eventually(lambda: not follower._all())


def test_a_broken_connection_ends_no_erasure(servers: Servers) -> None:
    """A server whose link is made again lives, and has its say."""
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    gate, follower = threading.Event(), one.sync.follower
    two.erase_store = lambda _: ended(gate.wait(60.0))
    done = one.erase(Erasure(tenant=TENANT))
    eventually(lambda: two.purged == [TENANT])
    (link,) = [each for each in follower._all() if each.is_live]
    follower._loop.call(link.link.lose, "it reset the connection")
    eventually(lambda: link.link is None)
    again = one.erase(Erasure(tenant=ANOTHER))
    eventually(lambda: link.is_live)
    assert not done.done() and not again.done()
    gate.set()
    assert is_true(done, 20.0) and is_true(again, 20.0)
    assert {TENANT, ANOTHER} <= set(two.purged)


def test_an_erasure_waits_for_a_first_answer(servers: Servers) -> None:
    """Of a server that was named just now, and has a page of the tenant."""
    one, two = servers.open([1]), servers.open([2], listed=False)
    blocked, gate, follower = threading.Event(), threading.Event(), one.sync.follower
    two.pages.loop.call(lambda: (blocked.set(), gate.wait(60.0)))
    assert blocked.wait(60.0)
    servers.roster.append(two.target)
    address = f"tcp://{two.target.host}:{two.target.port}"
    eventually(lambda: address in follower._followed and follower._followed[address].link.is_open)
    done = one.erase(Erasure(tenant=TENANT))
    eventually(lambda: one.sync.followers.digest == one.sync.book.digest)  # it is noted
    looked = threading.Event()
    follower._loop.call(lambda: (follower._settle(), looked.set()))
    assert looked.wait(60.0) and not done.done()
    gate.set()
    assert is_true(done, 20.0) and two.purged == [TENANT]


def test_a_name_never_found_ends_no_erasure(servers: Servers) -> None:
    servers.roster.append(Target("no-such-host.invalid", 1))
    one = servers.open([1])
    done = one.erase(Erasure(tenant=TENANT))
    eventually(lambda: one.sync.discovery.num_failures > 2)
    assert not done.done(), "who knows what is there"
    servers.roster.pop(0)
    assert is_true(done, 20.0)


def test_machines_that_are_off_end_no_wait(servers: Servers) -> None:
    """Of many one was always being connected to, and counted as about to answer."""
    with socket.socket() as off:
        off.bind(("127.0.0.1", 0))
        servers.roster.append(Target(*off.getsockname()))
        one = servers.open([1], listed=False, expiry_s=60.0)
        follower = one.sync.follower
        follower._settings = PageSettings(connect_timeout_s=60.0)
        eventually(lambda: [each.backoff.num_failures for each in follower._all()] > [0])  # refused
        off.listen()  # from now on nothing is answered there
        (each,) = follower._all()
        eventually(lambda: each.link and follower._clock() - each.link.opened_at > 0.5)
        assert is_true(one.erase(Erasure(tenant=TENANT)), 20.0)


def test_an_erasure_is_durable_everywhere_before_done(servers: Servers) -> None:
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    local = promise()
    two.erase_store = lambda _: local
    done = one.erase(Erasure(tenant=TENANT))
    eventually(lambda: two.purged == [TENANT])
    servers.know_each_other()
    assert not done.done() and one.finds(2) == [False]
    two.erase_store = lambda _: ended(len(two.purged) > 2)
    keep(local, False)  # the disk refuses, and again when it is told again
    assert is_true(done, 20.0)
    assert len(two.purged) == 3
    eventually(lambda: one.finds(2) == two.finds(1) == [True])


def test_many_erasures_are_compared_together(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at every server for each of them takes the thread that serves pages."""
    one, _ = servers.open([1]), servers.open([2])
    servers.know_each_other()
    looks, look = [], Follower._agree

    def counted(follower: Follower, *about: Any) -> None:
        looks.append(follower)
        look(follower, *about)

    monkeypatch.setattr(Follower, "_agree", counted)
    done = [one.erase(Erasure(tenant=bytes([n % 256, n // 256]) * 8)) for n in range(1000)]
    assert all(is_true(each, 60.0) for each in done)
    assert looks.count(one.sync.follower) < 500


def test_nothing_is_taken_while_it_is_erased(servers: Servers) -> None:
    """From who does not know of it yet, as a page of the tenant would come back."""
    one, two, three = (servers.open([number]) for number in (1, 2, 3))
    servers.know_each_other()
    three.refuses = True
    found = []

    def erase(what: Erasure) -> Future[bool]:
        found.extend(two.finds(3))
        return ended(True)

    two.erase_store = erase
    done = one.erase(Erasure(tenant=TENANT))
    eventually(lambda: two.purged == [TENANT])
    assert found == [False]
    three.refuses = False
    assert is_true(done, 20.0)


def test_no_erased_page_is_listed_once_digests_agree(servers: Servers) -> None:
    """Who erased tells that its pages are gone before it tells that it erased."""
    one, two = servers.open(range(1, 1000)), servers.open([5000])
    servers.know_each_other()

    def erase(what: Erasure) -> Future[bool]:
        one.hold(range(500, 1000))
        return ended(True)

    one.erase_store = erase
    assert is_true(two.erase(Erasure(tenant=TENANT)), 20.0)
    assert one.purged == [TENANT]
    assert not any(two.finds(*range(1, 500)))
    assert all(two.finds(*range(500, 1000)))

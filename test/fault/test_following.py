"""Servers that follow each other: what one holds the others find, and no longer than that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from line_process import LineProcess
from page_peers import HOST, StrangeClient, StrangeServer
from peer_servers import NAMESPACE, OTHER, Server, Servers, key

from kit.cost_records import record_of
from kit.waiting import eventually
from sglang_tiered.policy.cost_model import CostModel, PrefillCost
from sglang_tiered.policy.routing import ServerState
from sglang_tiered.route import replicas
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.link import PageLink
from sglang_tiered.sharing.pages.messages import VERSION_FRAME
from sglang_tiered.sharing.pages.server import PageServer
from sglang_tiered.sharing.settings import Target
from sglang_tiered.sharing.telling import SIGN_OF_LIFE_S
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import is_true
from sglang_tiered.wire.sockets import encode

pytestmark = pytest.mark.timeout(120)


def test_only_pages_of_others_are_found(servers: Servers) -> None:
    one, two = servers.open(range(1, 100)), servers.open(range(90, 200))
    servers.know_each_other()
    assert one.finds(1, 95, 150, 500) == [False, True, True, False]
    assert two.finds(1, 95, 150, 500) == [True, True, False, False]
    assert two.finds_at(1) == f"tcp://127.0.0.1:{one.target.port}"
    assert two.sync.trouble == ""


def test_a_killed_server_is_gone_at_once(servers: Servers) -> None:
    one = servers.open()
    with LineProcess("peer_servers", one.target.port, 100, 50) as other:
        port = other.line()
        servers.roster.append(Target("127.0.0.1", int(port)))
        eventually(lambda: one.finds_at(149) == f"tcp://127.0.0.1:{port}")
        other.strike()
        eventually(lambda: one.finds(149) == [False], timeout_s=3.0)
    assert one.sync.follower.num_failures > 0
    assert port in one.sync.trouble


def test_a_hanging_server_is_gone_within_its_expiry(servers: Servers) -> None:
    one = servers.open(expiry_s=4.0)
    with LineProcess("peer_servers", one.target.port, 100, 50) as other:
        port = other.line()
        servers.roster.append(Target("127.0.0.1", int(port)))
        eventually(lambda: one.finds_at(149) == f"tcp://127.0.0.1:{port}")
        other.freeze()
        eventually(lambda: one.finds(149) == [False], timeout_s=10.0)
        assert "has said nothing" in one.sync.trouble or "closed" in one.sync.trouble
        other.thaw()
        eventually(lambda: one.finds_at(149) is not None)


def test_nothing_is_found_in_another_namespace(servers: Servers) -> None:
    """At once, whatever was heard by then, and though the other follows later, or never."""
    one, two = servers.open([1]), servers.open([2])
    for namespace in (OTHER, NAMESPACE, OTHER):
        servers.know_each_other()
        assert one.finds(2) == two.finds(1) == [True]
        one.set_namespace(namespace)
        assert one.finds(2) == [False]
        servers.know_each_other()
        assert one.finds(2) == two.finds(1) == [False]
        two.set_namespace(namespace)
        assert two.finds(1) == [False]
        eventually(lambda: one.finds(2) == two.finds(1) == [True])


ID, NOBODY = b"s" * 16, bytes(16)
LIES: dict[str, tuple[Any, ...]] = {
    "erasures that nobody asked for": (messages.Erasures(NOBODY, [], b""),),
    "pages that nobody asked for": (messages.Found(1, [3]), b"page"),
    "a refusal": (messages.Refuse("no\nno \x1b[31m"),),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_is_left_and_tried_again(servers: Servers, lie: str) -> None:
    one = servers.open([1])
    with StrangeServer() as liar:
        servers.roster.append(Target(HOST, liar.port))
        for _ in range(2):
            liar.hear(messages.Follow)
            liar.say(*LIES[lie])
        eventually(lambda: one.sync.follower.num_failures >= 2)
        assert "\n" not in one.sync.trouble and "\x1b" not in one.sync.trouble


STRANGERS: dict[str, Any] = {
    "another namespace": messages.Follow(b"x" * 32, ID, NOBODY, NOBODY, 1, 1, None),
    "numbers from nowhere": messages.Follow(NAMESPACE, ID, NOBODY, NOBODY, 9, 1 << 60, 1 << 63),
    "erasures of another namespace": messages.Teach(
        b"x" * 32, [messages.ErasureNotice(ID, 0.0, None, None)]
    ),
    "an erasure of half a key": messages.Teach(
        NAMESPACE, [messages.ErasureNotice(ID, 0.0, None, b"x" * 31)]
    ),
    "ids of half a length": messages.Compare(NAMESPACE, b"12345"),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_disturbs_nobody(servers: Servers, who: str) -> None:
    one, two = servers.open(range(1, 1000)), servers.open()
    servers.know_each_other()
    with StrangeClient(one.target.port) as stranger:
        for _ in range(300):  # and reads nothing
            stranger.send(VERSION_FRAME, encode(STRANGERS[who]))
        one.hold(range(1, 1001))
        eventually(lambda: two.finds(1000) == [True])
        assert one.erased == []
        assert len(one.pages._followers._known) <= 3


def test_a_stranger_is_not_told_the_namespace(servers: Servers) -> None:
    """Whoever names it may ask for the keys of erased pages."""
    one = servers.open([1])
    assert is_true(one.erase(Erasure.of([b"k" * 32])), 20.0)
    with StrangeClient(one.target.port) as stranger:
        for namespace in (b"x" * 32, NAMESPACE):
            question = messages.Follow(namespace, ID, NOBODY, b"?" * 16, 1, 1, None)
            stranger.send(VERSION_FRAME, encode(question))
            answer, _ = stranger.hear()
            assert (answer.namespace == NAMESPACE) == (namespace == NAMESPACE)
            stranger.send(VERSION_FRAME, encode(messages.Compare(namespace, b"")))
            answer, _ = stranger.hear()
            assert len(answer.erasures) == (namespace == NAMESPACE)


@pytest.fixture
def mistreat(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, int], list[Any]]:
    """The first message of a kind goes out so often. What was mistreated."""

    def mistreated(kind: type, times: int) -> list[Any]:
        seen: list[Any] = []

        def patch(owner: type, name: str, outcome: Any) -> None:
            send = getattr(owner, name)

            def sent(*said: Any) -> Any:
                if seen or not any(isinstance(each, kind) for each in said):
                    return send(*said)
                seen.append(said)
                return [outcome, *(send(*said) for _ in range(times))][-1]

            monkeypatch.setattr(owner, name, sent)

        patch(PageLink, "send", True)
        patch(PageServer, "_send", [])
        return seen

    return mistreated


@pytest.mark.parametrize("times", [0, 2], ids=["lost", "twice"])
@pytest.mark.parametrize(
    "kind",
    [messages.Follow, messages.Changes, messages.Compare, messages.Erasures, messages.Teach],
)
def test_a_mistreated_message_costs_time_only(
    servers: Servers, mistreat: Callable[[type, int], list[Any]], kind: type, times: int
) -> None:
    seen = mistreat(kind, times)
    one, two = (servers.open(range(n, n + 99), listed=False, expiry_s=3.0) for n in (1, 50))
    one.erase(Erasure(tenant=b"t" * 16))
    two.erase(Erasure.of([key(7)]))
    servers.roster.append(one.target)  # both follow it
    eventually(lambda: seen and two.finds(1, 99) == [True, True])
    eventually(lambda: one.sync.book.digest == two.sync.book.digest)
    one.hold(range(2, 101))
    eventually(lambda: two.finds(1, 99, 100) == [False, True, True])
    assert one.forgotten == [key(7)] and two.purged == [b"t" * 16], "each once"


# ---- A picker follows them too ----


MODEL = CostModel(page_tokens=1, bytes_per_token=1, prefill=PrefillCost((1, 1, 1), token_bytes=1))


@pytest.fixture
def picker(monkeypatch: pytest.MonkeyPatch) -> Iterator[replicas.PageFollower]:
    monkeypatch.setattr(replicas, "AGAIN_S", 0.05)
    monkeypatch.setattr(replicas, "SILENCE_S", SIGN_OF_LIFE_S + 1)
    made = replicas.PageFollower()
    yield made
    made.close()
    made._mirror.check_integrity()


def followed(picker: replicas.PageFollower, server: Server, *, keyed: bool = False) -> Any:
    """How many of some pages it is known to hold, and what ends that."""
    where, namespace = f"tcp://*:{server.pages.port}", server.sync.namespace.hex()
    record = record_of(MODEL, pages_at=where, namespace=namespace, server="00", keyed=keyed)
    replica = replicas.Replica(f"http://{HOST}:1", ServerState(record, 0.0))
    replica.following = (picker.start(replica),)

    def held(pages: range) -> int:
        found = picker.bits(np.array(pages, np.uint64))
        return sum(bool(bits & replica.bit) for bits in found)

    return held, replica.following[0].cancel


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_picker_knows_what_came_and_went(
    servers: Servers, picker: replicas.PageFollower, mistreat: Any, times: int
) -> None:
    mistreat(messages.Changes, times)
    one, two = servers.open(range(1, 150_000), listed=False), servers.open([7], listed=False)
    (held, cancel), (of_two, _) = followed(picker, one), followed(picker, two)
    eventually(lambda: held(range(1, 150_010)) == 149_999 and of_two(range(1, 150_010)) == 1)
    one.hold(range(5, 150_005))
    eventually(lambda: held(range(1, 5)) == 0 and held(range(1, 150_010)) == 150_000)
    cancel()
    eventually(lambda: held(range(1, 150_010)) == 0)
    assert of_two(range(1, 150_010)) == 1


def test_a_picker_knows_no_pages_of_others(servers: Servers, picker: replicas.PageFollower) -> None:
    """Of other weights, or of servers with keys, where the key that lets ask opens pages too."""
    open_one = partial(servers.open, range(1, 100), listed=False)
    one, changed = open_one(), open_one()
    (held, _), (of_changed, _) = followed(picker, one), followed(picker, changed)
    changed.set_namespace(OTHER)
    of_keyed, _ = followed(picker, one, keyed=True)
    eventually(lambda: held(range(1, 100)) == 99 and of_changed(range(1, 100)) == 0)
    assert of_keyed(range(1, 100)) == 0


def test_a_picker_closes_however_busy(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table may grow for longer than it waits. What is left ends by itself."""
    monkeypatch.setattr(replicas, "STOP_S", 0.05)
    picker, let_go = replicas.PageFollower(), threading.Event()
    followed(picker, servers.open(range(1, 100), listed=False))
    assert picker._loop is not None
    picker._loop.call_soon_threadsafe(let_go.wait, 60.0)
    picker.close()
    let_go.set()
    eventually(lambda: not picker._thread.is_alive() and picker._context.closed)

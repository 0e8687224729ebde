"""Servers that follow each other: what one holds the others find, and no longer than that."""

from __future__ import annotations

from typing import Any

import pytest
from line_process import LineProcess
from page_peers import HOST, StrangeClient, StrangeServer
from peer_servers import NAMESPACE, Servers, key

from kit.waiting import eventually
from sglang_tiered.sharing.addresses import Target
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.messages import VERSION_FRAME, encode
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import is_true

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


ID, NOBODY = b"s" * 16, bytes(16)


def changes(
    start: int = 0, end: int | None = None, num_added: int = 1, more: bool = False
) -> messages.Changes:
    return messages.Changes(NAMESPACE, ID, NOBODY, 7, 1, start, end, num_added, 0, more)


PAGE = (5).to_bytes(8, "little")


LIES: dict[str, tuple[Any, bytes]] = {
    "half a page": (changes(), PAGE[:4]),
    "an end beyond all pages": (changes(end=1 << 63, num_added=0, more=True), b""),
    "an erasure of no pages": (
        messages.Erasures(NOBODY, [messages.ErasureNotice(ID, 0.0, None, b"")], b""),
        b"",
    ),
    "pages that nobody asked for": (messages.Found(1, [3]), b"page"),
    "a refusal": (messages.Refuse("no\nno \x1b[31m"), b""),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_is_left_and_tried_again(servers: Servers, lie: str) -> None:
    message, payload = LIES[lie]
    one = servers.open([1])
    with StrangeServer() as liar:
        servers.roster.append(Target(HOST, liar.port))
        for _ in range(2):
            liar.hear(messages.Follow)
            liar.say(message, *([payload] if payload else []))
            if lie == "an end beyond all pages":
                liar.say(changes(start=5, num_added=0), b"")
        eventually(lambda: one.sync.follower.num_failures >= 2 or one.finds(5) == [False])
        assert one.finds(5) == [False]
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

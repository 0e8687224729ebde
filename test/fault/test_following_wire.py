"""The wire between servers that follow each other, message by message: whatever becomes of one,
what is found in the end is there, and each erasure was applied once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from page_peers import HOST, StrangeClient, StrangeServer
from peer_servers import NAMESPACE, Servers, key

from kit.waiting import eventually
from sglang_tiered.sharing.addresses import Target
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.link import PageLink
from sglang_tiered.sharing.pages.messages import VERSION_FRAME, encode
from sglang_tiered.sharing.pages.server import PageServer
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import is_true

pytestmark = pytest.mark.timeout(120)

TENANT = b"t" * 16
ID, NOBODY = b"s" * 16, bytes(16)
Frames = list[bytes]


def mistreat(monkeypatch: pytest.MonkeyPatch, kind: str, what: str) -> list[Any]:
    """Do something once to the first message of a kind that is sent; returns it once it was."""
    done: list[Any] = []

    def passed(message: Any, payload: Any = ()) -> list[Frames]:
        frames = [VERSION_FRAME, encode(message), *map(bytes, payload)]
        if done or msgspec.msgpack.decode(frames[1])[0] != kind:
            return [frames]
        done.append(message)
        return MISTREATMENTS[what](frames)

    def to_server(self: PageLink, message: Any) -> bool:
        for frames in passed(message):
            self.socket.send_multipart(frames)
        return True

    def to_client(self: PageServer, client: bytes, message: Any, payload: Any = ()) -> list[Any]:
        for frames in passed(message, payload):
            self._socket.send_multipart([client, *frames])
        return []

    monkeypatch.setattr(PageLink, "send", to_server)
    monkeypatch.setattr(PageServer, "_send", to_client)
    return done


MISTREATMENTS: dict[str, Callable[[Frames], list[Frames]]] = {
    "dropped": lambda frames: [],
    "twice": lambda frames: [frames, frames],
    "cut": lambda frames: [[*frames[:1], frames[1][:-1], *frames[2:]]],
    "without its payload": lambda frames: [frames[:2]],
    "with more payload": lambda frames: [[*frames, b"12345678"]],
    "of another version": lambda frames: [[b"sgt-pages/1", *frames[1:]]],
    "garbage": lambda frames: [[b"\xff" * 40, b"\x00", *frames[2:]]],
    "of one frame": lambda frames: [frames[:1]],
}
KINDS = ["follow", "changes", "compare", "erasures", "teach"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", MISTREATMENTS)
def test_a_mistreated_message_costs_time_only(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    mistreated = mistreat(monkeypatch, kind, what)
    one = servers.open(range(1, 100), listed=False, expiry_s=4.0)
    two = servers.open(range(50, 150), listed=False, expiry_s=4.0)
    one.erase(Erasure(tenant=TENANT))
    two.erase(Erasure.of([key(7)]))
    servers.roster.append(one.target)  # one follows itself, two follows one
    eventually(lambda: mistreated)
    eventually(lambda: two.finds(1, 99) == [True, True])
    eventually(lambda: one.sync.book.digest == two.sync.book.digest)
    one.hold(range(2, 101))
    eventually(lambda: two.finds(1, 99, 100) == [False, True, True])
    eventually(lambda: one.forgotten and two.purged)
    assert one.forgotten == [key(7)] and two.purged == [TENANT]
    assert two.sync.mirror.figures().num_pages == 99


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

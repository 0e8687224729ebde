"""Page servers that lie, and clients that say anything: nothing lands that was not asked for, no
fetch ends wrong, and what is held for anybody is bounded."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from page_peers import (
    HOST,
    NAMESPACE,
    PATIENT,
    StrangeClient,
    StrangeServer,
    Wanted,
    make_pages,
    page_client,
    page_server,
)

from kit.waiting import eventually
from server_process import free_port
from sglang_tiered.checksummed import page_checksum
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.link import PageOutcome
from sglang_tiered.sharing.pages.messages import VERSION_FRAME
from sglang_tiered.wire.keys import PEER, Keys, load_keys, make_keys
from sglang_tiered.wire.sockets import encode

pytestmark = pytest.mark.timeout(60)

PAGES = make_pages(1, [3000, 5000, 70_000])
MISSING = [PageOutcome.LOST] * 3


@pytest.fixture
def liar() -> Iterator[StrangeServer]:
    with StrangeServer() as server:
        yield server


def checksums(pages: dict[bytes, bytes]) -> list[int | None]:
    return [page_checksum(NAMESPACE, key, [page]) for key, page in pages.items()]


# ---- Servers ----


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_damaged_page_costs_no_neighbour(index: int, liar: StrangeServer) -> None:
    sent = list(PAGES.values())
    sent[index] = sent[index][:-1] + bytes([sent[index][-1] ^ 1])
    with page_client() as client:
        wanted = Wanted(client, liar.port, PAGES, cuts=2)
        asked = liar.hear()
        liar.say(messages.Found(asked.number, checksums(PAGES)), *sent)
        outcomes = [PageOutcome.OK] * 3
        outcomes[index] = PageOutcome.DAMAGED
        assert wanted.wait() == outcomes
        assert client.num_links == 1


def packed(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def _lies(asked: messages.Fetch) -> dict[str, list[bytes]]:
    sums, whole, number = checksums(PAGES), b"".join(PAGES.values()), asked.number
    spoken = {
        "shorter": [packed("found", number, sums), whole[:-1]],
        "longer": [packed("found", number, sums), whole + b"x"],
        "no payload": [packed("found", number, sums)],
        "one page more": [packed("found", number, [*sums, 1]), whole],
        "one page less": [packed("found", number, sums[:2]), whole],
        "too many pages": [packed("found", number, [1] * 100_000), whole],
        "negative checksum": [packed("found", number, [-1, 1, 1]), whole],
        "huge number": [packed("busy", 2**64 - 1)],
        "asks itself": [encode(asked)],
        "refusal": [packed("refuse", "no\n" * 1000)],
        **UNSPEAKABLE,
    }
    return {name: [VERSION_FRAME, *frames] for name, frames in spoken.items()} | FOREIGN


UNSPEAKABLE: dict[str, list[bytes]] = {
    "one frame": [],
    "unknown": [packed("pickle", b"cos\nsystem\n")],
    "no msgpack": [b"\xc1"],
    "deep": [b"\x91" * 100_000],
}
FOREIGN = {
    "empty": [b""],
    "other version": [b"sgt-pages/4", b"whatever a later version says"],
    "other protocol": [b"sgt-kv/2", b"\x01"],
}
LIES = list(_lies(messages.Fetch(1, NAMESPACE, b"", [1], 1)))


@pytest.mark.parametrize("name", LIES)
def test_a_misfit_answer_ends_only_its_connection(name: str, liar: StrangeServer) -> None:
    with page_server(PAGES) as (honest, _), page_client() as client:
        wanted = Wanted(client, liar.port, PAGES)
        asked = liar.hear()
        liar.send(*_lies(asked)[name])
        assert wanted.wait() == MISSING
        assert wanted.is_untouched, "checked before a byte is copied"
        assert client.num_breaches == 1
        assert client.num_links == 0
        assert Wanted(client, honest.port, PAGES).wait() == [PageOutcome.OK] * 3


def test_answers_nobody_asked_for_land_nowhere(liar: StrangeServer) -> None:
    with page_client() as client:
        wanted = Wanted(client, liar.port, PAGES)
        asked = liar.hear()
        for number in (asked.number + 1, 1 << 61):
            liar.answer(asked, PAGES, number)
        liar.say(messages.Busy(asked.number + 2))
        liar.say(messages.Found(asked.number, [None] * 3))
        assert wanted.wait() == [PageOutcome.MISS] * 3
        assert wanted.is_untouched
        assert client.num_unasked == 3


def test_answers_never_land_after_the_deadline(liar: StrangeServer) -> None:
    """Whatever the interleaving, what the buffers hold when ``done`` is called stays."""
    pages = make_pages(3, [100_000] * 8)
    settings = replace(PATIENT, request_bytes=100_000)
    with page_client(settings) as client:
        first = Wanted(client, liar.port, pages)  # so that they are connected
        for one in liar.hear_all(first, client, 0):
            liar.answer(one, pages)
        assert set(first.wait()) == {PageOutcome.OK}
        deadlines = [0.004 + 0.0005 * number for number in range(30)]
        deadlines += [0.02 * 2**number for number in range(10)]  # where others compute as well
        seen: set[PageOutcome] = set()
        for round_number, deadline_s in enumerate(deadlines):
            if round_number >= 30 and PageOutcome.OK in seen:
                break
            num_before = client.num_requests
            wanted = Wanted(client, liar.port, pages, deadline_s=deadline_s)
            for one in liar.hear_all(wanted, client, num_before):
                liar.answer(one, pages)
            seen.update(wanted.wait())
            before = client.num_overdue + client.outcomes.total()
            liar.say(messages.Busy(1 << 60))  # behind all answers
            eventually(lambda n=round_number: client.num_unasked == n + 1)
            assert before
            assert wanted.is_as_it_ended
        assert PageOutcome.OK in seen


def test_a_server_owing_answers_is_not_asked_on(liar: StrangeServer) -> None:
    settings = replace(PATIENT, max_requests=2)
    with page_client(settings) as client:
        for _ in range(20):
            Wanted(client, liar.port, PAGES, deadline_s=0.01).wait()
        assert client.num_requests == 2


@pytest.mark.parametrize("how", ["mute", "hung", "closed"])
def test_a_silent_server_is_given_up(how: str) -> None:
    settings = replace(PATIENT, connect_timeout_s=0.3, answer_timeout_s=0.3)
    with (
        socket.create_server((HOST, 0)) as mute,
        StrangeServer() as hung,
        page_client(settings) as client,
    ):
        ports = {"mute": mute.getsockname()[1], "hung": hung.port, "closed": free_port()}
        assert Wanted(client, ports[how], PAGES, deadline_s=None).wait() == MISSING
        eventually(lambda: client.num_links == 0)


# ---- Clients ----

KEYS = b"".join(PAGES)
FRAMES: dict[str, list[bytes]] = {
    name: [VERSION_FRAME, *frames]
    for name, frames in {
        "answer": [packed("busy", 1)],
        "many frames": [b"x"] * 500,
        "short namespace": [packed("fetch", 1, b"\x22" * 31, KEYS, [1, 2, 3], 9)],
        "huge number": [packed("fetch", 2**64 - 1, NAMESPACE, KEYS, [1, 2, 3], 9)],
        "no pages": [packed("fetch", 1, NAMESPACE, b"", [], 9)],
        "fewer keys": [packed("fetch", 1, NAMESPACE, KEYS[:-32], [1, 2, 3], 9)],
        "cut key": [packed("fetch", 1, NAMESPACE, KEYS[:-1], [1, 2, 3], 9)],
        "same key twice": [packed("fetch", 1, NAMESPACE, KEYS[:32] * 2, [1, 2], 9)],
        "length 0": [packed("fetch", 1, NAMESPACE, KEYS, [1, 0, 3], 9)],
        "huge length": [packed("fetch", 1, NAMESPACE, KEYS[:32], [1 << 40], 9)],
        "huge sum": [packed("fetch", 1, NAMESPACE, KEYS[:64], [1 << 26, 1 << 26], 9)],
        "too many": [packed("fetch", 1, NAMESPACE, bytes(32 * 4097), [1] * 4097, 9)],
        "no patience": [packed("fetch", 1, NAMESPACE, KEYS, [1, 2, 3], 0)],
        **UNSPEAKABLE,
    }.items()
} | FOREIGN


@pytest.mark.parametrize("name", FRAMES)
def test_foreign_frames_are_refused_and_harm_nothing(name: str) -> None:
    with page_server(PAGES) as (server, tier), page_client() as client:
        with StrangeClient(server.port) as stranger:
            stranger.send(*FRAMES[name])
            message, _ = stranger.hear()
            assert isinstance(message, messages.Refuse)
            assert tier.deadlines == [], "it was read"
            assert server.num_breaches == 1
            stranger.ask(5, PAGES)  # and it may still ask as it should
            message, payload = stranger.hear()
            assert isinstance(message, messages.Found)
            assert b"".join(payload) == b"".join(PAGES.values())
        assert Wanted(client, server.port, PAGES).wait() == [PageOutcome.OK] * 3


def test_an_oversized_frame_is_not_buffered() -> None:
    with page_server(PAGES) as (server, _), page_client() as client:
        with StrangeClient(server.port) as stranger:
            stranger.send(VERSION_FRAME, bytes(messages.MAX_CLIENT_FRAME_BYTES + 1))
            assert Wanted(client, server.port, PAGES).wait() == [PageOutcome.OK] * 3
        assert server.num_breaches == 0, "hung up on before it was read"


def test_requests_without_reading_cost_bounded_memory() -> None:
    pages = make_pages(4, [100_000] * 4)
    limit = 4_000_000
    # It is stuck from its first unread answer on, and a busy machine takes seconds to ask.
    settings = replace(
        PATIENT, max_serving_bytes=limit, max_queued_bytes=8_000_000, stuck_timeout_s=8.0
    )
    with (
        page_server(pages, settings=settings) as (server, _),
        page_client() as client,
        StrangeClient(server.port, hwm=1) as stranger,
    ):
        for number in range(1, 10_001):
            stranger.ask(number, pages)
        eventually(lambda: server.num_requests == 10_000)
        assert server.held_bytes <= limit
        assert server.num_waiting <= 64
        assert server.num_busy + server.num_dropped > 9000
        # Half of the memory is not that client's to hold up.
        assert Wanted(client, server.port, pages).wait() == [PageOutcome.OK] * 4
        # It is hung up on, and what was held for it is free again.
        eventually(lambda: server.held_bytes == 0)


HASTY = replace(PATIENT, connect_timeout_s=1.0, answer_timeout_s=1.0)


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Keys | None]:
    """``forged`` can encrypt to a server of ``ours``, and is not among those admitted."""
    for name in ("ours", "theirs"):
        make_keys(tmp_path / name, [PEER])
    ours, theirs = (load_keys(tmp_path / name, PEER) for name in ("ours", "theirs"))
    forged = replace(theirs, peer_public=ours.public)
    return {"ours": ours, "theirs": theirs, "forged": forged, "none": None}


@pytest.mark.parametrize(
    ("asking", "serving"),
    [("theirs", "ours"), ("none", "ours"), ("forged", "ours"), ("ours", "none")],
)
def test_only_who_has_the_same_keys_gets_pages(
    known: dict[str, Keys | None], asking: str, serving: str
) -> None:
    with page_server(PAGES, keys=known[serving]) as (server, tier):
        with page_client(HASTY, keys=known[asking]) as stranger:
            wanted = Wanted(stranger, server.port, PAGES)
            assert wanted.wait() == MISSING
            assert wanted.is_untouched
            assert tier.deadlines == [] and server.num_requests == 0
        with page_client(keys=known[serving]) as friend:
            wanted = Wanted(friend, server.port, PAGES)
            assert wanted.wait() == [PageOutcome.OK] * 3
            assert wanted.is_right

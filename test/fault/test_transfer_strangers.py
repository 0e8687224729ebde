"""Whoever reaches a port, and says whatever it likes: other sessions do not notice, and nothing is
written where nobody asked for it."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from strange_sockets import TIMEOUT_MS
from transfer_pair import (
    HOST,
    IMPATIENT,
    MODEL,
    Decode,
    Prefill,
    decode,
    hand_over,
    meet,
    pair_keys,
    prefill,
)
from transfer_strangers import StrangeDecode, StrangePrefill
from zmq.utils.monitor import parse_monitor_message

from kit.waiting import eventually
from sglang_tiered.transfer import messages
from sglang_tiered.transfer.messages import VERSION_FRAME
from sglang_tiered.transfer.sessions import PrefillLinks
from sglang_tiered.wire.keys import Tagger, load_keys, make_keys
from sglang_tiered.wire.sockets import encode

pytestmark = pytest.mark.timeout(60)
SETTINGS = IMPATIENT


FRAMES: dict[str, list[bytes]] = {
    "empty": [b""],
    "no_body": [VERSION_FRAME],
    "no_msgpack": [VERSION_FRAME, b"\xc1"],
    "other_types": [VERSION_FRAME, msgspec.msgpack.encode(["open", "one", None, 3.5, {}, [], 1])],
    "unknown_tag": [VERSION_FRAME, msgspec.msgpack.encode(["pickle", b"cos\nsystem\n"])],
    "deep": [VERSION_FRAME, b"\x91" * 100_000],
    "negative": [VERSION_FRAME, encode(messages.Open(1, 1, -1, [], 0, 1, False, MODEL))],
    "huge_number": [VERSION_FRAME, msgspec.msgpack.encode(["ping", 2**64 - 1])],
    "other_version": [b"sgt-kv/2", b"whatever a later version says"],
    "large": [VERSION_FRAME, bytes(1 << 20)],
    "many_frames": [VERSION_FRAME, *[b"x"] * 500],
}


@pytest.mark.parametrize("name", FRAMES)
def test_foreign_frames_harm_no_session(name: str, sender: Prefill, receiver: Decode) -> None:
    hand_over(sender, receiver, 1)
    with StrangeDecode(sender.address) as stranger:
        stranger.control.send_multipart(FRAMES[name])
        stranger.greet()
        stranger.join()
        assert stranger.data is not None
        stranger.data.send_multipart(FRAMES[name])
        hand_over(sender, receiver, 2)
    eventually(lambda: sender.endpoint.num_sessions == 1)
    assert sender.endpoint.stats.num_sessions_lost == 1


def test_an_oversized_frame_is_not_buffered(sender: Prefill, receiver: Decode) -> None:
    with StrangeDecode(sender.address) as stranger:
        stranger.greet()
        stranger.control.send_multipart([VERSION_FRAME, bytes(messages.MAX_CONTROL_BYTES + 1)])
        eventually(lambda: sender.endpoint.stats.num_sessions_lost == 1)
    hand_over(sender, receiver, 99)


WELCOME_LIES: dict[str, dict[str, Any]] = {
    "many_connections": {"num_connections": 1 << 40},
    "no_connections": {"num_connections": 0},
    "long_token": {"session": bytes(messages.TOKEN_BYTES + 1)},
    "long_key": {"key": bytes(65)},
    "long_door": {"door": "x" * 200},
    "high_port": {"data_port": 1 << 20},
}


@pytest.mark.parametrize("name", WELCOME_LIES)
def test_an_impossible_welcome_fails_the_room(
    name: str, receiver: Decode, stranger: StrangePrefill
) -> None:
    receiver.open(1, [stranger.address], [0])
    stranger.welcome(**WELCOME_LIES[name])
    assert receiver.events.wait_for("failed", 1)[2]


def test_a_second_hello_ends_the_first_session(sender: Prefill) -> None:
    """Or its rooms would wait for ever."""
    with StrangeDecode(sender.address) as stranger:
        stranger.greet(instance=b"one")
        sender.endpoint.expect_room(1)
        stranger.open(1)
        sender.events.wait_for("ready", 1)
        stranger.greet(instance=b"two")
        assert "connected anew" in sender.events.wait_for("failed", 1)[2]
        assert sender.endpoint.num_sessions == 1


def test_a_session_whose_data_connections_never_come_ends(sender: Prefill) -> None:
    """Its rooms would wait for ever: nothing is under way that could be missed."""
    with StrangeDecode(sender.address) as stranger:
        stranger.greet()
        stranger.open(1)
        sender.endpoint.expect_room(1)
        sender.events.wait_for("ready", 1)
        sender.send(1, [0])

        def pings() -> bool:
            stranger.tell(messages.Ping(1))
            return "failed" in sender.events.kinds(1)

        eventually(pings)
        assert "no data connection" in sender.events.wait_for("failed", 1)[2]


def test_a_wrong_proof_joins_no_session(sender: Prefill, tmp_path: Path) -> None:
    keys = pair_keys(tmp_path)
    with prefill(keys=keys["prefill"]) as guarded, decode(keys=keys["decode"]) as receiver:
        hand_over(guarded, receiver, 1)
        session = next(iter(guarded.endpoint._peers))
        with StrangeDecode(sender.address) as stranger:
            stranger.welcome = messages.Welcome(
                b"", session.token, 0, receiver.pool.layout, guarded.endpoint._peers.data_port, 1,
                b"wrong", None,
            )  # fmt: skip
            session.links[0] = None
            before = guarded.endpoint.stats.num_refused
            stranger.join()
            eventually(lambda: guarded.endpoint.stats.num_refused > before)
            assert session.links == [None]


def test_another_decode_cannot_touch_a_served_room(sender: Prefill, receiver: Decode) -> None:
    """It claims, asks and aborts, and goes."""
    sender.endpoint.expect_room(1)
    with StrangeDecode(sender.address) as stranger:
        stranger.greet()
        stranger.join()
        stranger.tell(messages.Claim(1, MODEL))
        receiver.open(1, [sender], [1, 2])
        sender.events.wait_for("ready", 1)
        stranger.open(1, 2)
        assert "serves this room number already" in stranger.hear(messages.Failed).reason
        stranger.tell(messages.Abort(1, 0, "mine now"))
        stranger.tell(messages.Ping(3))
        stranger.hear(messages.Pong)
    eventually(lambda: sender.endpoint.num_sessions == 1)
    sender.send(1, [8, 9])
    receiver.events.wait_for("done", 1)
    sender.events.wait_for("done", 1)
    assert np.array_equal(receiver.pool.pages([1, 2]), sender.pool.pages([8, 9]))


def page(of: StrangePrefill, number: int = 0) -> bytes:
    return of.pool.pages([number]).tobytes()


SLAB_LIES: dict[str, dict[str, Any]] = {
    "pages_out_of_bounds": {"start": 1},
    "far_out_of_bounds": {"start": 2**62},
    "more_pages": {"num_pages": 2},
    "no_pages": {"num_pages": 0},
    "pairs_out_of_bounds": {"first_pair": 1},
    "no_pairs": {"num_pairs": 0},
    "unknown_state": {"component": 3},
    "negative_component": {"component": -2},
    "codec_that_is_off": {"form": messages.ENCODED},
    "memory_never_offered": {"form": messages.NAMED},
    "unknown_form": {"form": 9},
    "huge_number": {"seq": 2**40},
    "negative": {"start": -1},
}


@pytest.mark.parametrize("name", SLAB_LIES)
def test_a_forged_slab_fails_its_room_unwritten(
    name: str, receiver: Decode, stranger: StrangePrefill
) -> None:
    opened = stranger.opened_by(receiver, [7])
    is_named = SLAB_LIES[name].get("form") == messages.NAMED
    payload = messages.WHERE.pack(0, 0) + bytes(4) if is_named else page(stranger)
    stranger.slab(opened, payload, **SLAB_LIES[name])
    assert "could not write" not in receiver.events.wait_for("failed", 1)[2], "it was tried"
    assert stranger.hear((messages.Abort, messages.Bye)).reason
    assert not receiver.pool.kv.any()


def test_slabs_of_anothers_room_end_the_session(
    sender: Prefill, receiver: Decode, stranger: StrangePrefill
) -> None:
    meet(sender, receiver, 5, [7])
    opened = stranger.opened_by(receiver, [8])
    generation = receiver.endpoint._rooms[5].generation
    theirs = msgspec.structs.replace(opened, room=5, generation=generation)
    stranger.tell(messages.Failed(5, generation, "not yours to fail"))
    stranger.slab(theirs, page(stranger))
    assert "another prefill instance" in receiver.events.wait_for("lost")[2]
    assert not receiver.pool.kv.any()
    sender.send(5, [5])
    receiver.events.wait_for("done", 5)
    assert np.array_equal(receiver.pool.pages([7]), sender.pool.pages([5]))


def test_a_wrong_authenticator_lands_nothing(receiver: Decode, stranger: StrangePrefill) -> None:
    """The checksum is no secret: who changes bytes on their way can make it anew."""
    key = b"k" * 32
    opened = stranger.opened_by(receiver, [7], key=key)
    header = messages.Slab(1, opened.generation, 0, -1, 0, 4, 0, 1, 0, 0)
    for tag in (b"", b"x" * 16, Tagger(b"other").tag(encode(header))):
        stranger.send(header, page(stranger), tag=tag)
    eventually(lambda: receiver.endpoint.stats.num_refused == 3)
    stranger.tell(messages.Failed(1, opened.generation, "line\n\x1b[31m" + "x" * 100_000))
    told = receiver.events.wait_for("failed", 1)[2]
    assert not receiver.pool.kv.any()
    assert told.isprintable() and len(told) < 1000, "a reason goes to logs and clients"


@pytest.mark.parametrize(
    ("pages", "aux", "says"),
    [([7, 8], [], "bytes of KV"), ([], [b"short"], "metadata rows")],
    ids=["a page is missing", "metadata of another shape"],
)
def test_an_end_that_lies_fails_the_room(
    pages: list[int], aux: list[bytes], says: str, receiver: Decode, stranger: StrangePrefill
) -> None:
    """A sender that forgets a page, a layer or a head says that it is done all the same."""
    opened = stranger.opened_by(receiver, pages)
    if pages:
        stranger.slab(opened, page(stranger), num_pages=1)
    stranger.send(messages.Last(1, opened.generation, int(bool(pages)), aux))
    assert says in receiver.events.wait_for("failed", 1)[2]


def test_nothing_lands_in_a_room_that_was_received(
    receiver: Decode, stranger: StrangePrefill
) -> None:
    opened = stranger.opened_by(receiver, [7])
    stranger.slab(opened, page(stranger))
    stranger.send(messages.Last(1, opened.generation, 1, []))
    receiver.events.wait_for("done", 1)
    before = receiver.pool.kv.copy()
    stranger.slab(opened, page(stranger, 9), seq=1)
    eventually(lambda: receiver.endpoint.stats.num_slabs == 2)
    assert np.array_equal(receiver.pool.kv, before)


def test_keys_that_get_no_socket_fail_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first keys were refused, and no socket is left to try the next."""
    ours, theirs = pair_keys(tmp_path / "ours"), pair_keys(tmp_path / "theirs")["decode"]
    make, made = PrefillLinks._make_socket, []

    def make_once(links: PrefillLinks, *of: Any) -> Any:
        if made:
            raise zmq.ZMQError(errno.EMFILE)
        made.append(make(links, *of))
        return made[0]

    monkeypatch.setattr(PrefillLinks, "_make_socket", make_once)
    keys = replace(theirs, other_peers=(theirs.peer_public,))
    with prefill(keys=ours["prefill"]) as sender, decode(keys=keys) as receiver:
        receiver.open(1, [sender], [1])
        assert "cannot be addressed" in receiver.events.wait_for("failed", 1)[2]


def test_keys_keep_strangers_out(tmp_path: Path) -> None:
    ours, theirs = pair_keys(tmp_path / "ours"), pair_keys(tmp_path / "theirs")["decode"]
    with prefill(settings=IMPATIENT, keys=ours["prefill"]) as guarded:
        for keys in (None, theirs):
            with decode(settings=IMPATIENT, keys=keys) as stranger:
                stranger.open(1, [guarded], [0])
                assert stranger.events.wait_for("failed", 1)[2]
        # The right server key, but a client key that is not in the directory.
        mixed = replace(ours["decode"], public=theirs.public, secret=theirs.secret)
        with decode(settings=IMPATIENT, keys=mixed) as stranger:
            stranger.open(1, [guarded], [0])
            assert "refuses this server's key" in stranger.events.wait_for("failed", 1)[2]
        assert guarded.endpoint.num_sessions == 0
        with decode(settings=IMPATIENT, keys=ours["decode"]) as receiver:
            hand_over(guarded, receiver, 99)


def test_keys_are_replaced_while_servers_serve(tmp_path: Path) -> None:
    """Each step of the page, with servers of the step before still up."""
    old, new = tmp_path / "old", tmp_path / "new"
    make_keys(old)
    make_keys(new)
    keys = {}
    for step in ("before", "both", "swapped", "after"):
        own, other = (old, new) if step in ("before", "both") else (new, old)
        shutil.copytree(own, folder := tmp_path / step)
        for role in ("prefill", "decode") if step in ("both", "swapped") else ():
            shutil.copy(other / f"{role}.key", folder / f"{role}-other.key")
        keys[step] = {role: load_keys(folder, role) for role in ("prefill", "decode")}
    steps = list(keys)
    for one, two in [*pairwise(steps), *pairwise(steps[::-1]), ("before", "after")]:
        with (
            prefill(settings=IMPATIENT, keys=keys[one]["prefill"]) as sender,
            decode(settings=IMPATIENT, keys=keys[two]["decode"]) as receiver,
        ):
            if (one, two) == ("before", "after"):
                receiver.open(1, [sender], [0])
                assert receiver.events.wait_for("failed", 1)[2]
            else:
                hand_over(sender, receiver, 99)


def is_admitted(port: int, name: str | None = None, password: str = "") -> bool:
    """Whether somebody who connects gets as far as messages."""
    ends = {
        *(zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED),
        *(zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    }
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        if name is not None:
            stranger.plain_username, stranger.plain_password = name.encode(), password.encode()
        with stranger.get_monitor_socket() as monitor:
            monitor.rcvtimeo = TIMEOUT_MS
            stranger.connect(f"tcp://{HOST}:{port}")
            while True:
                event = parse_monitor_message(monitor.recv_multipart())["event"]
                if event in ends:
                    stranger.disable_monitor()
                    return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)


def test_with_keys_only_a_session_sends_data(tmp_path: Path) -> None:
    """ZeroMQ collects all frames of a message before anybody can look at the first: an endless one
    takes all memory there is."""
    keys = pair_keys(tmp_path)
    with prefill(settings=IMPATIENT, keys=keys["prefill"]) as sender:
        port, passwords = sender.endpoint._peers.data_port, sender.endpoint._peers._passwords
        assert not is_admitted(port)
        with decode(settings=IMPATIENT, keys=keys["decode"]) as receiver:
            hand_over(sender, receiver, 99)
            ((name, password),) = passwords.items()
            assert not is_admitted(port)
            assert not is_admitted(port, name, "x")
            assert not is_admitted(port, name, password[:-1])
            assert not is_admitted(port, "0" * len(name), password)
            assert is_admitted(port, name, password), "or the others say nothing"
            hand_over(sender, receiver, 99)
        eventually(lambda: sender.endpoint.num_sessions == 0)
        assert not is_admitted(port, name, password), "its session is over"


@pytest.mark.parametrize("is_keyed", [False, True])
def test_only_allowed_machines_are_asked(is_keyed: bool, tmp_path: Path) -> None:
    """Keys do not replace the list."""
    keys = pair_keys(tmp_path)["decode"] if is_keyed else None
    elsewhere = "203.0.113.1", 9  # nobody's (RFC 5737)
    for network in ("192.0.2.0/24", "203.0.113.0/24"):
        settings = msgspec.structs.replace(IMPATIENT, allowed_networks=(network,))
        with decode(settings=settings, keys=keys) as receiver:
            receiver.open(1, [elsewhere], [0])
            reason = receiver.events.wait_for("failed", 1)[2]
            assert ("--transfer-allow" in reason) == network.startswith("192")

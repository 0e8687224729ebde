"""Strangers on the same machine, at prefill's door and as the prefill that decode goes to: nobody
reads a process that is not to be read, or pages that were not handed over."""

from __future__ import annotations

import os
import socket
from contextlib import closing

import numpy as np
import pytest
from msgspec.structs import replace
from transfer_pair import DEADLINE_S, SAME_HOST, Decode, Prefill, decode, hand_over
from transfer_strangers import strange_decode, strange_prefill

from kit.waiting import eventually
from sglang_tiered.transfer import messages, same_host
from sglang_tiered.transfer.same_host import Door
from sglang_tiered.wire import sockets

pytestmark = pytest.mark.timeout(60)

SETTINGS = replace(
    SAME_HOST, peer_timeout_s=60.0, connect_timeout_s=60.0, progress_timeout_s=60.0
)  # with strangers, who give no sign of life


def test_no_process_may_trace_prefill_before_authentication(
    sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[int] = []
    monkeypatch.setattr(same_host, "_may_be_read_by", allowed.append)
    with strange_decode(sender.address) as stranger:
        door = stranger.greet().door
        assert door is not None and not allowed
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as guest:
            guest.bind("")
            guest.connect(f"\0{door}")
            for token in (b"", b"x" * 16, b"x" * 4096):
                guest.send(token)
            assert not allowed
            hand_over(sender, receiver)
            guest.setblocking(False)
            with pytest.raises(BlockingIOError):
                guest.recv(1)  # it is told nothing
        assert allowed == [os.getpid()]
        assert receiver.endpoint.stats.same_host_bytes == 2 * 4 * 512
        receiver.endpoint.close()
        eventually(lambda: allowed == [os.getpid(), 0])  # nobody any more


def test_a_relay_to_another_door_reads_nothing(sender: Prefill, receiver: Decode) -> None:
    """It opens a session of its own there, and hands it on: prefill and decode are one user's, so
    the kernel says yes to both. Pages that prefill never sent are not to be had that way."""
    with strange_decode(sender.address) as there, strange_prefill() as here:
        theirs = there.greet()
        there.join()
        sender.endpoint.expect_room(1)
        receiver.open(1, [here.address], [7, 8])
        here.welcome(session=theirs.session, door=theirs.door)
        here.joined()
        opened = here.hear(messages.Open)
        session = next(iter(sender.endpoint._peers))
        eventually(lambda: session.is_reader)  # decode, for the kernel names it
        there.open(1, 2, generation=opened.generation)
        sender.events.wait_for("ready", 1)
        sender.send(1, [5, 6])
        _, header, tag, payload = there.take()
        named = sockets.decode(header, messages.data_from_prefill)
        assert isinstance(named, messages.Slab) and named.form == messages.NAMED
        fence = payload[: messages.WHERE.size]  # which stands
        for page in (9, 63, 64, 2**31 - 1):
            wanted = fence + np.array([page, page], "<i4").tobytes()
            for lie in (b"", tag):
                here.send(named, wanted, tag=lie)
        eventually(lambda: receiver.endpoint.stats.num_refused == 8)
        assert not receiver.pool.kv.any()
        here.send(named, payload, tag=tag)
        eventually(lambda: receiver.endpoint.stats.same_host_bytes)
        assert np.array_equal(receiver.pool.pages([7, 8]), sender.pool.pages([5, 6])), "as sent"


def test_a_crowded_door_keeps_no_decode_out(sender: Prefill, receiver: Decode) -> None:
    with (
        strange_decode(sender.address) as stranger,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as visitor,
    ):
        visitor.settimeout(DEADLINE_S)
        visitor.connect(f"\0{stranger.greet().door}")
        for _ in range(300):
            visitor.send(b"x" * 16)
        hand_over(sender, receiver)


def test_a_pull_of_unoffered_memory_fails_the_room(receiver: Decode) -> None:
    with strange_prefill() as stranger:
        opened = stranger.opened_by(receiver, [7])
        stranger.name(opened, np.array([0], "<i4").tobytes())
        assert "cannot read" in receiver.events.wait_for("failed", 1)[2]


@pytest.mark.parametrize("payload", [b"", b"\0\0\0", b"\xff\xff\xff\xff", b"\x40\0\0\0", bytes(8)])
def test_a_pull_of_impossible_pages_fails_the_room(payload: bytes) -> None:
    with (
        decode(settings=SETTINGS) as receiver,
        strange_prefill() as stranger,
        closing(Door()) as door,
    ):
        receiver.open(1, [stranger.address], [7])
        stranger.welcome(door=door.name)
        stranger.joined()
        opened = stranger.hear(messages.Open)
        ((_, pid, address),) = door.visits()
        tagger = door.admit(pid, address, stranger.pool.memories.kv.buffers)
        stranger.name(opened, payload, tagger)
        assert "prefill name" in receiver.events.wait_for("failed", 1)[2]
        assert not receiver.pool.kv.any()


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 64, "\ud7ff" * 60, f"sglang-tiered-{0:032x}"])
def test_a_door_where_nobody_is_costs_nothing(name: str) -> None:
    with decode(settings=SETTINGS) as receiver, strange_prefill() as stranger:
        opened = stranger.opened_by(receiver, [7], door=name)
        stranger.slab(opened, stranger.pool.pages([0]).tobytes())
        stranger.send(messages.Last(1, opened.generation, 1, []))
        receiver.events.wait_for("done", 1)


def test_a_foreign_socket_is_not_talked_to(receiver: Decode) -> None:
    """Of any program of this machine, which a client of decode may name."""
    with (
        strange_prefill() as stranger,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as program,
    ):
        program.setblocking(False)
        program.bind(name := f"\0other-program-{os.getpid()}")
        stranger.opened_by(receiver, [7], door=name[1:])  # it went to the door before
        with pytest.raises(BlockingIOError):
            program.recv(1)

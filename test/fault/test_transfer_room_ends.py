"""Every way a room can end early, from either side and in every state, and what is left of it."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from transfer_pair import (
    DEADLINE_S,
    IMPATIENT,
    TCP,
    Decode,
    Prefill,
    Shape,
    decode,
    hand_over,
    hold,
    indices,
    meet,
    prefill,
)
from transfer_strangers import StrangeDecode, StrangePrefill

from kit.waiting import eventually
from sglang_tiered.transfer import messages
from sglang_tiered.transfer import rooms as receiving
from sglang_tiered.transfer.send_queue import TARGET_SLAB_BYTES, Chunk

pytestmark = pytest.mark.timeout(60)
SETTINGS = TCP

STATES = ("expected", "opened", "ready", "part_sent", "last_queued", "concluded")


def bring(sender: Prefill, receiver: Decode, state: str, room: int = 1) -> None:
    """A room of two pages, in ``state``."""
    if state != "opened":
        sender.endpoint.expect_room(room)
        eventually(lambda: sender.endpoint.num_rooms == 1)
    if state == "expected":
        return
    receiver.open(room, [sender], [1, 2])
    if state == "opened":
        eventually(lambda: sender.endpoint.num_rooms == 1)
        return
    sender.events.wait_for("ready", room)
    if state == "part_sent":
        sender.send(room, [8], is_last=False)
        eventually(lambda: receiver.endpoint.stats.num_slabs == 1)
    elif state == "last_queued":
        never = threading.Event()
        sender.endpoint.send_chunk(room, Chunk(indices([8, 9]), 0, True, [], 1, never.is_set))
    elif state == "concluded":
        sender.send(room, [8, 9])
        sender.events.wait_for("done", room)
        receiver.events.wait_for("done", room)


@pytest.mark.parametrize("state", STATES)
def test_prefill_gives_up(state: str, sender: Prefill, receiver: Decode) -> None:
    bring(sender, receiver, state)
    sender.endpoint.drop_room(1, "out of memory")
    if state == "expected":
        receiver.open(1, [sender], [1, 2])
    if state != "concluded":
        said = receiver.events.wait_for("failed", 1, 5)[2]
        assert said.startswith("PD peer failed: out of memory")
    receiver.endpoint.close_room(1)
    nothing_is_left(sender, receiver)
    assert sender.events.kinds(1).count("failed") == 0, "it knows"


@pytest.mark.parametrize("state", STATES)
def test_decode_gives_up(state: str, sender: Prefill, receiver: Decode) -> None:
    bring(sender, receiver, state)
    receiver.endpoint.close_room(1)
    if state == "expected":
        receiver.endpoint.abort_room(1, [sender.address], "the client went away")
    elif state == "opened":
        eventually(lambda: sender.endpoint.num_rooms == 0)
        sender.endpoint.expect_room(1)
    if state != "concluded":
        assert "dropped it" in sender.events.wait_for("failed", 1, 5)[2]
    sender.endpoint.drop_room(1)
    nothing_is_left(sender, receiver)
    assert receiver.events.kinds(1) == (["done"] if state == "concluded" else [])


def nothing_is_left(sender: Prefill, receiver: Decode) -> None:
    """And the session serves on, with all of its credit."""
    eventually(lambda: sender.endpoint.num_rooms == receiver.endpoint.num_rooms == 0)
    hand_over(sender, receiver, 50)
    assert sender.endpoint.stats.num_sessions_lost == receiver.endpoint.stats.num_sessions_lost == 0
    for peer in sender.endpoint._peers:
        queue = peer.sending
        eventually(lambda queue=queue: queue.credit_bytes == TCP.window_bytes and not queue.queue)
        assert not queue.unconfirmed
        assert not queue.num_made


def test_a_received_room_survives_losing_prefill() -> None:
    with decode() as receiver:
        with prefill() as sender:
            bring(sender, receiver, "concluded")
        receiver.events.wait_for("lost")
        assert receiver.events.kinds(1) == ["done"]
        receiver.endpoint.close_room(1)
        assert not receiver.endpoint.num_rooms


def test_a_confirmed_room_is_not_read_again(sender: Prefill) -> None:
    """Asked for a slab once more, together with the word that all has come: its pages are freed."""
    with StrangeDecode(sender.address) as stranger:
        stranger.greet(window=2 << 20)
        stranger.join()
        sender.endpoint.expect_room(1)
        stranger.open(1)
        sender.events.wait_for("ready", 1)
        sender.send(1, [5])
        eventually(lambda: sender.endpoint.stats.num_slabs == 2)
        session = next(iter(sender.endpoint._peers))

        def hear_both() -> None:
            sender.endpoint._resend(session, messages.Nack(1, 1, 0))
            sender.endpoint._confirm(session, [(1, 1, 1)])

        sender.endpoint._loop.call(hear_both)
        sender.events.wait_for("done", 1)
        eventually(lambda: not session.sending.queue)
        assert sender.endpoint.stats.num_slabs == 2


def test_late_slabs_of_an_earlier_room_never_land(
    receiver: Decode, stranger: StrangePrefill
) -> None:
    """Nor is their end confirmed: prefill would free the room as one that decode got."""
    first = stranger.opened_by(receiver, [7])
    receiver.endpoint.close_room(1)
    receiver.open(1, [stranger.address], [7])
    second = stranger.hear(messages.Open)
    assert second.generation != first.generation
    late, payload = stranger.pool.pages([0]).tobytes(), stranger.pool.pages([1]).tobytes()
    stranger.slab(first, late)
    stranger.send(messages.Last(1, first.generation, 1, []))
    eventually(lambda: receiver.endpoint.stats.num_late == 2)
    told = stranger.hear(messages.Abort)
    assert (told.room, told.generation) == (1, first.generation)
    assert not receiver.pool.kv.any()
    stranger.slab(second, payload)
    stranger.send(messages.Last(1, second.generation, 1, []))
    receiver.events.wait_for("done", 1)
    assert receiver.pool.pages([7]).tobytes() == payload


def test_every_room_of_a_lost_session_is_told(receiver: Decode, stranger: StrangePrefill) -> None:
    """Prefill may live, and not have heard of some of them."""
    rooms = range(1, 301)
    stranger.opened_by(receiver, [7])
    for room in rooms[1:]:
        receiver.open(room, [stranger.address], [7])
    while stranger.hear(messages.Open).room != rooms[-1]:
        pass
    stranger.tell(messages.Bye("for now"))
    stranger.welcome()
    assert {stranger.hear(messages.Abort).room for _ in rooms} == set(rooms)


def test_rooms_without_request_are_bounded_and_end() -> None:
    settings = replace(TCP, orphan_timeout_s=0.5, max_orphans=3)
    with prefill(settings=settings) as sender, decode(settings=settings) as receiver:
        for room in range(4):
            receiver.open(room, [sender], [0])
        assert "whose requests never came" in receiver.events.wait_for("failed", 3)[2]
        for room in range(3):
            assert "no request reached prefill" in receiver.events.wait_for("failed", room)[2]
        eventually(lambda: sender.endpoint.num_rooms == receiver.endpoint.num_rooms == 0)


@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_a_pool_that_fails_costs_only_its_room(
    copy: str, sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = (sender if copy == "gather" else receiver).pool.memories.kv
    works = getattr(memory, copy)

    def broken(buffer: int, pages: Any, *rest: Any) -> None:
        if list(pages) == [13]:
            raise OSError("device lost")
        works(buffer, pages, *rest)

    monkeypatch.setattr(memory, copy, broken)
    for room, page in ((1, 13), (2, 14)):
        meet(sender, receiver, room, [page])
        sender.send(room, [page])
    for events in (sender.events, receiver.events):
        assert "device lost" in events.wait_for("failed", 1, 5)[2]
    receiver.events.wait_for("done", 2)
    receiver.endpoint.close_room(2)
    nothing_is_left(sender, receiver)


def test_a_chunk_beyond_the_pool_fails_its_room(sender: Prefill, receiver: Decode) -> None:
    for room, (pages, row) in enumerate([([64, 1], 1), ([-1, 1], 1), ([1, 2], 16)]):
        meet(sender, receiver, room)
        sender.send(room, pages, aux_row=row)
        for events in (sender.events, receiver.events):
            assert "names page" in events.wait_for("failed", room)[2]


def test_a_slab_checked_during_close_never_lands(
    sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksum = receiving.xxhash.xxh3_64_intdigest
    entered, leave = threading.Event(), threading.Event()

    class Slow:
        """The checksum of a slab whose room closes meanwhile."""

        @staticmethod
        def xxh3_64_intdigest(data: object) -> int:
            entered.set()
            assert leave.wait(DEADLINE_S)
            return int(checksum(data))

    monkeypatch.setattr(receiving, "xxhash", Slow)
    bring(sender, receiver, "ready")
    sender.send(1, [8, 9])
    assert entered.wait(DEADLINE_S)
    receiver.endpoint.close_room(1)
    leave.set()
    # The end, which is late now, comes after it. Prefill may hear of it before the abort.
    eventually(lambda: receiver.endpoint.stats.num_late)
    eventually(lambda: {"failed", "done"} & set(sender.events.kinds(1)))
    assert not receiver.pool.kv.any()


def test_a_slow_reader_is_bounded_delaying_no_other() -> None:
    shape = Shape(num_layers=2, page_size=64, num_pages=64, num_heads=8, head_bytes=256)
    settings = replace(TCP, window_bytes=2 << 20, peer_timeout_s=30.0)
    with (
        prefill(shape, settings=settings) as sender,
        decode(shape, settings=settings) as slow,
        decode(shape, settings=settings) as quick,
    ):
        meet(sender, slow, 1, range(64))
        leave = hold(slow.endpoint)
        sender.send(1, range(64))
        eventually(lambda: sender.endpoint.stats.wire_bytes >= settings.window_bytes)
        under_way = sender.endpoint.stats.wire_bytes
        hand_over(sender, quick, 2)
        assert under_way <= settings.window_bytes + TARGET_SLAB_BYTES
        leave.set()
        slow.events.wait_for("done", 1)
        assert np.array_equal(slow.pool.kv, sender.pool.kv)


NUM_SILENT = 400
"""Addresses; three sockets each, of the 1,023 that ZeroMQ makes unless it is told otherwise."""


@contextmanager
def silent_addresses() -> Iterator[list[tuple[str, int]]]:
    """Addresses that take a connection and never say a word."""
    with socket.create_server(("0.0.0.0", 0), backlog=4096) as listener:
        port = listener.getsockname()[1]
        yield [(f"127.7.{index // 250}.{index % 250 + 1}", port) for index in range(NUM_SILENT)]


def test_rooms_at_many_silent_addresses_all_end(sender: Prefill) -> None:
    """A client names the addresses: whoever names many must not make a room hang."""
    with silent_addresses() as addresses, decode(settings=IMPATIENT) as receiver:
        for room, address in enumerate(addresses):
            receiver.open(room, [address], [0])
        reasons = [receiver.events.wait_for("failed", room)[2] for room in range(NUM_SILENT)]
        assert all("did not answer" in reason for reason in reasons)
        hand_over(sender, receiver, NUM_SILENT)


@pytest.mark.parametrize("files", [512, 516, 520])  # another socket of three is the first to lack
def test_rooms_without_socket_fail_and_later_ones_work(files: int, sender: Prefill) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        with silent_addresses() as addresses, decode(settings=IMPATIENT) as receiver:
            before = len(os.listdir("/proc/self/fd"))
            for room, address in enumerate(addresses):
                receiver.endpoint.claim_room(room, [address])
                receiver.open(room, [address], [0])
            receiver.events.wait_for("failed")
            taken = len(os.listdir("/proc/self/fd")) - before
            assert taken <= files // 2, "half of the files are left to others"
            reasons = [receiver.events.wait_for("failed", room)[2] for room in range(NUM_SILENT)]
            assert any("cannot be addressed: Too many open files" in why for why in reasons)
            eventually(lambda: receiver.endpoint.num_sessions == 0)
            hand_over(sender, receiver, NUM_SILENT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_room_that_cannot_be_encoded_fails_alone(sender: Prefill, receiver: Decode) -> None:
    """Of a number too large, not even that it was given up can be said."""
    no_number: Any = np.int64(0)  # as SGLang's might be, and which no message can hold
    for room, prefix_tokens in ((1, no_number), (2**64, 0)):
        receiver.open(room, [sender], [0], prefix_tokens=prefix_tokens)
        assert "could not ask for the pages" in receiver.events.wait_for("failed", room)[2]
    hand_over(sender, receiver, NUM_SILENT)

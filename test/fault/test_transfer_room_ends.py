"""Every way a room can end early, from either side and in every state, and what is left of it."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
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
from transfer_strangers import strange_decode, strange_prefill

from kit.waiting import eventually
from sglang_tiered.transfer import messages
from sglang_tiered.transfer.decode import rooms as receiving
from sglang_tiered.transfer.decode.endpoint import DecodeTarget
from sglang_tiered.transfer.prefill.send_queue import TARGET_SLAB_BYTES, Chunk
from sglang_tiered.wire import sockets

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
        sender.events.wait_for("sent", room)
        receiver.events.wait_for("received", room)


@pytest.mark.parametrize("state", STATES)
def test_prefill_gives_up(state: str, sender: Prefill, receiver: Decode) -> None:
    bring(sender, receiver, state)
    sender.endpoint.fail_room(1, "out of memory")
    if state == "concluded":
        sender.endpoint.drop_room(1)
    elif state == "expected":
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
        receiver.endpoint.abort_room(1, [DecodeTarget(sender.address)], "the client went away")
    elif state == "opened":
        eventually(lambda: sender.endpoint.num_rooms == 0)
        sender.endpoint.expect_room(1)
    if state != "concluded":
        assert "dropped it" in sender.events.wait_for("failed", 1, 5)[2]
    sender.endpoint.drop_room(1)
    nothing_is_left(sender, receiver)
    assert receiver.events.kinds(1) == (["received"] if state == "concluded" else [])


def nothing_is_left(sender: Prefill, receiver: Decode) -> None:
    """And the session serves on, with all of its credit."""
    eventually(lambda: sender.endpoint.num_rooms == receiver.endpoint.num_rooms == 0)
    hand_over(sender, receiver, 50)
    assert sender.endpoint.stats.num_sessions_lost == receiver.endpoint.stats.num_sessions_lost == 0
    for peer in sender.endpoint._peers:
        queue = peer.sending
        eventually(lambda queue=queue: queue.credit_bytes == TCP.window_bytes)
        assert not queue.queue
        assert not queue.returned
        assert not queue.unconfirmed
        assert not queue.rooms
    eventually(lambda: not receiver.endpoint._senders)


def test_a_received_room_survives_losing_prefill() -> None:
    with decode() as receiver:
        with prefill() as sender:
            bring(sender, receiver, "concluded")
        receiver.events.wait_for("lost")
        assert receiver.events.kinds(1) == ["received"]
        receiver.endpoint.close_room(1)
        eventually(lambda: not receiver.endpoint._senders and not receiver.endpoint.num_rooms)


def test_late_slabs_of_an_earlier_room_never_land(receiver: Decode) -> None:
    with strange_prefill() as stranger:
        first = stranger.opened_by(receiver, [7])
        receiver.endpoint.close_room(1)
        receiver.open(1, [stranger.address], [7])
        second = stranger.hear(messages.Open)
        assert second.generation != first.generation
        late, payload = stranger.pool.pages([0]).tobytes(), stranger.pool.pages([1]).tobytes()
        stranger.slab(first, late)
        stranger.send(messages.Last(1, first.generation, 1, []))
        eventually(lambda: receiver.endpoint.stats.num_late == 2)
        assert not receiver.pool.kv.any()
        stranger.slab(second, payload)
        stranger.send(messages.Last(1, second.generation, 1, []))
        receiver.events.wait_for("received", 1)
        assert receiver.pool.pages([7]).tobytes() == payload


def test_late_end_after_failure_is_no_success(receiver: Decode) -> None:
    """A confirmation would have prefill free the room as one that decode got."""
    with strange_prefill() as stranger:
        opened = stranger.opened_by(receiver, [7])
        stranger.tell(messages.Failed(1, opened.generation, "out of memory"))
        receiver.events.wait_for("failed", 1)
        stranger.send(messages.Last(1, opened.generation, 1, []))
        told = stranger.hear(messages.Abort)
        assert (told.room, told.generation) == (1, opened.generation)
        assert "out of memory" in told.reason
        assert receiver.endpoint.stats.num_late == 1


def test_rooms_without_request_are_bounded_and_end() -> None:
    settings = replace(TCP, orphan_timeout_s=1.0, max_orphans=900)
    with prefill(settings=settings) as sender, decode(settings=settings) as receiver:
        for room in range(1000):
            receiver.open(room, [sender], [0])
        for room in range(900, 1000):
            assert "whose requests never came" in receiver.events.wait_for("failed", room)[2]
        assert sender.endpoint.num_rooms <= 900
        for room in range(900):
            assert "no request reached prefill" in receiver.events.wait_for("failed", room)[2]
        eventually(lambda: sender.endpoint.num_rooms == receiver.endpoint.num_rooms == 0)
        assert not receiver.endpoint._senders
        assert sender.endpoint._rooms.num_orphans == 0


def test_an_unreadable_pool_fails_only_its_room(
    sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = sender.pool.memories.kv.gather

    def broken(buffer: int, pages: object, part: object, out: object) -> None:
        if list(pages) == [13]:  # type: ignore[call-overload]
            raise OSError("device lost")
        gather(buffer, pages, part, out)  # type: ignore[arg-type]

    monkeypatch.setattr(sender.pool.memories.kv, "gather", broken)
    for room, source in ((1, 13), (2, 14)):
        meet(sender, receiver, room, [room])
        sender.send(room, [source])
    for events in (sender.events, receiver.events):
        assert "device lost" in events.wait_for("failed", 1)[2]
    receiver.events.wait_for("received", 2)


def test_an_unwritable_pool_fails_only_its_room(
    sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    scatter = receiver.pool.memories.kv.scatter

    def broken(buffer: int, pages: object, part: object, data: object) -> None:
        if list(pages) == [1]:  # type: ignore[call-overload]
            raise OSError("device lost")
        scatter(buffer, pages, part, data)  # type: ignore[arg-type]

    monkeypatch.setattr(receiver.pool.memories.kv, "scatter", broken)
    for room in (1, 2):
        meet(sender, receiver, room, [room])
        sender.send(room, [14])
    for events in (sender.events, receiver.events):
        assert "device lost" in events.wait_for("failed", 1, 5)[2]
    receiver.events.wait_for("received", 2)
    receiver.endpoint.close_room(2)
    nothing_is_left(sender, receiver)


def test_a_chunk_beyond_the_pool_fails_its_room(sender: Prefill, receiver: Decode) -> None:
    for room, (pages, row) in enumerate([([64, 1], 1), ([-1, 1], 1), ([1, 2], 16)]):
        meet(sender, receiver, room)
        sender.send(room, pages, aux_row=row)
        for events in (sender.events, receiver.events):
            assert "names page" in events.wait_for("failed", room)[2]


def test_a_closed_rooms_pages_never_change() -> None:
    """Many threads open, close and look, while prefill sends without end."""
    shape = Shape(num_layers=4, page_size=16, num_pages=64, num_heads=4, head_bytes=128)
    ended = time.monotonic() + 2.0
    problems: list[str] = []
    with prefill(shape) as sender, decode(shape) as receiver:
        sender.pool.kv[sender.pool.kv == 0] = 1

        def hammer(worker: int) -> None:
            pages = range(worker * 8, worker * 8 + 8)
            number = worker
            while time.monotonic() < ended and not problems:
                number += 8
                meet(sender, receiver, number, pages)
                sender.send(number, range(8))
                if number % 3:  # often in the middle, sometimes at the end
                    eventually(receiver.pool.kv[:, pages[0]].any)
                receiver.endpoint.close_room(number)
                receiver.pool.kv[:, pages] = 0
                for _ in range(3):
                    if receiver.pool.kv[:, pages].any():
                        problems.append(f"room {number} was written after close_room")
                receiver.pool.kv[:, pages] = 0

        workers = [threading.Thread(target=hammer, args=(worker,)) for worker in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(DEADLINE_S)
        assert not problems, problems[0]
        assert receiver.endpoint.stats.num_slabs > 50
        eventually(lambda: sender.endpoint.num_rooms == receiver.endpoint.num_rooms == 0)
        assert not receiver.pool.kv.any()


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
    eventually(lambda: {"failed", "sent"} & set(sender.events.kinds(1)))
    assert not receiver.pool.kv.any()


def test_a_slow_reader_is_bounded_delaying_no_other() -> None:
    shape = Shape(num_layers=2, page_size=64, num_pages=64, num_heads=8, head_bytes=256)
    page_bytes = 4 * 64 * 8 * 256
    settings = replace(TCP, window_bytes=2 << 20, peer_timeout_s=30.0)
    with (
        prefill(shape, settings=settings) as sender,
        decode(shape, settings=settings) as slow,
        decode(shape, settings=settings) as quick,
    ):
        meet(sender, slow, 1, range(64))
        leave = hold(slow.endpoint)
        sender.send(1, range(64))
        eventually(lambda: sender.endpoint.stats.sent_bytes >= settings.window_bytes)
        for room in range(2, 12):
            meet(sender, quick, room, [room])
            sender.send(room, [room])
            quick.events.wait_for("received", room)
            quick.endpoint.close_room(room)
        assert slow.events.kinds(1) == []
        under_way = sender.endpoint.stats.sent_bytes - 10 * page_bytes
        assert under_way <= settings.window_bytes + TARGET_SLAB_BYTES
        leave.set()
        slow.events.wait_for("received", 1)
        assert np.array_equal(slow.pool.kv, sender.pool.kv)


def test_aborted_rooms_do_not_widen_a_readers_window() -> None:
    """What was sent for them takes up memory until the reader has taken it."""
    settings = replace(TCP, window_bytes=4096, progress_timeout_s=30.0)
    with prefill(settings=settings) as sender, strange_decode(sender.address) as stranger:
        stranger.greet(window=4096)
        stranger.join()
        for room in range(20):
            sender.endpoint.expect_room(room)
            stranger.open(room, 2)
            sender.events.wait_for("ready", room)
            sender.send(room, [1, 2])
            if room == 0:
                eventually(lambda: sender.endpoint.stats.num_slabs)
            stranger.tell(messages.Abort(room, 1, "next"))
            sender.events.wait_for("failed", room)
        assert sender.endpoint.stats.sent_bytes <= 4096 + 2 * 2048
        # What is taken and confirmed gives the credit back.
        for _ in range(sender.endpoint.stats.num_slabs):
            header = sockets.decode(stranger.take()[1], messages.data_from_prefill)
            seq = header.num_slabs if isinstance(header, messages.Last) else header.seq
            stranger.confirm((header.room, header.generation, seq))
        peer = next(iter(sender.endpoint._peers))
        eventually(lambda: peer.sending.credit_bytes == 4096)


def test_a_decode_that_never_confirms_is_given_up() -> None:
    with prefill(settings=IMPATIENT) as sender, strange_decode(sender.address) as stranger:
        stranger.greet()
        stranger.join()
        stranger.open(1)
        sender.endpoint.expect_room(1)
        sender.events.wait_for("ready", 1)
        sender.send(1, [0])

        def pings() -> bool:
            stranger.tell(messages.Ping(1))
            return "failed" in sender.events.kinds(1)

        eventually(pings, timeout_s=IMPATIENT.progress_timeout_s + 3)
        assert "has taken no data" in sender.events.wait_for("failed", 1)[2]
        assert "has taken no data" in stranger.hear(messages.Bye).reason


def test_tiny_rooms_never_overrun_a_paused_readers_queue() -> None:
    settings = replace(TCP, peer_timeout_s=30.0, progress_timeout_s=30.0)
    num_rooms = 6000
    with prefill(settings=settings) as sender, decode(settings=settings) as receiver:
        for room in range(num_rooms):
            sender.endpoint.expect_room(room)
            receiver.open(room, [sender], [], aux_row=None)
        eventually(lambda: sender.events.kinds(num_rooms - 1) == ["ready"])
        leave = hold(receiver.endpoint)
        for room in range(num_rooms):
            sender.send(room, [], aux_row=None)
        eventually(lambda: sender.endpoint.stats.num_slabs >= 2000)
        leave.set()
        receiver.events.wait_for("received", num_rooms - 1)
        assert sender.endpoint.stats.num_sessions_lost == 0


def test_each_end_is_told_of_the_others_shutdown() -> None:
    with decode() as receiver:
        with prefill() as sender:
            bring(sender, receiver, "ready")
        assert receiver.events.wait_for("failed", 1, 2)[2]
    with prefill() as sender:
        with decode() as receiver:
            bring(sender, receiver, "ready")
        assert "shutting down" in sender.events.wait_for("failed", 1, 2)[2]


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
                receiver.endpoint.claim_room(room, [DecodeTarget(address)])
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
    no_number: Any = np.int64(0)  # as SGLang's might be, and which no message can hold
    receiver.open(1, [sender], [0], prefix_tokens=no_number)
    assert "could not ask for the pages" in receiver.events.wait_for("failed", 1)[2]
    hand_over(sender, receiver, NUM_SILENT)


def test_a_room_number_too_large_fails_alone(sender: Prefill, receiver: Decode) -> None:
    """Not even that it was given up can be said then."""
    receiver.open(2**64, [sender], [0])
    assert "could not ask for the pages" in receiver.events.wait_for("failed", 2**64)[2]
    hand_over(sender, receiver, NUM_SILENT)

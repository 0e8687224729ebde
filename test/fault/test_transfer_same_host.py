"""Reading prefill's memory on the same machine: what cannot be read is sent, and what prefill has
given to another request is never taken for the room's."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from transfer_pair import (
    DEADLINE_S,
    SAME_HOST,
    Decode,
    Pool,
    Prefill,
    Shape,
    decode,
    eventually,
    prefill,
)

from sglang_tiered.transfer import same_host
from sglang_tiered.transfer.same_host import Fence, Nonce, PeerMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_tiered.transfer.messages import SameHostOffer

pytestmark = pytest.mark.timeout(60)

LOST_SOON = replace(SAME_HOST, ping_interval_s=0.1, peer_timeout_s=0.6)


@pytest.fixture
def sender() -> Iterator[Prefill]:
    with prefill(settings=SAME_HOST) as one:
        yield one


@pytest.fixture
def receiver() -> Iterator[Decode]:
    with decode(settings=SAME_HOST) as one:
        yield one


def hand_over(sender: Prefill, receiver: Decode, room: int = 1) -> None:
    sender.endpoint.expect(room)
    receiver.open(room, [sender], [1, 2])
    sender.events.wait_for("ready", room)
    sender.send(room, [8, 9])
    receiver.events.wait_for("received", room)
    sender.events.wait_for("sent", room)
    assert np.array_equal(receiver.pool.pages([1, 2]), sender.pool.pages([8, 9]))
    receiver.endpoint.close_room(room)


def test_pages_are_read_and_not_sent(sender: Prefill, receiver: Decode) -> None:
    hand_over(sender, receiver)
    assert receiver.endpoint.stats.pulled_bytes == 2 * 4 * 512
    assert sender.endpoint.stats.sent_bytes == receiver.endpoint.stats.received_bytes == 0


OFFER_LIES: dict[str, dict[str, Any]] = {
    "another_process_has_its_number": {"nonce": b"x" * 16},
    "no_such_process": {"pid": 2**22 - 1},
    "not_ours_to_read": {"pid": 1, "nonce_address": 4096},
    "another_machine": {"boot_id": "another"},
    "no_boot_id": {"boot_id": ""},
    "no_such_address": {"nonce_address": 8},
    "address_beyond_any": {"nonce_address": 2**64 - 8},
}


@pytest.mark.parametrize("name", OFFER_LIES)
def test_memory_that_cannot_be_read_is_sent(
    name: str, sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = Nonce.offer

    def lie(self: Nonce, buffers: Any) -> SameHostOffer:
        return msgspec.structs.replace(offer(self, buffers), **OFFER_LIES[name])

    monkeypatch.setattr(Nonce, "offer", lie)
    hand_over(sender, receiver)
    assert receiver.endpoint.stats.pulled_bytes == 0
    assert receiver.endpoint.stats.received_bytes == 2 * 4 * 512


def test_without_the_system_call_pages_are_sent(
    sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "_libc", object())
    hand_over(sender, receiver)
    assert receiver.endpoint.stats.pulled_bytes == 0


@pytest.mark.parametrize("what", ["replaced", "forbidden"])
def test_memory_that_stops_being_readable_is_sent_instead_and_no_room_fails(
    what: str, sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a process that died goes to another; or the permission goes to another."""
    hand_over(sender, receiver, 1)
    answer = "another process has its number" if what == "replaced" else None
    if answer is not None:
        monkeypatch.setattr(PeerMemory, "check", lambda _: answer)
    else:
        monkeypatch.setattr(PeerMemory, "_read", lambda *_: os.strerror(1))
    receiver.pool.kv[:] = 0
    hand_over(sender, receiver, 2)
    hand_over(sender, receiver, 3)
    assert receiver.endpoint.stats.pulled_bytes == 2 * 4 * 512, "of the first room"
    assert sender.endpoint.stats.num_resent == 1, "and the rest was sent at once"
    assert sender.endpoint.stats.num_rooms_failed == receiver.endpoint.stats.num_rooms_failed == 0


def hold(endpoint: Any) -> threading.Event:
    """Hold an endpoint's thread until the event is set."""
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        leave.wait(DEADLINE_S)

    endpoint._loop.call(wait)
    assert entered.wait(DEADLINE_S)
    return leave


@pytest.mark.parametrize("by", ["silence", "fail", "forget", "close"])
def test_pages_that_prefill_has_given_away_are_never_taken_for_the_rooms(by: str) -> None:
    """Decode pauses with everything that names the pages already queued; prefill gives the room
    up, and the pages to another request."""
    settings = LOST_SOON if by == "silence" else SAME_HOST
    with prefill(settings=settings) as sender, decode(settings=settings) as receiver:
        hand_over(sender, receiver, 1)
        receiver.pool.kv[:] = 0
        sender.endpoint.expect(2)
        receiver.open(2, [sender], [1, 2])
        sender.events.wait_for("ready", 2)
        leave = hold(receiver.endpoint)
        before = sender.endpoint.stats.num_slabs
        sender.send(2, [8, 9])
        eventually(lambda: sender.endpoint.stats.num_slabs == before + 2)
        resume = threading.Event()
        if by == "silence":
            sender.events.wait_for("failed", 2)
        elif by == "close":
            sender.endpoint.close()
        else:
            resume = hold(sender.endpoint)  # the scheduler goes on before this thread does
            getattr(sender.endpoint, by)(2, *(["no memory"] if by == "fail" else []))
        sender.pool.kv[:, [8, 9]] = 0xEE  # the next request's
        leave.set()
        if by in ("silence", "close"):
            receiver.events.wait_for("failed", 2)
        else:
            eventually(lambda: receiver.endpoint.stats.num_damaged)
        resume.set()
        receiver.events.wait_for("failed", 2)
        assert "received" not in receiver.events.kinds(2)


def test_a_slab_gathered_while_its_pages_were_given_away_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its checksum would be right, of the next request's bytes."""
    settings = replace(SAME_HOST, same_host=False)
    with prefill(settings=settings) as sender, decode(settings=settings) as receiver:
        sender.endpoint.expect(2)
        receiver.open(2, [sender], [1, 2])
        sender.events.wait_for("ready", 2)
        gather = sender.pool.memories.kv.gather
        entered, leave = threading.Event(), threading.Event()

        def slow(*arguments: Any) -> None:
            entered.set()
            leave.wait(DEADLINE_S)
            gather(*arguments)

        monkeypatch.setattr(sender.pool.memories.kv, "gather", slow)
        sender.send(2, [8, 9])
        assert entered.wait(DEADLINE_S)
        sender.endpoint.fail(2, "no memory")
        sender.pool.kv[:, [8, 9]] = 0xEE
        leave.set()
        assert receiver.events.wait_for("failed", 2)[2] == "no memory"
        assert not receiver.pool.kv.any()
        assert sender.endpoint.stats.num_slabs == 0


def test_a_pull_says_why_it_failed() -> None:
    pool, target = Pool(Shape(), 1), Pool(Shape())
    nonce, fence = Nonce(), Fence()
    offer = nonce.offer(pool.memories.kv.buffers)
    pages = np.array([1, 2], np.int32)
    pairs = list(enumerate(target.memories.kv.buffers))
    word = fence.address, fence.value
    assert PeerMemory(offer).pull(pairs, pages, pages, word) is None
    assert np.array_equal(target.pages([1, 2]), pool.pages([1, 2]))

    gone = msgspec.structs.replace(offer, addresses=[8] * 4)
    assert "Bad address" in (PeerMemory(gone).pull(pairs, pages, pages, word) or "")
    far = np.array([2**31 - 1, 5], np.int32)
    assert PeerMemory(offer).pull(pairs, far, pages, word)
    fence.close()
    assert "another request" in (PeerMemory(offer).pull(pairs, pages, pages, word) or "")
    other = msgspec.structs.replace(offer, nonce=b"y" * 16)
    assert "another process" in (PeerMemory(other).pull(pairs, pages, pages, word) or "")

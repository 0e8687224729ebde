"""Reading prefill's memory on the same machine: what cannot be read is sent, and what prefill has
given to another request is never taken for the room's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

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
    hand_over,
    hold,
    meet,
    prefill,
)
from transfer_strangers import introduced

from kit.waiting import eventually
from sglang_tiered.errors import TransferError
from sglang_tiered.transfer import same_host
from sglang_tiered.transfer.decode import sessions as prefill_links
from sglang_tiered.transfer.memory import Buffer
from sglang_tiered.transfer.same_host import Fence, Guest, PeerMemory
from sglang_tiered.wire.keys import Tagger

pytestmark = pytest.mark.timeout(60)
SETTINGS = SAME_HOST

LOST_SOON = msgspec.structs.replace(SAME_HOST, ping_interval_s=0.1, peer_timeout_s=0.6)


def test_pages_are_read_and_not_sent(sender: Prefill, receiver: Decode) -> None:
    hand_over(sender, receiver)
    assert receiver.endpoint.stats.pulled_bytes == 2 * 4 * 512
    assert sender.endpoint.stats.sent_bytes == receiver.endpoint.stats.received_bytes == 0


UNREADABLE: dict[str, Callable[[socket.socket], tuple[int, int]]] = {
    "another_user": lambda _: (os.getpid(), os.geteuid() + 1),
    "another_process_namespace": lambda _: (0, os.geteuid()),
    "a_process_that_has_ended": lambda _: (2**22 - 1, os.geteuid()),
}


@pytest.mark.parametrize("who", UNREADABLE)
def test_memory_of_an_unreadable_process_is_not_pulled(
    who: str, sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "_credentials", UNREADABLE[who])
    hand_over(sender, receiver)
    assert receiver.endpoint.stats.pulled_bytes == 0
    assert receiver.endpoint.stats.received_bytes == 2 * 4 * 512


def test_memory_of_another_machine_is_not_asked_for(
    sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_links, "is_own_address", lambda host: False)
    hand_over(sender, receiver)
    assert receiver.endpoint.stats.pulled_bytes == 0


def test_without_the_system_call_pages_are_sent(
    sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "_libc", object())
    hand_over(sender, receiver)
    assert receiver.endpoint.stats.pulled_bytes == 0


@pytest.mark.parametrize("what", ["replaced", "forbidden"])
def test_memory_no_longer_readable_is_sent_instead(
    what: str, sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a process that died goes to another; or the permission goes to another."""
    hand_over(sender, receiver, 1)
    answer = "the process has ended" if what == "replaced" else None
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


@pytest.mark.parametrize("what", ["other_buffers", "no_message"])
def test_memory_with_unusable_offer_is_sent_instead(
    what: str, sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill waited for the confirmation until it gave up the session and all of its rooms."""
    admit = Guest.offer_buffers

    def offer(guest: Guest, buffers: Sequence[Buffer]) -> Tagger | None:
        if what == "no_message":
            guest._connection.send(b"\xc1")
        return admit(guest, buffers[1:] if what == "other_buffers" else buffers)

    monkeypatch.setattr(Guest, "offer_buffers", offer)
    hand_over(sender, receiver, 1)
    hand_over(sender, receiver, 2)
    assert receiver.endpoint.stats.pulled_bytes == 0
    assert sender.endpoint.stats.num_resent == 1, "and the rest was sent at once"
    assert receiver.endpoint.stats.num_forged == 0


@pytest.mark.parametrize("by", ["silence", "fail_room", "drop_room", "close"])
def test_pages_prefill_released_never_reach_a_room(by: str) -> None:
    """Decode pauses with everything that names the pages already queued; prefill gives the room
    up, and the pages to another request."""
    settings = LOST_SOON if by == "silence" else SAME_HOST
    with prefill(settings=settings) as sender, decode(settings=settings) as receiver:
        hand_over(sender, receiver, 1)
        receiver.pool.kv[:] = 0
        meet(sender, receiver, 2)
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
            getattr(sender.endpoint, by)(2, *(["no memory"] if by == "fail_room" else []))
        sender.pool.kv[:, [8, 9]] = 0xEE  # the next request's
        leave.set()
        if by in ("silence", "close"):
            receiver.events.wait_for("failed", 2)
        else:
            eventually(lambda: receiver.endpoint.stats.num_damaged)
        resume.set()
        receiver.events.wait_for("failed", 2)
        assert "received" not in receiver.events.kinds(2)


def test_a_slab_of_released_pages_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checksum would be right, of the next request's bytes."""
    settings = msgspec.structs.replace(SAME_HOST, same_host=False)
    with prefill(settings=settings) as sender, decode(settings=settings) as receiver:
        meet(sender, receiver, 2)
        gather = sender.pool.memories.kv.gather
        entered, leave = threading.Event(), threading.Event()

        def slow(*arguments: Any) -> None:
            entered.set()
            leave.wait(DEADLINE_S)
            gather(*arguments)

        monkeypatch.setattr(sender.pool.memories.kv, "gather", slow)
        sender.send(2, [8, 9])
        assert entered.wait(DEADLINE_S)
        sender.endpoint.fail_room(2, "no memory")
        sender.pool.kv[:, [8, 9]] = 0xEE
        leave.set()
        assert receiver.events.wait_for("failed", 2)[2] == "PD peer failed: no memory"
        assert not receiver.pool.kv.any()
        assert sender.endpoint.stats.num_slabs == 0


def test_a_pull_says_why_it_failed() -> None:
    pool, target = Pool(Shape(), 1), Pool(Shape())
    buffers, fence = pool.memories.kv.buffers, Fence()
    pages = np.array([1, 2], np.int32)
    pairs = list(enumerate(target.memories.kv.buffers))
    word = fence.address, fence.value
    with introduced(buffers) as (peer, tagger):
        assert not peer.is_right(b"", b"header")
        assert peer.is_right(tagger.tag(b"header"), b"header")
        assert peer.pull(pairs, pages, pages, word) is None
        assert np.array_equal(target.pages([1, 2]), pool.pages([1, 2]))
        for beyond in (2**31 - 1, 64, -1):
            with pytest.raises(TransferError, match=f"names page {beyond}, but"):
                peer.pull(pairs, np.array([5, beyond], np.int32), pages, word)
        halves = [(index, replace(buffer, page_bytes=256)) for index, buffer in pairs]
        with pytest.raises(TransferError, match="other pages in buffer 0"):
            peer.pull(halves, pages, pages, word)
        fence.close()
        assert "another request" in (peer.pull(pairs, pages, pages, word) or "")
    assert peer.pull(pairs, pages, pages, word) == "it was closed"
    with introduced([replace(buffer, address=8) for buffer in buffers]) as (peer, tagger):
        assert peer.is_right(tagger.tag(b"header"), b"header")
        assert "Bad address" in (peer.pull(pairs, pages, pages, word) or "")
    with introduced(buffers[1:], len(buffers)) as (peer, tagger):
        assert not peer.is_right(tagger.tag(b"header"), b"header")
    with pytest.raises(OSError):
        PeerMemory(f"sglang-tiered-{0:032x}", b"t" * 16, 4)


def test_a_process_that_has_ended_is_not_read() -> None:
    code = (
        "import sys; from sglang_tiered.transfer.same_host import Door; door = Door();"
        "print(door.name, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    peer = PeerMemory(child.stdout.readline().strip(), b"t" * 16, 1)
    try:
        assert peer.check() is None
        child.kill()
        child.wait(DEADLINE_S)
        assert peer.check() == "the process has ended"
    finally:
        peer.close()
        child.communicate()

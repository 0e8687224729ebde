"""Reading prefill's memory on the same machine: what cannot be read is sent, and what prefill has
given to another request is never taken for the room's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from transfer_pair import (
    DEADLINE_S,
    SAME_HOST,
    Decode,
    Prefill,
    decode,
    hand_over,
    hold,
    meet,
    prefill,
)
from transfer_strangers import introduced

from kit.waiting import eventually
from sglang_tiered.transfer import same_host, sessions
from sglang_tiered.transfer.memory import Buffer
from sglang_tiered.transfer.same_host import Door, PeerMemory
from sglang_tiered.wire.keys import Tagger

pytestmark = pytest.mark.timeout(60)
SETTINGS = SAME_HOST

LOST_SOON = msgspec.structs.replace(SAME_HOST, ping_interval_s=0.1, peer_timeout_s=0.6)


admit = Door.admit


def offer_garbage(door: Door, pid: int, address: Any, buffers: Sequence[Buffer]) -> Tagger | None:
    door._socket.sendto(b"\xc1", address)
    return admit(door, pid, address, buffers)


def forbidden_by_a_sandbox(pid: int) -> int:
    raise PermissionError("pidfd_open")


UNREADABLE: dict[str, tuple[Any, str, Any]] = {
    "another_user": (same_host, "_credentials", lambda _: (os.getpid(), os.geteuid() + 1)),
    "another_process_namespace": (same_host, "_credentials", lambda _: (0, os.geteuid())),
    "offered_by_a_process_that_has_ended": (
        same_host,
        "_credentials",
        lambda _: (2**22 - 1, os.geteuid()),
    ),
    "offered_where_a_sandbox_forbids": (os, "pidfd_open", forbidden_by_a_sandbox),
    "another_machine": (sessions, "is_own_address", lambda _: False),
    "without_the_system_call": (same_host, "_libc", object()),
    "offered_garbage": (Door, "admit", offer_garbage),
    "offered_other_buffers": (Door, "admit", lambda *to: admit(*to[:-1], to[-1][1:])),
    # From then on: the number of a process that died goes to another, or the permission.
    "replaced": (PeerMemory, "check", lambda _: "the process has ended"),
    "forbidden": (PeerMemory, "_read", lambda *_: os.strerror(1)),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_memory_that_cannot_be_read_is_sent(
    what: str, sender: Prefill, receiver: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes, was_read = 2 * 4 * 512, what in ("replaced", "forbidden")
    if was_read:
        hand_over(sender, receiver, 1)
        assert sender.endpoint.stats.wire_bytes == receiver.endpoint.stats.wire_bytes == 0
    monkeypatch.setattr(*UNREADABLE[what])
    for room in (2, 3):
        receiver.pool.kv[:] = 0
        hand_over(sender, receiver, room)
    assert receiver.endpoint.stats.same_host_bytes == num_bytes * was_read
    assert receiver.endpoint.stats.wire_bytes == 2 * num_bytes
    # What was offered and cannot be read is asked for again, and the rest is sent at once.
    assert sender.endpoint.stats.num_damaged == (was_read or what.startswith("offered"))


def test_a_process_that_has_ended_is_not_read() -> None:
    """Another has its number by then, perhaps."""
    command = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as child,
        introduced([]) as (peer, tagger),
    ):
        assert peer.is_right(tagger.tag(b""), b""), "what takes the offer"
        os.close(peer._process)
        peer._process = os.pidfd_open(child.pid)
        assert peer.check() is None
        child.kill()
        child.wait(DEADLINE_S)
        assert peer.check() == "the process has ended"


@pytest.mark.parametrize("by", ["silence", "drop_room", "close"])
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
            sender.endpoint.drop_room(2)
        sender.pool.kv[:, [8, 9]] = 0xEE  # the next request's
        leave.set()
        if by in ("silence", "close"):
            receiver.events.wait_for("failed", 2)
        else:
            eventually(lambda: receiver.endpoint.stats.num_damaged)
        resume.set()
        receiver.events.wait_for("failed", 2)
        assert "done" not in receiver.events.kinds(2)


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
        sender.endpoint.drop_room(2, "no memory")
        sender.pool.kv[:, [8, 9]] = 0xEE
        leave.set()
        assert receiver.events.wait_for("failed", 2)[2] == "PD peer failed: no memory"
        assert not receiver.pool.kv.any()
        assert sender.endpoint.stats.num_slabs == 0

"""After many sessions and many failures, everything is given back."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from transfer_pair import (
    HOST,
    IMPATIENT,
    SAME_HOST,
    TCP,
    Decode,
    Pool,
    Recorder,
    Shape,
    decode,
    hand_over,
    meet,
    prefill,
)
from transfer_strangers import strange_decode, strange_prefill

from kit.waiting import eventually
from sglang_tiered.config import TransferConfig
from sglang_tiered.errors import TransferError
from sglang_tiered.transfer import messages
from sglang_tiered.transfer.prefill.endpoint import PrefillEndpoint
from sglang_tiered.wire.keys import Keys, load_keys, make_keys

pytestmark = pytest.mark.timeout(60)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def returns_everything(once: Callable[[], None], times: int = 8) -> None:
    """After a first run, which loads and starts what stays, nothing more stays."""
    for _ in range(2):
        once()
    files, threads = num_files(), threading.active_count()
    for _ in range(times):
        once()
    # ZeroMQ closes in the background what another thread still had.
    eventually(lambda: num_files() <= files and threading.active_count() <= threads)


@pytest.mark.parametrize("way", ["tcp", "same_host", "keys"])
def test_endpoints_that_close_leave_nothing(way: str, tmp_path: Path) -> None:
    settings: TransferConfig = SAME_HOST if way == "same_host" else TCP
    keys: dict[str, Keys] = {}
    if way == "keys":
        make_keys(tmp_path)
        keys = {role: load_keys(tmp_path, role) for role in ("prefill", "decode")}

    def once() -> None:
        with (
            prefill(settings=settings, keys=keys.get("prefill")) as sender,
            decode(settings=settings, keys=keys.get("decode")) as receiver,
        ):
            hand_over(sender, receiver, 1)

    returns_everything(once)


def test_sessions_that_fail_leave_nothing() -> None:
    with decode(settings=IMPATIENT) as receiver:
        numbers = iter(range(10_000))

        def once() -> None:
            room = next(numbers)
            # Nobody there; somebody who refuses; somebody who dies in the middle.
            receiver.open(room, [(HOST, 1)], [1])
            receiver.events.wait_for("failed", room)
            with strange_prefill() as stranger:
                receiver.open(10_000 + room, [stranger.address], [1])
                stranger.hear(messages.Hello)
                stranger.tell(messages.Refuse("not you"))
                receiver.events.wait_for("failed", 10_000 + room)
            with strange_prefill() as stranger:
                receiver.open(20_000 + room, [stranger.address], [1])
                stranger.welcome()
                stranger.joined()
            receiver.events.wait_for("failed", 20_000 + room)
            eventually(lambda: receiver.endpoint.num_sessions == 0)

        returns_everything(once)
        assert receiver.endpoint.num_rooms == 0
        assert not receiver.endpoint._senders
        assert len(receiver.endpoint._loop._handlers) == 0


def test_short_lived_decode_instances_leave_nothing_on_prefill() -> None:
    with prefill(settings=IMPATIENT) as sender:
        numbers = iter(range(10_000))

        def once() -> None:
            room = next(numbers)
            with decode(settings=IMPATIENT) as receiver:
                hand_over(sender, receiver, room)
            with strange_decode(sender.address) as stranger:
                stranger.greet()
                stranger.join()
                stranger.open(10_000 + room)
            eventually(lambda: sender.endpoint.num_sessions == sender.endpoint.num_rooms == 0)

        returns_everything(once)
        peers = sender.endpoint._peers
        assert not peers._by_token
        assert not peers._by_link
        assert not peers._turns


def test_an_address_that_cannot_be_bound_leaves_nothing() -> None:
    pool = Pool(Shape(), 1)

    def once() -> None:
        with pytest.raises(TransferError, match="pass another --host"):
            PrefillEndpoint(
                host="203.0.113.7",  # reserved for documentation: no machine has it
                server="",
                layout=pool.layout,
                memories=pool.memories,
                rank=0,
                listener=Recorder(),
                settings=TCP,
            )

    returns_everything(once)


def test_ended_rooms_keep_no_memory() -> None:
    shape = Shape(num_layers=4, page_size=16, num_pages=64, num_heads=8, head_bytes=128)
    with prefill(shape) as sender, decode(shape) as receiver:

        def some(first: int) -> None:
            for room in range(first, first + 60):
                meet(sender, receiver, room, range(16))
                sender.send(room, range(16))
                if room % 2:
                    receiver.events.wait_for("received", room)
                receiver.endpoint.close_room(room)
                sender.endpoint.drop_room(room)
            eventually(lambda: sender.endpoint.num_rooms == receiver.endpoint.num_rooms == 0)
            for events in (sender.events, receiver.events):
                with events.changed:
                    events.events.clear()

        some(0)
        before = resident_bytes()
        for first in range(60, 420, 60):
            some(first)
        moved = 360 * 16 * 16 * 8 * 128 * 8
        assert resident_bytes() - before < moved / 10
        queue = next(iter(sender.endpoint._peers)).sending
        eventually(lambda: not queue.unconfirmed and queue.credit_bytes == TCP.window_bytes)
        assert not queue.rooms


def test_finished_rooms_and_links_are_freed() -> None:
    with decode() as receiver:
        with prefill() as sender:
            hand_over(sender, receiver, 1)
            receiver.open(2, [sender], [1])
            eventually(lambda: sender.endpoint.num_rooms == 1)
            session = session_of(receiver)
        receiver.events.wait_for("failed", 2)

        def is_gone() -> bool:
            gc.collect()
            return session() is None

        eventually(is_gone)


def session_of(receiver: Decode) -> Callable[[], object]:
    """The session's socket; the link itself has no room for a weak reference."""
    link = next(iter(receiver.endpoint._links))
    return weakref.ref(link.control)

"""After many sessions and many failures, everything is given back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from transfer_pair import HOST, IMPATIENT, SAME_HOST, TCP, decode, hand_over, pair_keys, prefill
from transfer_strangers import StrangeDecode, StrangePrefill

from kit.waiting import eventually
from sglang_tiered.config import TransferConfig
from sglang_tiered.transfer import messages

pytestmark = pytest.mark.timeout(60)


UNHURRIED = replace(IMPATIENT, peer_timeout_s=60.0, progress_timeout_s=60.0)
"""Within the deadline of a test, death is noticed by the connection or not at all."""


def returns_everything(once: Callable[[], None], times: int = 8) -> None:
    """After a first run, which loads and starts what stays, nothing more stays."""
    for _ in range(2):
        once()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(times):
        once()
    # ZeroMQ closes in the background what another thread still had.
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= files)
    eventually(lambda: threading.active_count() <= threads)


@pytest.mark.parametrize("way", ["tcp", "same_host", "keys"])
def test_endpoints_that_close_leave_nothing(way: str, tmp_path: Path) -> None:
    settings: TransferConfig = SAME_HOST if way == "same_host" else TCP
    keys = pair_keys(tmp_path) if way == "keys" else {}

    def once() -> None:
        with (
            prefill(settings=settings, keys=keys.get("prefill")) as sender,
            decode(settings=settings, keys=keys.get("decode")) as receiver,
        ):
            hand_over(sender, receiver, 1)

    returns_everything(once)


def test_sessions_that_fail_leave_nothing() -> None:
    with decode(settings=UNHURRIED) as receiver:
        numbers = iter(range(10_000))

        def once() -> None:
            room = next(numbers)
            # Nobody there; somebody who refuses; somebody who dies in the middle.
            receiver.open(room, [(HOST, 1)], [1])
            receiver.events.wait_for("failed", room)
            with StrangePrefill() as stranger:
                receiver.open(10_000 + room, [stranger.address], [1])
                stranger.hear(messages.Hello)
                stranger.tell(messages.Refuse("not you"))
                receiver.events.wait_for("failed", 10_000 + room)
            with StrangePrefill() as stranger:
                receiver.open(20_000 + room, [stranger.address], [1])
                stranger.welcome()
                stranger.joined()
            receiver.events.wait_for("failed", 20_000 + room)
            eventually(lambda: receiver.endpoint.num_sessions == 0)

        returns_everything(once)
        assert receiver.endpoint.num_rooms == 0
        assert len(receiver.endpoint._loop._handlers) == 0


def test_short_lived_decode_instances_leave_nothing_on_prefill() -> None:
    with prefill(settings=UNHURRIED) as sender:
        numbers = iter(range(10_000))

        def once() -> None:
            room = next(numbers)
            with decode(settings=UNHURRIED) as receiver:
                hand_over(sender, receiver, room)
            with StrangeDecode(sender.address) as stranger:
                stranger.greet()
                stranger.join()
                stranger.open(10_000 + room)
            eventually(lambda: sender.endpoint.num_sessions == sender.endpoint.num_rooms == 0)

        returns_everything(once)
        peers = sender.endpoint._peers
        assert not peers._by_token
        assert not peers._by_link


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_peer_that_falls_silent_fails_its_rooms(who: str) -> None:
    """As one that was stopped: its connections stay."""
    with prefill(settings=IMPATIENT) as sender, decode(settings=IMPATIENT) as receiver:
        if who == "prefill":
            with StrangePrefill() as stranger:
                stranger.opened_by(receiver, [1])
                assert "silent" in receiver.events.wait_for("failed", 1)[2]
        else:
            with StrangeDecode(sender.address) as stranger:
                stranger.greet()
                stranger.join()
                sender.endpoint.expect_room(1)
                stranger.open(1)
                sender.events.wait_for("ready", 1)
                assert "silent" in sender.events.wait_for("failed", 1)[2]
        hand_over(sender, receiver, 2)

"""``kill -9`` and SIGSTOP of real processes: the other side learns it within its timeout, and the
successor behind the same address is never mistaken for it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from transfer_child import SHAPE, Child, hand_over
from transfer_pair import IMPATIENT, Decode, Prefill, decode, prefill

from kit.waiting import eventually

pytestmark = pytest.mark.timeout(60)

UNHURRIED = replace(IMPATIENT, peer_timeout_s=60.0, progress_timeout_s=60.0)
"""Within the deadline of a test, death is noticed by the connection or not at all."""


SETTINGS = IMPATIENT


@pytest.mark.parametrize("same_host", [False, True])
def test_a_killed_prefill_fails_its_rooms_at_once(same_host: bool) -> None:
    with (
        decode(SHAPE, settings=replace(UNHURRIED, same_host=same_host)) as receiver,
        Child("prefill", same_host=same_host) as child,
    ):
        hand_over(child, receiver, 1)
        before = receiver.endpoint.stats.num_slabs
        child.opens(receiver, 2, [2, 3])
        child.tell("send 2 part")
        eventually(lambda: receiver.endpoint.stats.num_slabs > before)
        child.kill()
        assert receiver.events.wait_for("failed", 2)[2]
        eventually(lambda: receiver.endpoint.num_sessions == 0)
        receiver.open(3, [child.address], [3])
        assert receiver.events.wait_for("failed", 3, IMPATIENT.connect_timeout_s + 2)[2]
        with Child("prefill", child.port) as successor:
            assert successor.port == child.port
            hand_over(successor, receiver, 4)
    assert receiver.events.kinds(1) == ["received"], "what was received stays received"


def test_a_killed_decode_fails_its_rooms_early() -> None:
    with (
        prefill(SHAPE, settings=UNHURRIED) as sender,
        Child("decode", sender.endpoint.control_port) as child,
    ):
        for room in (1, 2):
            sender.endpoint.expect_room(room)
            child.tell(f"open {room}")
            sender.events.wait_for("ready", room)
        sender.send(1, [1], is_last=False)
        child.kill()
        for room in (1, 2):
            assert sender.events.wait_for("failed", room)[2]
        eventually(lambda: sender.endpoint.num_sessions == sender.endpoint.num_rooms == 0)
        with Child("decode", sender.endpoint.control_port) as successor:
            sender.endpoint.expect_room(3)
            successor.tell("open 3")
            sender.events.wait_for("ready", 3)
            sender.send(3, [3])
            sender.events.wait_for("sent", 3)


def test_a_stopped_prefill_fails_rooms_until_it_resumes(receiver: Decode) -> None:
    with Child("prefill") as child:
        hand_over(child, receiver, 1)
        child.opens(receiver, 2)
        child.freeze()
        reason = receiver.events.wait_for("failed", 2, IMPATIENT.peer_timeout_s + 3)[2]
        assert "silent" in reason
        child.thaw()
        child.tell("failed 2")
        assert child.wait_for("failed"), "and prefill learns that its room is over"
        hand_over(child, receiver, 3)


def test_a_stopped_decode_fails_rooms_until_it_resumes(sender: Prefill) -> None:
    with Child("decode", sender.endpoint.control_port) as child:
        sender.endpoint.expect_room(1)
        child.tell("open 1")
        sender.events.wait_for("ready", 1)
        child.freeze()
        reason = sender.events.wait_for("failed", 1, IMPATIENT.peer_timeout_s + 3)[2]
        assert "silent" in reason
        child.thaw()
        child.tell("failed 1")
        child.wait_for("failed")
        child.tell("open 2")
        child.wait_for("opened 2")
        sender.endpoint.expect_room(2)
        sender.events.wait_for("ready", 2)
        sender.send(2, [2])
        sender.events.wait_for("sent", 2)

"""Frames that are lost, doubled, late or changed: a room ends with the right bytes or with a reason
on both sides, and no byte outside its pages changes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from transfer_pair import IMPATIENT, TCP, Decode, Prefill, Shape, decode, indices, meet, prefill
from transfer_relay import (
    Fault,
    Frames,
    Passing,
    delay,
    drop,
    duplicate,
    flip,
    passes,
    relay,
    sometimes,
)

from kit.waiting import eventually
from sglang_tiered.transfer.decode.endpoint import DecodeTarget
from sglang_tiered.wire.keys import Keys, load_keys, make_keys

pytestmark = pytest.mark.timeout(60)

NUM_ROOMS = 10
PAGES_PER_ROOM = 6
SHAPE = Shape(num_pages=64)


def is_slab(passing: Passing) -> bool:
    return passing.is_data and passing.to_decode and passing.kind == "slab"


def is_data(passing: Passing) -> bool:
    return passing.is_data


def is_control(passing: Passing) -> bool:
    return not passing.is_data


FAULTS: dict[str, Fault] = {
    "payloads_changed": sometimes(flip(3), share=0.3, only=is_slab),
    "headers_changed": sometimes(flip(1), share=0.05, only=is_data),
    "control_changed": sometimes(flip(1), share=0.1, only=is_control),
    "versions_changed": sometimes(flip(0), share=0.03),
    "data_dropped": sometimes(drop, share=0.05, only=is_data),
    "control_dropped": sometimes(drop, share=0.1, only=is_control),
    "data_doubled": sometimes(duplicate, share=0.5, only=is_data),
    "control_doubled": sometimes(duplicate, share=0.1, only=is_control),
    "data_overtaken": sometimes(delay, share=0.5, only=is_data),
    "control_overtaken": sometimes(delay, share=0.2, only=is_control),
}


def hand_over(sender: Prefill, receiver: Decode, address: tuple[str, int]) -> list[int]:
    """Rooms one after the other started, all under way at once. Returns those received."""
    target = [DecodeTarget(address)]
    for room in range(NUM_ROOMS):
        sender.endpoint.expect_room(room)
        receiver.open(room, [address], pages_of(room))
    pending, received = set(range(NUM_ROOMS)), []
    sent: set[int] = set()

    def look() -> bool:
        for room in list(pending):
            ours, theirs = sender.events.kinds(room), receiver.events.kinds(room)
            if "ready" in ours and "failed" not in ours and room not in sent:
                sent.add(room)
                for start in range(0, PAGES_PER_ROOM, 2):
                    part = sources_of(room)[start : start + 2]
                    is_last = start + 2 == PAGES_PER_ROOM
                    sender.send(room, part, start=start, is_last=is_last)
            if "received" in theirs and ({"sent", "failed"} & set(ours)):
                received.append(room)
                pending.discard(room)
            elif "failed" in theirs and "failed" in ours:
                pending.discard(room)
            elif "failed" in theirs and "sent" in ours:
                raise AssertionError(f"prefill freed room {room}, which decode did not get")
        return not pending

    eventually(look)
    for room in range(NUM_ROOMS):
        for events in (sender.events, receiver.events):
            for event in events.events:
                if event[:2] == ("failed", room):
                    assert event[2]
        receiver.endpoint.close_room(room)
        receiver.endpoint.abort_room(room, target, "done")
    return received


def pages_of(room: int) -> range:
    return range(room * PAGES_PER_ROOM, (room + 1) * PAGES_PER_ROOM)


def sources_of(room: int) -> list[int]:
    return [(room * 11 + 5 * page) % SHAPE.num_pages for page in range(PAGES_PER_ROOM)]


def check(sender: Prefill, receiver: Decode, received: list[int]) -> None:
    for room in received:
        expected = sender.pool.pages(sources_of(room))
        assert np.array_equal(receiver.pool.pages(pages_of(room)), expected), room
    for room in set(range(NUM_ROOMS)) - set(received):
        # What came before it failed is right too, or never came.
        got, expected = receiver.pool.pages(pages_of(room)), sender.pool.pages(sources_of(room))
        landed = got.any(axis=(2, 3))
        assert np.array_equal(got[landed], expected[landed]), room
    assert not receiver.pool.pages(range(NUM_ROOMS * PAGES_PER_ROOM, SHAPE.num_pages)).any()
    eventually(lambda: sender.endpoint.num_rooms == 0 and receiver.endpoint.num_rooms == 0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FAULTS)
def test_rooms_end_alike_on_both_sides_and_recover(name: str, seed: int) -> None:
    with (
        prefill(SHAPE, settings=IMPATIENT) as sender,
        decode(SHAPE, settings=IMPATIENT) as receiver,
        relay(sender.address, FAULTS[name], seed=seed) as between,
    ):
        received = hand_over(sender, receiver, between.address)
        check(sender, receiver, received)
        if name == "data_doubled":
            assert len(received) == NUM_ROOMS, "what can be mended was not"
        if name == "payloads_changed":  # four times in a row is given up
            assert len(received) >= NUM_ROOMS - 2, "what can be mended was not"
        # The network heals, and nothing that it did is left.
        between.fault = passes
        eventually(lambda: recovers(sender, receiver, between.address))


def test_a_lost_abort_is_sent_over_later_sessions() -> None:
    mangled: list[Passing] = []

    def mangle(source: random.Random, passing: Passing) -> list[tuple[float, Frames]]:
        if passing.is_data or passing.kind != "abort" or len(mangled) == 2:
            return passes(source, passing)
        mangled.append(passing)
        return [(0.0, [passing.frames[0], b"\xc1"])]

    with (
        prefill(SHAPE, settings=TCP) as sender,
        decode(SHAPE, settings=TCP) as receiver,
        relay(sender.address, mangle) as between,
    ):
        sender.endpoint.expect_room(7)
        receiver.endpoint.abort_room(7, [DecodeTarget(between.address)], "the client left")
        eventually(lambda: "failed" in sender.events.kinds(7))
        assert len(mangled) == 2


def recovers(sender: Prefill, receiver: Decode, address: tuple[str, int]) -> bool:
    """A room of a number not used before gets through; a session may still be ending."""
    room = 1000 + len(receiver.events.events) * 2000 + len(sender.events.events)
    sender.endpoint.expect_room(room)
    receiver.open(room, [address], [63])
    eventually(lambda: sender.events.kinds(room) or receiver.events.kinds(room))
    if sender.events.kinds(room) == ["ready"]:
        sender.send(room, [3])
    eventually(lambda: {"received", "failed"} & set(receiver.events.kinds(room)))
    is_received = "received" in receiver.events.kinds(room)
    receiver.endpoint.close_room(room)
    if is_received:
        assert np.array_equal(receiver.pool.pages([63]), sender.pool.pages([3]))
        receiver.pool.kv[:, 63] = 0
    return is_received


@pytest.fixture
def both_keys(tmp_path: Path) -> dict[str, Keys]:
    make_keys(tmp_path)
    return {role: load_keys(tmp_path, role) for role in ("prefill", "decode")}


@pytest.mark.parametrize(
    "fault",
    [
        sometimes(flip(2), share=0.05, only=is_slab),
        sometimes(flip(1), share=0.05, only=is_slab),
        sometimes(flip(3), share=0.3, only=is_slab),
    ],
    ids=["authenticators", "headers", "payloads"],
)
def test_with_keys_what_was_changed_does_not_land(fault: Fault, both_keys: dict[str, Keys]) -> None:
    with (
        prefill(SHAPE, settings=IMPATIENT, keys=both_keys["prefill"]) as sender,
        decode(SHAPE, settings=IMPATIENT, keys=both_keys["decode"]) as receiver,
        relay(sender.address, fault, seed=1, keys=both_keys) as between,
    ):
        check(sender, receiver, hand_over(sender, receiver, between.address))


def test_a_last_slab_damaged_is_sent_again() -> None:
    """Prefill must not take the end's confirmation for that of the slab before it."""
    hits: list[int] = []

    def fault(source: object, passing: Passing) -> list[tuple[float, list[bytes]]]:
        frames = list(passing.frames)
        if passing.is_data and passing.kind == "nack":
            return [(0.2, frames)]  # behind all confirmations, as on another connection
        if is_slab(passing) and not hits:
            hits.append(1)
            frames[3] = bytes([frames[3][0] ^ 1]) + frames[3][1:]
        return [(0.0, frames)]

    with (
        prefill(SHAPE, settings=TCP) as sender,
        decode(SHAPE, settings=TCP) as receiver,
        relay(sender.address, fault) as between,
    ):
        meet(sender, receiver, 1, [1, 2], between.address)
        sender.send(1, [7, 8])
        receiver.events.wait_for("received", 1)
        sender.events.wait_for("sent", 1)
        assert hits
        assert sender.endpoint.stats.num_resent == 1
        assert np.array_equal(receiver.pool.pages([1, 2]), sender.pool.pages([7, 8]))


def test_a_slab_never_intact_fails_its_room() -> None:
    with (
        prefill(SHAPE, settings=TCP) as sender,
        decode(SHAPE, settings=TCP) as receiver,
        relay(sender.address, sometimes(flip(3), share=1.0, only=is_slab)) as between,
    ):
        meet(sender, receiver, 1, [1], between.address)
        sender.send(1, [7])
        for events in (sender.events, receiver.events):
            assert "could not be delivered intact" in events.wait_for("failed", 1)[2]
        assert not receiver.pool.kv.any()


def test_a_lost_slab_is_noticed_in_busy_sessions() -> None:
    """Confirmations of other rooms say nothing of a slab that they overtook."""
    settings = replace(IMPATIENT, progress_timeout_s=0.8)
    lost: list[int] = []

    def fault(source: object, passing: Passing) -> list[tuple[float, list[bytes]]]:
        if passing.is_data and passing.to_decode and len(lost) < 2 and passing.kind != "welcome":
            lost.append(1)  # the slab and the end of the first room
            return []
        return [(0.0, passing.frames)]

    with (
        prefill(SHAPE, settings=settings) as sender,
        decode(SHAPE, settings=settings) as receiver,
        relay(sender.address, fault) as between,
    ):
        meet(sender, receiver, 0, [1], between.address)
        sender.send(0, [7])
        numbers = iter(range(1, 100_000))

        def keeps_busy() -> bool:
            room = next(numbers)
            sender.endpoint.expect_room(room)
            receiver.open(room, [between.address], indices([2]))
            eventually(lambda: sender.events.kinds(room) or receiver.events.kinds(room))
            sender.send(room, [9])
            eventually(lambda: set(receiver.events.kinds(room)) & {"received", "failed"})
            receiver.endpoint.close_room(room)
            return receiver.events.kinds(0) == ["failed"] and "failed" in sender.events.kinds(0)

        eventually(keeps_busy, timeout_s=10)

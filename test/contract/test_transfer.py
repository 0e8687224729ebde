"""The contract of a KV handoff, over every way the bytes can go: TCP, several connections,
encrypted, and read out of the sender's memory."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from transfer_pair import (
    DEADLINE_S,
    SAME_HOST,
    TCP,
    Decode,
    Prefill,
    Shape,
    decode,
    indices,
    prefill,
)

from kit.waiting import eventually
from sglang_tiered.errors import TransferError
from sglang_tiered.transfer.decode.endpoint import DecodeTarget
from sglang_tiered.transfer.prefill.send_queue import Chunk
from sglang_tiered.wire.keys import Keys, load_keys, make_keys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sglang_tiered.transfer.settings import TransferSettings

pytestmark = pytest.mark.timeout(60)

WAYS = {
    "tcp": TCP,
    "four_connections": replace(TCP, num_connections=4),
    "same_host": SAME_HOST,
    "keys": TCP,
    "keys_same_host": SAME_HOST,
    "keys_all_encrypted": replace(TCP, encrypt_data=True),
    "small_window": replace(TCP, window_bytes=1000),
    "compressed": TCP,
}


@pytest.fixture(params=WAYS)
def way(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[TransferSettings, Keys | None, Keys | None]:
    name: str = request.param
    if not name.startswith("keys"):
        return WAYS[name], None, None
    make_keys(tmp_path)
    return WAYS[name], load_keys(tmp_path, "prefill"), load_keys(tmp_path, "decode")


Pair = tuple[Prefill, Decode]


@pytest.fixture
def pair(
    request: pytest.FixtureRequest, way: tuple[TransferSettings, Keys | None, Keys | None]
) -> Iterator[Pair]:
    settings, prefill_keys, decode_keys = way
    codec = "zstd" if request.node.callspec.params["way"] == "compressed" else "none"
    shape = Shape(states=(("swa", 40), ("mamba", 100)), codec=codec)
    with (
        prefill(shape, settings=settings, keys=prefill_keys) as sender,
        decode(shape, settings=settings, keys=decode_keys) as receiver,
    ):
        yield sender, receiver


def test_pages_states_and_metadata_arrive_intact(pair: Pair) -> None:
    sender, receiver = pair
    sender.pool.aux[:, 5] = np.arange(24, dtype=np.uint8)
    sender.endpoint.expect_room(1)
    receiver.open(1, [sender], [9, 3, 40, 41, 42], state_rows=[[1, 2], [7]], prefix_tokens=8)
    assert sender.events.wait_for("ready", 1)[2] == 8

    sender.send(1, [20, 21, 5], is_last=False)
    sender.send(1, [6, 7], start=3, state_rows=[[4, 3], [0]], aux_row=5)

    receiver.events.wait_for("received", 1)
    sender.events.wait_for("sent", 1)
    expected = sender.pool.pages([20, 21, 5, 6, 7])
    assert np.array_equal(receiver.pool.pages([9, 3, 40, 41, 42]), expected)
    assert np.array_equal(receiver.pool.states[0][:, [1, 2]], sender.pool.states[0][:, [4, 3]])
    assert np.array_equal(receiver.pool.states[1][:, [7]], sender.pool.states[1][:, [0]])
    assert np.array_equal(receiver.pool.aux[:, 2], sender.pool.aux[:, 5])
    untouched = [page for page in range(64) if page not in (9, 3, 40, 41, 42)]
    assert not receiver.pool.pages(untouched).any()
    stats, num_state_bytes = sender.endpoint.stats, 3 * (2 * 40 + 100)
    is_smaller = stats.sent_bytes + stats.pulled_bytes < expected.nbytes + num_state_bytes
    assert is_smaller == (sender.pool.shape.codec != "none")


def test_empty_room_still_brings_metadata(pair: Pair) -> None:
    sender, receiver = pair
    sender.pool.aux[:, 1] = 7
    receiver.open(2, [sender], [], state_rows=[None, None])
    sender.endpoint.expect_room(2)
    sender.events.wait_for("ready", 2)
    sender.send(2, [])
    receiver.events.wait_for("received", 2)
    assert (receiver.pool.aux[:, 2] == 7).all()


def test_many_rooms_at_once_do_not_mix(pair: Pair) -> None:
    sender, receiver = pair
    for room in range(16):
        sender.endpoint.expect_room(room)
        receiver.open(room, [sender], range(room * 4, room * 4 + 4), state_rows=[None, None])
    for room in range(16):
        sender.events.wait_for("ready", room)
        sender.send(room, [(room * 7 + part) % 64 for part in range(4)])
    for room in range(16):
        receiver.events.wait_for("received", room)
    for room in range(16):
        pages = [(room * 7 + part) % 64 for part in range(4)]
        got = receiver.pool.pages(range(room * 4, room * 4 + 4))
        assert np.array_equal(got, sender.pool.pages(pages)), room


def test_nothing_is_kept_of_rooms_that_ended(pair: Pair) -> None:
    sender, receiver = pair
    for room in range(20):
        sender.endpoint.expect_room(room)
        receiver.open(room, [sender], [room], state_rows=[None, None])
        sender.events.wait_for("ready", room)
        sender.send(room, [room])
        receiver.events.wait_for("received", room)
        receiver.endpoint.close_room(room)
        sender.events.wait_for("sent", room)
        sender.endpoint.drop_room(room)
    eventually(lambda: sender.endpoint.num_rooms == 0 and receiver.endpoint.num_rooms == 0)
    assert sender.events.kinds(3) == ["ready", "sent"]
    assert receiver.events.kinds(3) == ["received"]


def test_prefill_abort_reaches_decode_with_reason(pair: Pair) -> None:
    sender, receiver = pair
    sender.endpoint.expect_room(3)
    receiver.open(3, [sender], [1, 2], state_rows=[None, None])
    sender.events.wait_for("ready", 3)
    sender.send(3, [1], is_last=False)
    sender.endpoint.fail_room(3, "the client went away")
    assert receiver.events.wait_for("failed", 3)[2] == "PD peer failed: the client went away"


def test_decode_abort_reaches_prefill_with_reason(pair: Pair) -> None:
    sender, receiver = pair
    sender.endpoint.expect_room(4)
    receiver.open(4, [sender], [1, 2], state_rows=[None, None])
    sender.events.wait_for("ready", 4)
    receiver.endpoint.close_room(4)
    assert "the request ended" in sender.events.wait_for("failed", 4)[2]


def test_late_half_of_a_failed_room_fails_immediately(pair: Pair) -> None:
    sender, receiver = pair
    sender.endpoint.expect_room(5)
    sender.endpoint.fail_room(5, "no memory")
    receiver.open(5, [sender], [1], state_rows=[None, None])
    assert receiver.events.wait_for("failed", 5)[2] == (
        "PD peer failed: no memory; for another try, draw another bootstrap_room."
    )

    receiver.open(6, [sender], [1], state_rows=[None, None])
    eventually(lambda: sender.endpoint.num_rooms == 1)
    receiver.endpoint.close_room(6)
    eventually(lambda: sender.endpoint.stats.num_rooms_failed == 2)
    sender.endpoint.expect_room(6)
    assert "the request ended" in sender.events.wait_for("failed", 6)[2]


def test_room_opened_twice_keeps_its_first_pages(pair: Pair) -> None:
    """The second took the place of the first, whose request then waited for ever."""
    sender, receiver = pair
    sender.endpoint.expect_room(8)
    receiver.open(8, [sender], [1, 2], state_rows=[None, None])
    with pytest.raises(TransferError, match="open for another request"):
        receiver.open(8, [sender], [3, 4], state_rows=[None, None])
    before = receiver.pool.pages([3, 4]).copy()
    sender.events.wait_for("ready", 8)
    sender.send(8, [5, 6], is_last=True)
    receiver.events.wait_for("received", 8)
    assert np.array_equal(receiver.pool.pages([1, 2]), sender.pool.pages([5, 6]))
    assert np.array_equal(receiver.pool.pages([3, 4]), before)


@pytest.mark.parametrize("is_ready", [False, True])
def test_retry_with_a_failed_room_asks_for_another(pair: Pair, is_ready: bool) -> None:
    """It was told the old reason for a minute, as if it had failed itself."""
    sender, receiver = pair
    if is_ready:
        sender.endpoint.expect_room(9)
    receiver.open(9, [sender], [1], state_rows=[None, None])
    if is_ready:
        sender.events.wait_for("ready", 9)
    eventually(lambda: sender.endpoint.num_rooms == 1)
    receiver.endpoint.close_room(9)
    receiver.open(9, [sender], [2], state_rows=[None, None])
    told = [receiver.events.wait_for("failed", 9)[2]]
    if not is_ready:
        sender.endpoint.expect_room(9)
        told.append(sender.events.wait_for("failed", 9)[2])
    for reason in told:
        assert "the request ended; for another try, draw another bootstrap_room." in reason


def test_abort_before_open_fails_prefills_request(pair: Pair) -> None:
    sender, receiver = pair
    sender.endpoint.expect_room(7)
    receiver.endpoint.abort_room(7, [DecodeTarget(sender.address)], "the client went away")
    reason = sender.events.wait_for("failed", 7)[2]
    assert reason == "decode dropped it: the client went away"


def test_uncomputed_chunk_is_not_sent(pair: Pair) -> None:
    sender, receiver = pair
    sender.endpoint.expect_room(8)
    receiver.open(8, [sender], [1], state_rows=[None, None])
    sender.events.wait_for("ready", 8)
    asked, is_computed = threading.Event(), threading.Event()

    def ask() -> bool:
        asked.set()
        return is_computed.is_set()

    sender.pool.kv[:, 9] = 0
    sender.endpoint.send_chunk(8, Chunk(indices([9]), 0, True, [], 1, ask))
    assert asked.wait(DEADLINE_S)
    assert receiver.events.kinds(8) == []
    sender.pool.kv[:, 9] = 77
    is_computed.set()
    receiver.events.wait_for("received", 8)
    assert (receiver.pool.pages([1]) == 77).all()


def test_lost_claim_fails_prefills_request(
    pair: Pair,
) -> None:
    sender, receiver = pair
    sender.endpoint.expect_room(9)
    receiver.endpoint.claim_room(9, [DecodeTarget(sender.address)])
    eventually(lambda: sender.endpoint.num_sessions == 1)
    receiver.endpoint.claim_room(10, [DecodeTarget(sender.address)])
    eventually(lambda: sender.endpoint.num_rooms == 2)  # both claims have arrived
    receiver.endpoint.close()
    sender.events.wait_for("failed", 9)

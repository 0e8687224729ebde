"""The contract of a KV handoff, over every way the bytes can go: TCP, several connections,
encrypted, and read out of the sender's memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
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
from sglang_tiered.transfer.send_queue import Chunk
from sglang_tiered.wire.keys import Keys, load_keys, make_keys

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
Pair = tuple[Prefill, Decode]


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    way: str = request.param
    keys: list[Keys | None] = [None, None]
    if way.startswith("keys"):
        make_keys(tmp_path)
        keys = [load_keys(tmp_path, role) for role in ("prefill", "decode")]
    codec = "zstd" if way == "compressed" else "none"
    shape = Shape(states=(("swa", 40), ("mamba", 100)), codec=codec)
    with (
        prefill(shape, settings=WAYS[way], keys=keys[0]) as sender,
        decode(shape, settings=WAYS[way], keys=keys[1]) as receiver,
    ):
        yield sender, receiver


def open_room(pair: Pair, room: int, pages: Iterable[int], **more: Any) -> Pair:
    """Decode's half of a room."""
    sender, receiver = pair
    receiver.open(room, [sender], list(pages), **({"state_rows": [None, None]} | more))
    return pair


def begin(pair: Pair, room: int, pages: Iterable[int], **more: Any) -> Pair:
    """Both halves of a room."""
    pair[0].endpoint.expect_room(room)
    open_room(pair, room, pages, **more)
    pair[0].events.wait_for("ready", room)
    return pair


def test_pages_states_and_metadata_arrive_intact(pair: Pair) -> None:
    sender, receiver = pair
    sender.pool.aux[:, 5] = np.arange(24, dtype=np.uint8)
    begin(pair, 1, [9, 3, 40, 41, 42], state_rows=[[1, 2], [7]], prefix_tokens=8)
    assert sender.events.wait_for("ready", 1)[2] == 8
    sender.send(1, [20, 21, 5], is_last=False)
    sender.send(1, [6, 7], start=3, state_rows=[[4, 3], [0]], aux_row=5)
    receiver.events.wait_for("done", 1)
    sender.events.wait_for("done", 1)
    expected = sender.pool.pages([20, 21, 5, 6, 7])
    assert np.array_equal(receiver.pool.pages([9, 3, 40, 41, 42]), expected)
    assert np.array_equal(receiver.pool.states[0][:, [1, 2]], sender.pool.states[0][:, [4, 3]])
    assert np.array_equal(receiver.pool.states[1][:, [7]], sender.pool.states[1][:, [0]])
    assert np.array_equal(receiver.pool.aux[:, 2], sender.pool.aux[:, 5])
    untouched = [page for page in range(64) if page not in (9, 3, 40, 41, 42)]
    assert not receiver.pool.pages(untouched).any()
    stats, num_state_bytes = sender.endpoint.stats, 3 * (2 * 40 + 100)
    is_smaller = stats.wire_bytes + stats.same_host_bytes < expected.nbytes + num_state_bytes
    assert is_smaller == (sender.pool.shape.codec != "none")


def test_empty_room_still_brings_metadata(pair: Pair) -> None:
    sender, receiver = pair
    room = 2**63 - 1  # the largest there is
    sender.pool.aux[:, 1] = 7
    open_room(pair, room, [])
    sender.endpoint.expect_room(room)
    sender.events.wait_for("ready", room)
    sender.send(room, [])
    receiver.events.wait_for("done", room)
    assert (receiver.pool.aux[:, 2] == 7).all()


def test_many_rooms_at_once_do_not_mix(pair: Pair) -> None:
    sender, receiver = pair
    pages = {room: [(room * 7 + part) % 64 for part in range(4)] for room in range(16)}
    for room in pages:
        sender.endpoint.expect_room(room)
        open_room(pair, room, range(room * 4, room * 4 + 4))
    for room, chosen in pages.items():
        sender.events.wait_for("ready", room)
        sender.send(room, chosen)
    for room, chosen in pages.items():
        receiver.events.wait_for("done", room)
        got = receiver.pool.pages(range(room * 4, room * 4 + 4))
        assert np.array_equal(got, sender.pool.pages(chosen)), room


def test_room_opened_twice_keeps_its_first_pages(pair: Pair) -> None:
    """The second took the place of the first, whose request then waited for ever."""
    sender, receiver = begin(pair, 8, [1, 2])
    with pytest.raises(TransferError, match="open for another request"):
        open_room(pair, 8, [3, 4])
    before = receiver.pool.pages([3, 4]).copy()
    sender.send(8, [5, 6], is_last=True)
    receiver.events.wait_for("done", 8)
    assert np.array_equal(receiver.pool.pages([1, 2]), sender.pool.pages([5, 6]))
    assert np.array_equal(receiver.pool.pages([3, 4]), before)


def test_uncomputed_chunk_is_not_sent(pair: Pair) -> None:
    sender, receiver = begin(pair, 8, [1])
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
    receiver.events.wait_for("done", 8)
    assert (receiver.pool.pages([1]) == 77).all()


def test_lost_claim_fails_prefills_request(pair: Pair) -> None:
    sender, receiver = pair
    sender.endpoint.expect_room(9)
    receiver.claim(9, [sender])
    eventually(lambda: sender.endpoint.num_sessions == 1)
    receiver.claim(10, [sender])
    eventually(lambda: sender.endpoint.num_rooms == 2)  # both claims have arrived
    receiver.endpoint.close()
    sender.events.wait_for("failed", 9)

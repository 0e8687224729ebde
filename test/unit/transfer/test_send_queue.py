"""The queue to one decode rank: credit, resends and what a room leaves behind; no sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transfer_pair import Pool, Shape, indices

from sglang_tiered.transfer import send_queue
from sglang_tiered.transfer.layout import pair_buffers
from sglang_tiered.transfer.messages import Open
from sglang_tiered.transfer.same_host import Fence
from sglang_tiered.transfer.send_queue import (
    SMALL_SLAB_BYTES,
    TARGET_SLAB_BYTES,
    Chunk,
    Parcel,
    SendQueue,
    SlabBuffers,
)
from sglang_tiered.wire.keys import Tagger

PAGE_BYTES = 4 * 512
POOL = Pool(Shape(), 1)  # kept: its memories only know addresses


@pytest.fixture
def queue() -> SendQueue:
    buffers = SlabBuffers(POOL.memories.kv.new_buffer)
    pairs = pair_buffers(POOL.layout, POOL.layout)
    credit = 10 * SMALL_SLAB_BYTES  # each slab takes that, however short
    return SendQueue(POOL.memories, pairs, POOL.layout, Tagger(b""), buffers, credit)


def opened(room: int = 1, num_pages: int = 4) -> Open:
    return Open(room, 7, num_pages, [], 0, 1, False, bytes(32))


def add(queue: SendQueue, pages: list[int], fence: Fence | None = None, **changes: Any) -> None:
    room = changes.pop("room", 1)
    chunk = Chunk(indices(pages), changes.pop("start", 0), changes.pop("is_last", True), **changes)
    queue.add_chunk(opened(room), chunk, fence or Fence())


def post(queue: SendQueue, now: float = 0.0) -> Parcel:
    parcel = queue.next_parcel()
    assert parcel is not None
    queue.mark_sent(parcel, now)
    return parcel


def post_all(queue: SendQueue) -> None:
    while (parcel := queue.next_parcel()) is not None:
        queue.mark_sent(parcel, 0.0)


def test_without_credit_nothing_is_gathered(queue: SendQueue) -> None:
    """Short slabs lie in long buffers: these are bounded, not what is in them."""
    for room in range(30):
        add(queue, [1, 2, 3, 4], room=room)
    post_all(queue)
    assert queue.credit_bytes == 0
    held = [parcel.buffer for parcel in queue.unconfirmed.values() if parcel.buffer is not None]
    assert sum(buffer.nbytes for buffer in held) == 10 * SMALL_SLAB_BYTES


def test_messages_that_cost_no_credit_are_bounded(
    queue: SendQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a socket cannot queue ends its session, with all rooms."""
    monkeypatch.setattr(send_queue, "MAX_UNCONFIRMED", 5)
    for room in range(9):
        add(queue, [], room=room)
    post_all(queue)
    assert len(queue.unconfirmed) == 5


def test_an_overtaken_slab_is_missed_in_busy_sessions(queue: SendQueue) -> None:
    """Confirmations of other rooms say nothing of it, and without it its room would wait."""
    for room in (1, 2):
        add(queue, [room], room=room, is_last=False)
    slab, other = post(queue), post(queue)
    queue.confirm(other.key, 5.0)
    assert queue.quiet_since == 0.0
    queue.confirm(slab.key, 6.0)
    assert queue.quiet_since == 6.0


def test_dropped_room_returns_its_credit(queue: SendQueue) -> None:
    fence = Fence()
    add(queue, [1, 2], fence, is_last=False)
    add(queue, [3], fence, start=2)
    add(queue, [5], room=2)
    first = post(queue)
    second = post(queue)
    queue.resend(second.key, fence, 0.0)
    fence.close()
    queue.drop_room(1)
    assert queue.credit_bytes == 9 * SMALL_SLAB_BYTES
    assert not first.frames
    assert first.buffer is None
    assert post(queue).key == (2, 7, 0), "other rooms go on"
    assert queue.resend(first.key, None, 0.0), "a Nack confirms it as well"
    assert queue.confirm((9, 9, 9), 0.0) is None, "of no message that is under way"
    assert queue.credit_bytes == 9 * SMALL_SLAB_BYTES
    assert list(queue.num_made) == [2]


def test_pages_beyond_decodes_room_are_not_sent(queue: SendQueue) -> None:
    add(queue, [1, 2, 3, 4, 5], start=2)
    assert post(queue).frames[3].nbytes == 2 * PAGE_BYTES


def test_damaged_slab_is_resent_boundedly(queue: SendQueue) -> None:
    add(queue, [1])
    slab = post(queue)
    payload = slab.frames[3].tobytes()
    for _ in range(3):
        assert queue.resend(slab.key, Fence(), 0.0)
        again = post(queue)
        assert (again.key, again.frames[3].tobytes()) == (slab.key, payload)
    assert queue.credit_bytes == 9 * SMALL_SLAB_BYTES, "it takes its credit once"
    assert not queue.resend(slab.key, Fence(), 0.0)
    assert queue.credit_bytes == 10 * SMALL_SLAB_BYTES
    assert not queue.unconfirmed, "or the session would end for want of its confirmation"


@pytest.mark.parametrize("is_freed", [False, True])
def test_failed_pull_becomes_a_slab_of_that_number(queue: SendQueue, is_freed: bool) -> None:
    """Unless its pages are another's by now."""
    queue.reader, fence = Tagger(b"k"), Fence()
    add(queue, [1, 2], fence, is_last=False)
    pull = post(queue)
    assert pull.buffer is None
    if is_freed:
        fence.close()
    assert queue.resend(pull.key, fence, 0.0)
    slab = queue.next_parcel()
    assert (slab is None) == is_freed
    assert slab is None or (slab.key == pull.key and slab.frames[3].nbytes == 2 * PAGE_BYTES)
    assert queue.reader is None, "nor is decode asked to read again"


def test_failed_pulls_hold_no_more_than_the_window() -> None:
    """A pull takes less credit than its slab: instead of a window's, four windows were held."""
    pool = Pool(Shape(num_layers=1, page_size=64, num_pages=64, num_heads=8, head_bytes=1024), 1)
    pairs, window = pair_buffers(pool.layout, pool.layout), 2 * TARGET_SLAB_BYTES
    buffers = SlabBuffers(pool.memories.kv.new_buffer)
    tagger = Tagger(b"k")
    queue = SendQueue(pool.memories, pairs, pool.layout, tagger, buffers, window, tagger)
    for room in range(2):
        queue.add_chunk(opened(room, 32), Chunk(indices(range(32)), 0, True), Fence())
    post_all(queue)
    for key in [key for key, parcel in queue.unconfirmed.items() if not parcel.is_last]:
        assert queue.resend(key, Fence(), 0.0)
    post_all(queue)
    while queue.unconfirmed:
        held = [one.buffer for one in queue.unconfirmed.values() if one.buffer is not None]
        assert sum(buffer.nbytes for buffer in held) <= window + TARGET_SLAB_BYTES
        for key in list(queue.unconfirmed):
            queue.confirm(key, 0.0)
        post_all(queue)
    assert queue.credit_bytes == window


def test_encoded_slab_is_no_buffer_for_the_next(queue: SendQueue) -> None:
    zeros = Pool(Shape(codec="zstd"))
    queue.memories, queue.layout = zeros.memories, zeros.layout
    add(queue, [1], is_last=False)
    slab = post(queue)
    assert len(slab.frames[3]) < PAGE_BYTES
    assert slab.buffer is None
    assert queue.credit_bytes == 10 * SMALL_SLAB_BYTES - slab.frames[3].nbytes
    queue.confirm(slab.key, 0.0)
    first, second = (queue.buffers.borrow_buffer(1) for _ in range(2))
    assert first is not second


def test_idle_buffers_are_bounded_of_each_size() -> None:
    buffers = SlabBuffers(lambda size: np.empty(size, np.uint8), 2 * TARGET_SLAB_BYTES)
    for size in (SMALL_SLAB_BYTES, TARGET_SLAB_BYTES):
        for buffer in [buffers.borrow_buffer(size) for _ in range(9)]:
            buffers.return_buffer(buffer)
        assert sum(one.nbytes for one in buffers._free[size]) == TARGET_SLAB_BYTES

"""The same pages over plain TCP sockets, with nothing checked, confirmed or bounded.

Gathered into slabs, sent, received and scattered: what the endpoints are measured against. And page
by page, each a transfer of its own out of one pool into the other: what gathering is worth. And the
slabs as frames of ZeroMQ, which receives into memory of its own: what a handoff over it can reach.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.transfer.memory import SlabPiece
from sglang_tiered.transfer.send_queue import TARGET_SLAB_BYTES, SlabSpec, cut_slabs

if TYPE_CHECKING:
    import socket

    import zmq

    from transfer_bench.pools import Pool

_NUM_FRAMES = 4  # that wait to be sent: ZeroMQ says when a buffer may be filled again
_HEADER = struct.Struct("<QQ")  # buffer, place of the page in the prompt


def send_prompt(connection: socket.socket, pool: Pool, pages: Any) -> None:
    """Returns when the receiver has said that it has all of it."""
    memory = pool.memories.kv
    buffer, placed = memory.new_buffer(TARGET_SLAB_BYTES), memory.place(pages)
    for spec in _slabs(pool):
        part = placed[spec.start : spec.start + spec.num_pages]
        memory.begin_gather(_pieces(pool, spec), part, buffer[: spec.num_bytes])()
        connection.sendall(buffer[: spec.num_bytes].data)
    connection.recv(1)


def receive_prompt(connection: socket.socket, pool: Pool, pages: Any) -> None:
    buffer = np.empty(TARGET_SLAB_BYTES, np.uint8)
    for spec in _slabs(pool):
        view, filled = buffer[: spec.num_bytes].data, 0
        while filled < spec.num_bytes:
            filled += connection.recv_into(view[filled:])
        part = pages[spec.start : spec.start + spec.num_pages]
        pool.memories.kv.scatter_slab(_pieces(pool, spec), part, buffer[: spec.num_bytes])
    connection.sendall(b"!")


def send_frames(connection: zmq.Socket[bytes], pool: Pool, pages: Any) -> None:
    """As ``send_prompt``, each slab a frame."""
    memory = pool.memories.kv
    buffers = [memory.new_buffer(TARGET_SLAB_BYTES) for _ in range(_NUM_FRAMES)]
    trackers: list[zmq.MessageTracker | None] = [None] * _NUM_FRAMES
    placed = memory.place(pages)
    for number, spec in enumerate(_slabs(pool)):
        at = number % _NUM_FRAMES
        tracker, buffer = trackers[at], buffers[at][: spec.num_bytes]
        if tracker is not None:
            tracker.wait()
        part = placed[spec.start : spec.start + spec.num_pages]
        memory.begin_gather(_pieces(pool, spec), part, buffer)()
        trackers[at] = connection.send(buffer.data, copy=False, track=True)
    connection.recv()


def receive_frames(connection: zmq.Socket[bytes], pool: Pool, pages: Any) -> None:
    for spec in _slabs(pool):
        frame = connection.recv(copy=False)
        part = pages[spec.start : spec.start + spec.num_pages]
        slab = np.frombuffer(frame.buffer, np.uint8)
        pool.memories.kv.scatter_slab(_pieces(pool, spec), part, slab)
    connection.send(b"!")


def send_pages(connection: socket.socket, pool: Pool, pages: Any) -> None:
    """As ``send_prompt``, with a header and a send of its own for each page of each buffer."""
    for index, buffer in enumerate(pool.array):
        for place, page in enumerate(pages):
            data = memoryview(buffer[page])
            sent = connection.sendmsg([_HEADER.pack(index, place), data])
            if sent < _HEADER.size + data.nbytes:
                connection.sendall(data[sent - _HEADER.size :])
    connection.recv(1)


def receive_pages(connection: socket.socket, pool: Pool, pages: Any) -> None:
    """Each page straight to where it belongs."""
    header = bytearray(_HEADER.size)
    for _ in range(len(pages) * len(pool.array)):
        _receive(connection, memoryview(header))
        index, place = _HEADER.unpack(header)
        _receive(connection, memoryview(pool.array[index, pages[place]]))
    connection.sendall(b"!")


def _receive(connection: socket.socket, view: memoryview) -> None:
    filled = 0
    while filled < view.nbytes:
        filled += connection.recv_into(view[filled:])


def _pieces(pool: Pool, spec: SlabSpec) -> list[SlabPiece]:
    buffers = range(spec.first_pair, spec.first_pair + spec.num_pairs)
    return [SlabPiece(buffer, pool.shape.page_bytes) for buffer in buffers]


def _slabs(pool: Pool) -> list[SlabSpec]:
    shape = pool.shape
    sizes = [shape.page_bytes] * 2 * shape.num_layers
    return list(cut_slabs(shape.prompt_pages, sizes, shape.page_size))

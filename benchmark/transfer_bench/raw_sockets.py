"""The same pages over plain TCP sockets: gathered, sent, received and scattered, with nothing
checked, confirmed or bounded. What the endpoints are measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.transfer.prefill.send_queue import TARGET_SLAB_BYTES, SlabSpec, cut_slabs

if TYPE_CHECKING:
    import socket

    from transfer_bench.pools import Pool


def send_prompt(connection: socket.socket, pool: Pool, pages: Any) -> None:
    """Returns when the receiver has said that it has all of it."""
    buffer = np.empty(TARGET_SLAB_BYTES, np.uint8)
    for spec in _slabs(pool):
        part = pages[spec.start : spec.start + spec.num_pages]
        size = spec.num_pages * pool.shape.page_bytes
        for index in range(spec.num_pairs):
            out = buffer[index * size : (index + 1) * size]
            pool.memories.kv.gather(spec.first_pair + index, part, None, out)
        connection.sendall(buffer[: spec.num_bytes].data)
    connection.recv(1)


def receive_prompt(connection: socket.socket, pool: Pool, pages: Any) -> None:
    buffer = np.empty(TARGET_SLAB_BYTES, np.uint8)
    for spec in _slabs(pool):
        view, filled = buffer[: spec.num_bytes].data, 0
        while filled < spec.num_bytes:
            filled += connection.recv_into(view[filled:])
        part = pages[spec.start : spec.start + spec.num_pages]
        size = spec.num_pages * pool.shape.page_bytes
        for index in range(spec.num_pairs):
            data = buffer[index * size : (index + 1) * size]
            pool.memories.kv.scatter(spec.first_pair + index, part, None, data)
    connection.sendall(b"!")


def _slabs(pool: Pool) -> list[SlabSpec]:
    shape = pool.shape
    sizes = [shape.page_bytes] * 2 * shape.num_layers
    return list(cut_slabs(shape.prompt_pages, sizes, shape.page_size))

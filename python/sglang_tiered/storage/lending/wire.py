"""What a borrower and its lender say to each other over a Unix socket in the shard.

Both are processes of one server, so there is one version of this, and no negotiation.

A borrower asks for the pages of a run (``Request``). The lender answers in pieces: each a byte per
page, its ``Reason`` by position in the enum, then the bytes of the pages that are ``OK``, until
every page of the request has had its byte. Any number of requests follow each other.
"""

from __future__ import annotations

import os
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.storage.region.files import LENDING_NAME

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = [
    "Request",
    "decode_request",
    "receive_into",
    "receive_message",
    "send_message",
    "send_segments",
    "short_path",
]

MAX_MESSAGE_BYTES = 1 << 24
_LENGTH = struct.Struct("<I")
_MAX_SEGMENTS = 512  # of one call; the system takes 1,024


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Pages of a run, in its order."""

    claim: bytes  # what the borrower takes the pages of the store to be
    keys: list[bytes]
    lengths: list[int]  # payload bytes of each


def decode_request(data: bytes) -> Request:
    """Decode a request. Raises ``msgspec.DecodeError`` for invalid bytes."""
    return msgspec.msgpack.decode(data, type=Request)


@contextmanager
def short_path(directory: Path) -> Iterator[str]:
    """Return a name short enough for the socket of a shard, however deep the shard lies."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{LENDING_NAME}"
    finally:
        os.close(fd)


def send_message(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket) -> bytes | None:
    """Receive one message; None at the end. Raises ``OSError`` for half of one."""
    head = bytearray(_LENGTH.size)
    num_bytes = connection.recv_into(head)
    if num_bytes == 0:
        return None
    receive_into(connection, memoryview(head)[num_bytes:])
    (length,) = _LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes")
    data = bytearray(length)
    receive_into(connection, memoryview(data))
    return bytes(data)


def send_segments(connection: socket.socket, segments: Sequence[memoryview]) -> None:
    """Send all bytes of all segments, in order."""
    waiting = [segment for segment in segments if segment.nbytes]
    while waiting:
        num_sent = connection.sendmsg(waiting[:_MAX_SEGMENTS])
        at = 0
        while at < len(waiting) and num_sent >= waiting[at].nbytes:
            num_sent -= waiting[at].nbytes
            at += 1
        waiting = waiting[at:]
        if num_sent:
            waiting[0] = waiting[0][num_sent:]


def receive_into(connection: socket.socket, room: memoryview) -> None:
    """Fill ``room``. Raises ``OSError`` where the other side ends before."""
    while room.nbytes:
        num_bytes = connection.recv_into(room)
        if num_bytes == 0:
            raise ConnectionError("the other side ended in the middle of a message")
        room = room[num_bytes:]

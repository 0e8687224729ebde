"""Messages as frames of MessagePack, and text of strangers that is safe to print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import zmq

from sglang_tiered.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MAX_REASON", "NOT_OURS", "decode", "encode", "printable", "received"]

MAX_REASON = 500

NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError)  # text is not always UTF-8
"""What decoders raise."""

_encoder = msgspec.msgpack.Encoder()
_T = TypeVar("_T")


def encode(message: Any) -> bytes:
    """The MessagePack frame of one message."""
    return _encoder.encode(message)


def decode(frame: Any, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    """The message in a frame. Raises ``TransferError`` for anything else."""
    try:
        return decoder.decode(frame)
    except NOT_OURS as error:
        raise TransferError(f"a peer sent a message that is none of ours ({error}).") from error


def printable(reason: str) -> str:
    """What a peer gave as its reason, fit for a log line and an answer to a client."""
    return "".join(char if char.isprintable() else " " for char in reason[:MAX_REASON])


def received(socket: zmq.Socket[bytes], limit: int) -> Iterator[list[zmq.Frame]]:
    """The messages that are there, at most ``limit``, without a copy."""
    for _ in range(limit):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return

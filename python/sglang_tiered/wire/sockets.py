"""Sockets that carry MessagePack frames: what is sent, what came, and why a connection was lost."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from sglang_tiered.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_tiered.wire.keys import Keys


MAX_REASON = 500

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError)  # text is not always UTF-8
"""What decoders raise."""

_LOST_EVENTS = {
    zmq.EVENT_DISCONNECTED: "closed the connection",
    zmq.EVENT_CLOSED: "cannot be reached",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refuses this server's key; is it among its {flag}?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "has other {flag} than this server, or only one has any",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broke off the handshake",
}

_encoder = msgspec.msgpack.Encoder()
_monitors = itertools.count()
_T = TypeVar("_T")


def encode(message: Any) -> bytes:
    """The MessagePack frame of one message."""
    return _encoder.encode(message)


def decode(frame: Any, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    """The message in a frame. Raises ``TransferError`` for anything else."""
    try:
        return decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise TransferError(
            f"a peer sent a frame that is not a message of this protocol ({error})."
        ) from error


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Messages are arrays on the wire, without field names, so any change is a new version."""


def check_version(frame: Any, magic: bytes, version: int, who: str, protocol: str) -> None:
    """Raises ``TransferError`` when ``who`` speaks another version of a protocol, or another one:
    the version frame is the magic and the number."""
    spoken = bytes(frame[:32])
    if spoken == magic + str(version).encode():
        return
    if not spoken.startswith(magic):
        raise TransferError(f"{who} does not speak the {protocol} protocol.")
    theirs = printable(spoken[len(magic) :][:8].decode("ascii", "replace"))
    raise TransferError(
        f"{who} speaks version {theirs} of the {protocol} protocol and this instance version "
        f"{version}; run the same release of sglang-tiered on both."
    )


def printable(reason: str) -> str:
    """A peer's reason, made fit for a log line and for an answer to a client."""
    return "".join(char if char.isprintable() else " " for char in reason[:MAX_REASON])


def received(socket: zmq.Socket[bytes], limit: int) -> Iterator[list[zmq.Frame]]:
    """The messages that are there, without a copy; at most ``limit``, so that nothing else waits
    long."""
    for _ in range(limit):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return


def endpoint_of(host: str, port: int | str) -> str:
    """A host and port as ZeroMQ wants them."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def make_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    *,
    max_frame_bytes: int,
    is_ipv6: bool,
    keys: Keys | None,
) -> zmq.Socket[bytes]:
    """A DEALER for one connection: it never reconnects or lingers. Its owner connects it."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.maxmsgsize = max_frame_bytes
    socket.ipv6 = is_ipv6
    socket.reconnect_ivl = -1
    if keys is not None:
        keys.secure_client(socket)
    return socket


def watch_connection(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]
) -> zmq.Socket[bytes]:
    """A socket that receives the connection events of another. Raises ``zmq.ZMQError`` when sockets
    have run out. The receiver is made first: to end a watch ZeroMQ sends it a message, and would
    wait without end for one that could not be made."""
    monitor = context.socket(zmq.PAIR)
    address = f"inproc://monitor-{next(_monitors)}"
    try:
        socket.monitor(address, zmq.EVENT_ALL)
        monitor.connect(address)
    except zmq.ZMQError:
        monitor.close(linger=0)
        raise
    return monitor


def connection_events(monitor: zmq.Socket[bytes]) -> Iterator[zmq.Event]:
    """The connection events that are there."""
    while True:
        try:
            event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return
        yield zmq.Event(event["event"])


def loss_reason(event: zmq.Event, flag: str) -> str | None:
    """Why a connection was lost, if an event says that it was. ``flag`` names the key directory."""
    reason = _LOST_EVENTS.get(event)
    return None if reason is None else reason.format(flag=flag)

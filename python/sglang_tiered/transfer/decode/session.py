"""One prefill rank as a decode rank sees it: the session's sockets and how far it has come.

    connecting --Welcome--> open --lost--> gone
         |                                   ^
         +-- Refuse, silence, disconnect ----+

A link is used once: after a loss the next room makes a new one, so that nothing of a dead process
is ever mixed with its successor behind the same address. The endpoint's thread only.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from sglang_tiered.transfer import messages
from sglang_tiered.transfer.messages import VERSION_FRAME
from sglang_tiered.wire.framing import encode
from sglang_tiered.wire.keys import Tagger

if TYPE_CHECKING:
    from sglang_tiered.transfer.layout import Pair
    from sglang_tiered.transfer.same_host import PeerMemory
    from sglang_tiered.wire.keys import Keys

MAX_ABORTS = 256
"""That are told again if the session is lost right after them; prefill gives up others in time."""

__all__ = ["Address", "PrefillLink", "connect_socket", "endpoint_of", "watch_socket"]

Address = tuple[str, int]

_LOST_EVENTS = {
    zmq.EVENT_DISCONNECTED: "closed the connection",
    zmq.EVENT_CLOSED: "cannot be reached",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refuses our key; is it among its --transfer-keys?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "expects other --transfer-keys than ours, or none",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broke the connection off while greeting",
}


_monitors = itertools.count()


def endpoint_of(address: Address) -> str:
    host, port = address
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def connect_socket(
    context: zmq.Context[zmq.Socket[bytes]], address: Address, keys: Keys | None
) -> zmq.Socket[bytes]:
    """A DEALER that never blocks, lingers or queues for a peer that is not there."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 4096
    socket.maxmsgsize = messages.MAX_CONTROL_BYTES
    socket.ipv6 = ":" in address[0]
    socket.reconnect_ivl = -1  # a link is used once
    if keys is not None:
        keys.secure_client(socket)
    return socket


def watch_socket(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]
) -> zmq.Socket[bytes]:
    """Where the events of a socket's connection are read. Raises ``zmq.ZMQError`` where sockets
    have run out. The reader is made first: ZeroMQ ends the watch of a socket by telling it, and
    would wait for ever for one that could not be made."""
    monitor = context.socket(zmq.PAIR)
    address = f"inproc://monitor-{next(_monitors)}"
    try:
        socket.monitor(address, zmq.EVENT_ALL)
        monitor.connect(address)
    except zmq.ZMQError:
        monitor.close(linger=0)
        raise
    return monitor


@dataclass(eq=False, slots=True)
class PrefillLink:
    """``control``, ``monitor``: None while there are none, and for ever where none can be made.
    ``waiting``: control messages to send once the session is open. ``aborts``: those told last,
    with the time. ``num_repeats``: how many links before this one were lost with such aborts."""

    address: Address
    opened_at: float
    last_seen: float
    control: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    last_ping: float = 0.0
    welcome: messages.Welcome | None = None
    num_told: int = 0  # control messages since Hello and Welcome; pings are not counted
    num_heard: int = 0
    pairs: list[Pair] = field(default_factory=list)
    tagger: Tagger = field(default_factory=lambda: Tagger(b""))
    data: list[zmq.Socket[bytes]] = field(default_factory=list)
    peer_memory: PeerMemory | None = None
    waiting: deque[bytes] = field(default_factory=deque)
    aborts: deque[tuple[float, messages.Abort]] = field(
        default_factory=lambda: deque(maxlen=MAX_ABORTS)
    )
    num_repeats: int = 0
    is_gone: bool = False

    @property
    def name(self) -> str:
        return f"prefill {self.address[0]}:{self.address[1]}"

    def tell(self, message: Any) -> None:
        """Send on the control channel, once there is a session. Raises, now and not then, for what
        no message can hold."""
        frame = encode(message)
        if isinstance(message, messages.Abort):
            self.aborts.append((time.monotonic(), message))
        if self.welcome is None and not isinstance(message, messages.Hello):
            self.waiting.append(frame)
            return
        self.num_told += not isinstance(message, messages.Hello | messages.Ping)
        self._send(self.control, frame)

    def tell_data(self, message: Any, index: int) -> None:
        self._send(self.data[index], encode(message))

    def is_welcome(self) -> None:
        """Send what waited for the session."""
        self.num_told += len(self.waiting)
        while self.waiting:
            self._send(self.control, self.waiting.popleft())

    def lost_because(self) -> str | None:
        """What the monitor says of the connection, if it was lost."""
        while self.monitor is not None:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return None
            reason = _LOST_EVENTS.get(zmq.Event(event["event"]))
            if reason is not None:
                return reason
        return None

    def _send(self, socket: zmq.Socket[bytes] | None, frame: bytes) -> None:
        # What cannot be sent is lost with the link, which the monitor, silence or a number ends.
        if socket is None:
            return
        with contextlib.suppress(zmq.ZMQError):
            socket.send_multipart([VERSION_FRAME, frame], zmq.NOBLOCK)

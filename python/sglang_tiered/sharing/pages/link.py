"""One page server as a client sees it: the connection, and the requests over it.

    connecting --greeted--> open --disconnect, silence, breach, idle--> gone
         |                                          ^
         +-- refused, no answer --------------------+

A link is used once: after a loss the next fetch makes another, so no late answer of an earlier
process behind the address is taken for one of its successor. The client's thread only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zmq

from sglang_tiered.errors import TransferError
from sglang_tiered.sharing.pages.messages import MAX_PAGE_BYTES, VERSION_FRAME, encode
from sglang_tiered.wire.sockets import (
    connection_events,
    loss_reason,
    make_dealer,
    watch_connection,
)

if TYPE_CHECKING:
    from sglang_tiered.sharing.pages.landing import PageRequest
    from sglang_tiered.sharing.settings import PageSettings
    from sglang_tiered.wire.keys import Keys

__all__ = ["PageLink", "check_address"]

_ADDRESS = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})")
_HEARTBEAT_MS = 1000


def check_address(address: str) -> None:
    """Raises ``TransferError`` for anything but an IP address and a port over TCP. Addresses come
    from other servers, ZeroMQ would also open files and pipes, and looking up a name may take long.
    """
    match = _ADDRESS.fullmatch(address)
    try:
        if match is None or not 0 < int(match[3]) < 1 << 16:
            raise ValueError
        ipaddress.ip_address(match[1] or match[2])
    except ValueError:
        raise TransferError("a page server's address is not of the form tcp://IP:PORT.") from None


@dataclass(eq=False, slots=True)
class PageLink:
    """``open_requests``: sent and not answered, by number, also those whose fetch has ended."""

    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    opened_at: float
    last_heard: float
    is_open: bool = False
    is_gone: bool = False
    waiting: deque[PageRequest] = field(default_factory=deque)
    open_requests: dict[int, PageRequest] = field(default_factory=dict)
    open_bytes: int = 0

    @classmethod
    def connect(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        settings: PageSettings,
        keys: Keys | None,
        now: float,
        *,
        max_frame_bytes: int = MAX_PAGE_BYTES,
    ) -> PageLink:
        """Start to connect; never blocks. Raises ``TransferError`` for an invalid address."""
        if not (settings.is_local and address.startswith("ipc:///proc/self/fd/")):
            check_address(address)
        timeout_ms = max(1, int(settings.connect_timeout_s * 1000))
        socket = make_dealer(
            context, max_frame_bytes=max_frame_bytes, is_ipv6="[" in address, keys=keys
        )
        socket.sndhwm = 4 * settings.max_requests
        socket.rcvhwm = 2 * settings.max_requests
        socket.connect_timeout = socket.handshake_ivl = timeout_ms
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = max(_HEARTBEAT_MS, int(settings.answer_timeout_s * 1000))
        monitor = None
        try:
            monitor = watch_connection(context, socket)
            socket.connect(address)
        except zmq.ZMQError as error:
            if monitor is not None:
                socket.disable_monitor()
                monitor.close(linger=0)
            socket.close(linger=0)
            raise TransferError(f"{address} cannot be connected to ({error}).") from error
        return cls(address, socket, monitor, now, now)

    @property
    def is_idle(self) -> bool:
        return not self.open_requests and not self.waiting

    def send(self, message: Any) -> bool:
        """Send a message. Returns False if it did not fit into the queue."""
        try:
            self.socket.send_multipart([VERSION_FRAME, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def loss_reason(self) -> str | None:
        """Why the connection was lost, if its monitor says that it was."""
        for event in connection_events(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_open = True
            reason = loss_reason(event, "--tier-peer-keys")
            if reason is not None:
                return reason
        return None

    def close(self) -> None:
        """Close the socket. The client ends the requests, and closes the monitor."""
        self.is_gone = True
        with contextlib.suppress(zmq.ZMQError):
            self.socket.disable_monitor()
        self.socket.close(linger=0)

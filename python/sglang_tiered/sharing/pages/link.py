"""One page server as those see it that ask it: the connection, and what becomes of it.

    connecting --greeted--> open --disconnect, silence, breach, idle--> gone
         |                                          ^
         +-- refused, no answer --------------------+

A link is used once: after a loss another is made, so no late answer of an earlier process behind
the address is taken for one of its successor. Of the thread of one loop.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

from sglang_tiered.errors import TransferError
from sglang_tiered.sharing.pages.messages import (
    MAX_PAGE_BYTES,
    VERSION_FRAME,
    Refuse,
    decode_from_server,
)
from sglang_tiered.wire.sockets import (
    connection_events,
    encode,
    loss_reason,
    make_dealer,
    printable,
    received,
    watch_connection,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.sharing.pages.client import PageFetch
    from sglang_tiered.sharing.pages.messages import FromServer
    from sglang_tiered.sharing.settings import PageSettings
    from sglang_tiered.wire.keys import Keys
    from sglang_tiered.wire.loop import EndpointLoop


_MAX_MESSAGES = 4  # at a time, so that others wait only for their copies
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


class PageLink:
    """Begins to connect; raises ``TransferError`` for an invalid address. ``heard`` takes each
    message with its payload, and raises ``TransferError`` for a breach of the protocol. ``lost`` is
    called once for a link that ends otherwise than by ``close``, with the reason and whether it was
    a breach.

    ``open_requests``: sent and not answered, by number, also those whose fetch has ended."""

    def __init__(
        self,
        loop: EndpointLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        settings: PageSettings,
        keys: Keys | None,
        *,
        heard: Callable[[PageLink, FromServer, list[memoryview]], None],
        lost: Callable[[PageLink, str, bool], None],
        clock: Callable[[], float],
        max_frame_bytes: int = MAX_PAGE_BYTES,
    ) -> None:
        self.address = address
        self._loop = loop
        self._settings = settings
        self._heard = heard
        self._lost = lost
        self._clock = clock
        self.opened_at = self.last_heard = clock()
        self.is_open = self.is_gone = False
        self.waiting: deque[PageFetch] = deque()
        self.open_requests: dict[int, PageFetch] = {}
        if not (settings.is_local and address.startswith("ipc:///proc/self/fd/")):
            check_address(address)
        timeout_ms = max(1, int(settings.connect_timeout_s * 1000))
        self._socket = socket = make_dealer(
            context, max_frame_bytes=max_frame_bytes, is_ipv6="[" in address, keys=keys
        )
        socket.sndhwm = 4 * settings.max_requests
        socket.rcvhwm = 2 * settings.max_requests
        socket.connect_timeout = socket.handshake_ivl = timeout_ms
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = max(_HEARTBEAT_MS, int(settings.answer_timeout_s * 1000))
        monitor = None
        try:
            self._monitor = monitor = watch_connection(context, socket)
            socket.connect(address)
        except zmq.ZMQError as error:
            if monitor is not None:
                socket.disable_monitor()
                monitor.close(linger=0)
            socket.close(linger=0)
            raise TransferError(f"{address} cannot be connected to ({error}).") from error
        loop.add_socket(monitor, self._on_monitor)
        loop.add_socket(socket, self._on_messages)

    @property
    def is_idle(self) -> bool:
        return not self.open_requests and not self.waiting

    def send(self, message: Any) -> bool:
        """Send a message. Returns False if it did not fit into the queue."""
        try:
            self._socket.send_multipart([VERSION_FRAME, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def check(self, silence_s: float | None) -> None:
        """End a connection that is not made in time, or over which nothing came for so long."""
        now = self._clock()
        if not self.is_open and now - self.opened_at > self._settings.connect_timeout_s:
            self.lose("it does not answer")
        elif silence_s is not None and now - self.last_heard > silence_s:
            self.lose(f"it has said nothing for {silence_s:g} s")

    def lose(self, why: str, *, is_breach: bool = False) -> None:
        """End the connection for a reason."""
        if not self.is_gone:
            self.close()
            self._lost(self, why, is_breach)

    def close(self) -> None:
        """End the connection. What waits here is the caller's to end."""
        if not self.is_gone:
            self.is_gone = True
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self._loop.remove_socket(self._monitor)
            self._loop.remove_socket(self._socket)

    def _on_messages(self) -> None:
        for frames in received(self._socket, _MAX_MESSAGES):
            self.last_heard = self._clock()
            try:
                message = decode_from_server([frame.buffer for frame in frames])
                if isinstance(message, Refuse):
                    raise TransferError(message.reason)
                self._heard(self, message, [frame.buffer for frame in frames[2:]])
            except TransferError as error:
                self.lose(printable(str(error)), is_breach=True)
            if self.is_gone:
                return

    def _on_monitor(self) -> None:
        for event in connection_events(self._monitor):
            self.is_open |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            reason = loss_reason(event, "--tier-peer-keys")
            if reason is not None:
                self._on_messages()  # what it sent before
                self.lose(f"it {reason}")
                return

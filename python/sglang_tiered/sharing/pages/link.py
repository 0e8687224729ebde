"""One page server as those see it that ask it: the connection, and what becomes of it.

    connecting --greeted--> open --disconnect, silence, breach, idle--> gone
         |                                          ^
         +-- refused, no answer --------------------+

A link is used once: after a loss another is made, so no late answer of an earlier process behind
the address is taken for one of its successor. Of the thread of one loop.

``PageFetch`` is what a client asks over it. Only the fetch determines where bytes go: a reply names
its number, never a place.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import re
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from sglang_tiered.checksummed import begin_checksum
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
    from collections.abc import Callable, Sequence

    from xxhash import xxh3_64

    from sglang_tiered.sharing.pages.messages import Found, FromServer
    from sglang_tiered.sharing.settings import PageSettings
    from sglang_tiered.storage.base import Page, Run
    from sglang_tiered.wire.keys import Keys
    from sglang_tiered.wire.loop import EndpointLoop


_MAX_MESSAGES = 4  # at a time, so that others wait only for their copies
_ADDRESS = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})")
_HEARTBEAT_MS = 1000
_LARGE_COPY_BYTES = 64 << 10


class PageOutcome(enum.Enum):
    """The outcome of one page."""

    OK = "ok"  # its bytes are there and verified; other pages have undefined content
    MISS = "miss"  # the holder has no page of that key and length; untouched
    DAMAGED = "damaged"  # the bytes that came did not verify
    BUSY = "busy"  # the holder has too much to do; untouched
    LOST = "lost"  # the holder is unreachable, did not answer, or broke the protocol
    LATE = "late"  # the deadline came first
    CANCELLED = "cancelled"


class PageFetch:
    """Pages asked of one holder, with one message, until ``deadline`` of the client's clock.
    ``outcomes[i]`` is that of page ``i``, valid when ``done`` is called: once, on the client's
    thread, after the last touch of the pages."""

    def __init__(
        self,
        address: str,
        namespace: bytes,
        run: Run,
        deadline: float | None,
        done: Callable[[PageFetch], None],
    ) -> None:
        self.address = address
        self.namespace = namespace
        self.keys = run.keys
        self.pages: Sequence[Page] = run.pages
        self.lengths = [sum(segment.nbytes for segment in page) for page in run.pages]
        self.num_bytes = sum(self.lengths)
        self.deadline = deadline
        self.sent_at: float | None = None
        self.outcomes = [PageOutcome.LOST] * run.num_pages
        self.is_open = True
        self.is_silent = False  # nothing was heard of the holder since it was asked
        self._done = done

    def end(self) -> None:
        """Drop the pages and call ``done``: nothing lands from here on."""
        self.is_open = False
        self.pages = ()
        self._done(self)

    def land(self, found: Found, payload: Sequence[memoryview]) -> None:
        """Copy each page to its place and verify it there. Raises ``TransferError``, before a byte
        is copied, for an answer that does not fit the request."""
        if len(found.checksums) != len(self.keys):
            raise TransferError(
                f"a page server answered for {len(found.checksums)} pages, asked for "
                f"{len(self.keys)}"
            )
        num_bytes = sum(
            length
            for length, checksum in zip(self.lengths, found.checksums, strict=True)
            if checksum is not None
        )
        num_sent = sum(frame.nbytes for frame in payload)
        if num_sent != num_bytes:
            raise TransferError(
                f"a page server sent {num_sent} bytes for pages that take {num_bytes}"
            )
        frames = deque(payload)
        for position, checksum in enumerate(found.checksums):
            if checksum is None:
                self.outcomes[position] = PageOutcome.MISS
                continue
            state = begin_checksum(self.namespace, self.keys[position])
            for segment in self.pages[position]:
                _fill(segment, frames, state)
            verified = state.intdigest() == checksum
            self.outcomes[position] = PageOutcome.OK if verified else PageOutcome.DAMAGED


def _fill(segment: memoryview, frames: deque[memoryview], state: xxh3_64) -> None:
    """Fill a segment with the next bytes of frames, which the caller has counted. Each part is read
    back for the checksum while the processor has it at hand."""
    at = 0
    while at < segment.nbytes:
        frame = frames.popleft()
        size = min(frame.nbytes, segment.nbytes - at)
        target, part = segment[at : at + size], frame[:size]
        if size < _LARGE_COPY_BYTES:
            target[:] = part
        else:  # numpy lets other threads run meanwhile
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(part, np.uint8))
        state.update(target)
        if size < frame.nbytes:
            frames.appendleft(frame[size:])
        at += size


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

"""``PageServer``: sends pages to clients that ask for them by namespace and full key, and tells
those that follow it what there is.

One thread owns the socket. Pages are read by a ``PageSource``, which never blocks it, into memory
that goes to the socket without a copy and is given back when the last byte has left. No message of
a client makes the server hold more than its bounds.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq

from sglang_tiered.errors import TransferError
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.messages import VERSION_FRAME
from sglang_tiered.sharing.settings import PageSettings
from sglang_tiered.wire.loop import EndpointLoop
from sglang_tiered.wire.sockets import encode, received

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.sharing.page_source import PageSource, SharedRead
    from sglang_tiered.sharing.telling import Followers
    from sglang_tiered.wire.keys import Keys


logger = logging.getLogger(__name__)

_MAX_WAITING = 64  # requests of one client, whatever their size
_NAME_BYTES = 1024  # counted for each page, which bounds the number of tiny ones


_MAX_MESSAGES = 64  # at a time
_SHORT_POLL_S = 0.001  # between looks for memory that has left, while requests wait for it
_LONG_POLL_S = 0.02  # the same while no request waits
_HEARTBEAT_MS = 1000
_FRAME_BYTES = 4 << 20  # longer ones are no cheaper to send
_SEALED_FRAME_BYTES = 1 << 20  # where ZeroMQ encrypts, it holds copies of a whole frame
_CLIENT_HWM = 256  # unread answers to one client; answers with pages are bounded otherwise
_UNREAD_HWM = 64  # unread messages of one client


@dataclass(eq=False, slots=True)
class ServeRequest:
    """A client stops waiting for it at ``expires_at``, by the server's clock."""

    client: bytes
    fetch: messages.Fetch
    keys: list[bytes]
    num_bytes: int
    expires_at: float

    @property
    def cost(self) -> int:
        """The bytes that it counts for while it waits: keys take memory too."""
        return self.num_bytes + _NAME_BYTES * len(self.keys)


class ServeQueue:
    """The requests of a page server: whose turn it is, and what exceeds the bounds. Pure; the
    server's thread only.

    A waiting request takes a few bytes; its memory is taken when its read begins, and given back
    when its answer has left. Both are bounded, over all clients and for each, so that a client that
    asks for more than it reads holds up no other.
    """

    def __init__(self, settings: PageSettings) -> None:
        self._settings = settings
        self._waiting: list[ServeRequest] = []  # the next in turn comes first
        self._held: list[ServeRequest] = []  # read, being read, or on their way out

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def held_bytes(self) -> int:
        return sum(request.num_bytes for request in self._held)

    def add_request(self, request: ServeRequest) -> bool:
        """Queue a request. Returns False if it exceeds a bound."""
        most, size = self._settings.max_queued_bytes, request.cost
        costs = [each.cost for each in self._waiting]
        own = [each.cost for each in self._waiting if each.client == request.client]
        fits = _fits(size, costs, most) and _fits(size, own, most // 4) and len(own) < _MAX_WAITING
        if fits:
            self._waiting.append(request)
        return fits

    def drop_client(self, client: bytes) -> int:
        """Drop the waiting requests of a client that is gone, and return their number."""
        num_before = len(self._waiting)
        self._waiting = [each for each in self._waiting if each.client != client]
        return num_before - len(self._waiting)

    def expire(self, now: float) -> list[ServeRequest]:
        """Drop and return the requests whose time has passed."""
        expired = [each for each in self._waiting if each.expires_at <= now]
        self._waiting = [each for each in self._waiting if each.expires_at > now]
        return expired

    def next_request(self) -> ServeRequest | None:
        """The next request that there is memory for, of the client whose turn it is. Its bytes are
        held until ``release_memory``."""
        most, held = self._settings.max_serving_bytes, [each.num_bytes for each in self._held]
        firsts: dict[bytes, ServeRequest] = {}
        for each in self._waiting:
            firsts.setdefault(each.client, each)
        for client, first in firsts.items():
            own = [each.num_bytes for each in self._held if each.client == client]
            if _fits(first.num_bytes, held, most) and _fits(first.num_bytes, own, most // 2):
                self._waiting.remove(first)
                self._waiting.sort(key=lambda each: each.client == client)  # behind the others
                self._held.append(first)
                return first
        return None

    def release_memory(self, request: ServeRequest) -> None:
        """Free the memory of a request."""
        self._held.remove(request)


def _fits(size: int, others: list[int], most: int) -> bool:
    """Whether one more fits. Alone, every size does."""
    return not others or sum(others) + size <= most


class PageServer:
    """Answers every request exactly once, as long as its client is connected and reads: a client
    relies on that.

    Binds ``endpoint`` (of port ``*``: any free one) on construction. Raises ``TransferError`` when
    that fails. With ``keys`` everything is encrypted and only their holders are admitted. Without
    ``followers`` there is nothing to follow. Counts are written by the server's thread only."""

    def __init__(
        self,
        source: PageSource,
        *,
        namespace: bytes,
        endpoint: str = "tcp://127.0.0.1:*",
        settings: PageSettings | None = None,
        keys: Keys | None = None,
        followers: Followers | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings or PageSettings()
        self._followers = followers
        if followers is not None:
            followers.send = self._send
        self._source = source
        self._namespace = namespace
        self._clock = clock
        self.num_requests = 0
        self.num_served = 0  # pages
        self.bytes_served = 0
        self.num_missed = 0  # pages asked for and not held
        self.num_busy = 0  # requests
        self.num_dropped = 0  # requests whose client was gone, or reads nothing
        self.num_breaches = 0
        self._queue = ServeQueue(self._settings)
        self._reading: set[ServeRequest] = set()
        self._sending: list[tuple[list[zmq.MessageTracker], ServeRequest, SharedRead]] = []
        self._is_stopped = False
        self.context = context or zmq.Context()
        self._owns_context = context is None
        self._guard = keys.guard_server(self.context) if keys is not None else None
        self._frame_bytes = _FRAME_BYTES if keys is None else _SEALED_FRAME_BYTES
        try:
            self._socket = self._bind(endpoint, keys)
        except (zmq.ZMQError, OverflowError) as error:
            self._destroy()
            raise TransferError(
                f"cannot listen for other servers on {endpoint} ({error}); choose another."
            ) from error
        self.loop = EndpointLoop("tier-page-server", self._step, self._tick)
        self.loop.add_socket(self._socket, self._on_messages)
        self.loop.start()

    def _bind(self, endpoint: str, keys: Keys | None) -> zmq.Socket[bytes]:
        settings = self._settings
        socket = self.context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.router_mandatory = True  # a client that is gone is an error, not silence
        socket.sndhwm = _CLIENT_HWM
        socket.rcvhwm = _UNREAD_HWM
        socket.maxmsgsize = messages.MAX_CLIENT_FRAME_BYTES
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = max(_HEARTBEAT_MS, math.ceil(settings.stuck_timeout_s * 1000))
        socket.tcp_maxrt = math.ceil(settings.stuck_timeout_s * 1000)
        socket.ipv6 = "[" in endpoint
        if keys is not None:
            keys.secure_server(socket)
        socket.bind(endpoint)
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        port = bound.rstrip(b"\0").rpartition(b":")[2]
        self.port = int(port) if port.isdigit() else 0
        return socket

    def set_namespace(self, namespace: bytes) -> None:
        """Serve pages of this namespace only, from now on. Any thread; never blocks."""
        self._namespace = namespace
        self.tell()

    def tell(self) -> None:
        """Tell followers what there is to say. Any thread; never blocks."""
        if self._followers is not None:
            self.loop.call(self._followers.answer_all)

    @property
    def held_bytes(self) -> int:
        """Bytes of pages that are being read or sent."""
        return self._queue.held_bytes

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    def stop(self) -> None:
        """Disconnect all clients. Reads under way release their memory when they end. Idempotent;
        not on the server's thread."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self.loop.stop()
        self._destroy()

    # ---- The server's thread ----

    def _on_messages(self) -> None:
        for sender, *frames in received(self._socket, _MAX_MESSAGES):
            client = sender.bytes
            try:
                self._serve(client, [frame.buffer for frame in frames])
            except TransferError as error:
                self.num_breaches += 1
                self._send(client, messages.Refuse(str(error)))

    def _serve(self, client: bytes, frames: list[memoryview]) -> None:
        message = messages.decode_from_client(frames)
        if not isinstance(message, messages.Fetch):
            if self._followers is None:
                raise TransferError("this server tells nobody what it holds.")
            self._followers.hear(client, message)
            return
        self.num_requests += 1
        keys = message.split_keys()
        if message.namespace != self._namespace:
            self._miss(client, message.number, len(keys))
            return
        expires_at = self._clock() + message.patience_ms / 1000
        request = ServeRequest(client, message, keys, message.num_bytes, expires_at)
        if not self._queue.add_request(request):
            self._busy(client, message.number)

    def _step(self) -> float | None:
        self._reap()
        for request in self._queue.expire(self._clock()):
            self._send(request.client, messages.Busy(request.fetch.number))
        while len(self._reading) < (1 if self._source.is_pressed else self._settings.max_reads):
            wanted = self._queue.next_request()
            if wanted is None:
                break
            self._start_read(wanted)
        if self._followers is not None and self._followers.step():
            return _SHORT_POLL_S
        if not self._sending:
            return None
        return _SHORT_POLL_S if self._queue.num_waiting else _LONG_POLL_S

    def _start_read(self, request: ServeRequest) -> None:
        self._reading.add(request)
        try:
            self._source.read(
                request.keys,
                request.fetch.lengths,
                lambda pages: self.loop.call(self._answer, request, pages),
            )
        except Exception:
            logger.exception("internal error while reading pages for another server; a miss")
            self.loop.call(self._answer, request, None)

    def _answer(self, request: ServeRequest, pages: SharedRead | None) -> None:
        if request not in self._reading:  # answered already
            return
        self._reading.discard(request)
        trackers = None
        if pages is None or request.fetch.namespace != self._namespace:
            self._miss(request.client, request.fetch.number, len(request.keys))
        else:
            found = [place for place in pages.places if place is not None]
            checksums = [place and place.checksum for place in pages.places]
            answer = messages.Found(request.fetch.number, checksums)
            trackers = self._send(request.client, answer, _payload(pages, self._frame_bytes))
        if pages is None or trackers is None:
            self._release(request, pages)
            return
        self.num_served += len(found)
        self.num_missed += len(pages.places) - len(found)
        self.bytes_served += sum(place.length for place in found)
        self._sending.append((trackers, request, pages))

    def _release(self, request: ServeRequest, pages: SharedRead | None) -> None:
        if pages is not None:
            pages.release()
        self._queue.release_memory(request)

    def _miss(self, client: bytes, number: int, num_pages: int) -> None:
        self.num_missed += num_pages
        self._send(client, messages.Found(number, [None] * num_pages))

    def _busy(self, client: bytes, number: int) -> None:
        self.num_busy += 1
        self._send(client, messages.Busy(number))

    def _send(
        self, client: bytes, message: Any, payload: Sequence[memoryview] = ()
    ) -> list[zmq.MessageTracker] | None:
        """Send a message. Returns trackers of the payload, which is not copied, or None if the
        client is gone or reads nothing."""
        socket = self._socket
        more = zmq.NOBLOCK | zmq.SNDMORE
        trackers: list[zmq.MessageTracker] = []
        try:
            socket.send(client, more)
            socket.send(VERSION_FRAME, more)
            socket.send(encode(message), more if payload else zmq.NOBLOCK)
            for number, frame in enumerate(payload, 1):
                flags = more if number < len(payload) else zmq.NOBLOCK
                sent = socket.send(frame, flags, copy=False, track=True)
                if sent is not None:
                    trackers.append(sent)
        except zmq.ZMQError as error:  # of the first frame: what follows it is taken or dropped
            self.num_dropped += 1
            if error.errno == zmq.EHOSTUNREACH:
                self.num_dropped += self._queue.drop_client(client)
            return None
        return trackers

    def _reap(self) -> None:
        """Give back the memory that has left."""
        left = []
        for item in self._sending:
            trackers, request, pages = item
            if all(tracker.done for tracker in trackers):
                self._release(request, pages)
            else:
                left.append(item)
        self._sending = left

    def _tick(self, _: float) -> None:
        if self._followers is not None:
            self._followers.tick()

    def _destroy(self) -> None:
        if self._guard is not None:
            self._guard.stop()
        if self._owns_context:
            with contextlib.suppress(zmq.ZMQError):
                self.context.destroy(linger=0)


def _payload(pages: SharedRead, frame_bytes: int) -> list[memoryview]:
    """The bytes of the pages that were found, in order, in frames of that size at most. Pages that
    are adjacent in memory share frames."""
    spans: list[tuple[int, int]] = []
    for place in filter(None, pages.places):
        start = place.offset
        if spans and spans[-1][1] == start:
            start, _ = spans.pop()
        spans.append((start, place.offset + place.length))
    return [
        pages.data[at : min(at + frame_bytes, end)]
        for start, end in spans
        for at in range(start, end, frame_bytes)
    ]

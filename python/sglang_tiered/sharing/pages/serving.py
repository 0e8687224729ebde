"""The requests of a page server: whose turn it is, and what exceeds the bounds. Pure.

A waiting request takes a few bytes; its memory is taken when its read begins, and given back when
its answer has left. Both are bounded, over all clients and for each, so that a client that asks for
more than it reads holds up no other.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_tiered.sharing.pages.settings import PageSettings

__all__ = ["ServeQueue", "ServeRequest"]

_MAX_WAITING = 64  # requests of one client, whatever their size
_NAME_BYTES = 1024  # counted for each page, which bounds the number of tiny ones


@dataclass(eq=False, slots=True)
class ServeRequest:
    """A client stops waiting for it at ``expires_at``, by the server's clock."""

    client: bytes
    number: int
    namespace: bytes
    keys: list[bytes]
    lengths: list[int]
    num_bytes: int
    expires_at: float

    @property
    def cost(self) -> int:
        """The bytes that it counts for while it waits: keys take memory too."""
        return self.num_bytes + _NAME_BYTES * len(self.keys)


@dataclass(eq=False, slots=True)
class _Client:
    waiting: deque[ServeRequest] = field(default_factory=deque)
    waiting_bytes: int = 0
    held_bytes: int = 0  # read, being read, or on their way out


class ServeQueue:
    """Used by the server's thread only. A client is known while it has requests or memory."""

    def __init__(self, settings: PageSettings) -> None:
        self._settings = settings
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()  # the next in turn comes first
        self.waiting_bytes = 0
        self.held_bytes = 0
        self.num_waiting = 0
        self.expired: list[ServeRequest] = []  # dropped by ``next_request``, to be answered

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def add_request(self, request: ServeRequest) -> bool:
        """Queue a request. Returns False if it exceeds a bound."""
        settings, size = self._settings, request.cost
        client = self._clients.get(request.client)
        if client is not None and (
            len(client.waiting) >= _MAX_WAITING
            or client.waiting_bytes + size > settings.max_queued_bytes // 4
        ):
            return False
        if self.waiting_bytes and self.waiting_bytes + size > settings.max_queued_bytes:
            return False
        if client is None:
            client = self._clients[request.client] = _Client()
        client.waiting.append(request)
        client.waiting_bytes += size
        self.waiting_bytes += size
        self.num_waiting += 1
        return True

    def cancel_request(self, client: bytes, number: int) -> bool:
        """Drop a request that waits. Returns False if there is no such request."""
        known = self._clients.get(client)
        if known is None:
            return False
        for request in known.waiting:
            if request.number == number:
                known.waiting.remove(request)
                self._left(client, request)
                return True
        return False

    def drop_client(self, client: bytes) -> int:
        """Drop the waiting requests of a client that is gone, and return their number."""
        known = self._clients.get(client)
        num_dropped = 0
        while known is not None and known.waiting:
            self._left(client, known.waiting.popleft())
            num_dropped += 1
        return num_dropped

    def next_request(self, now: float) -> ServeRequest | None:
        """The next request that there is memory for, of the client whose turn it is. Its bytes are
        held until ``release_memory``. Requests whose time has passed go to ``expired``."""
        for name, client in list(self._clients.items()):
            while client.waiting and client.waiting[0].expires_at <= now:
                self.expired.append(client.waiting.popleft())
                self._left(name, self.expired[-1])
            if client.waiting and self._fits(client, client.waiting[0].num_bytes):
                request = client.waiting.popleft()
                client.held_bytes += request.num_bytes
                self.held_bytes += request.num_bytes
                self._left(name, request)
                self._clients.move_to_end(name)
                return request
        return None

    def release_memory(self, request: ServeRequest) -> None:
        """Free the memory of a request."""
        client = self._clients[request.client]
        client.held_bytes -= request.num_bytes
        self.held_bytes -= request.num_bytes
        self._drop_if_idle(request.client, client)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books do not balance."""
        clients = self._clients.values()
        held = sum(client.held_bytes for client in clients)
        assert held == self.held_bytes, f"{held} bytes held, counted {self.held_bytes}"
        waiting = sum(request.cost for client in clients for request in client.waiting)
        assert waiting == self.waiting_bytes, f"{waiting} wait, counted {self.waiting_bytes}"
        number = sum(len(client.waiting) for client in clients)
        assert number == self.num_waiting, f"{number} requests, counted {self.num_waiting}"

    def _fits(self, client: _Client, size: int) -> bool:
        limit = self._settings.max_serving_bytes
        return (not self.held_bytes or self.held_bytes + size <= limit) and (
            not client.held_bytes or client.held_bytes + size <= limit // 2
        )

    def _left(self, name: bytes, request: ServeRequest) -> None:
        client = self._clients[name]
        client.waiting_bytes -= request.cost
        self.waiting_bytes -= request.cost
        self.num_waiting -= 1
        self._drop_if_idle(name, client)

    def _drop_if_idle(self, name: bytes, client: _Client) -> None:
        if not client.waiting and not client.held_bytes:
            del self._clients[name]

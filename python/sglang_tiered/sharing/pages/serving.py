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
    from sglang_tiered.sharing.settings import PageSettings

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
class _ServedClient:
    waiting: deque[ServeRequest] = field(default_factory=deque)
    held_bytes: int = 0  # read, being read, or on their way out

    @property
    def waiting_bytes(self) -> int:
        return sum(request.cost for request in self.waiting)


class ServeQueue:
    """Used by the server's thread only. A client is known while it has requests or memory."""

    def __init__(self, settings: PageSettings) -> None:
        self._settings = settings
        self._clients: OrderedDict[bytes, _ServedClient] = (
            OrderedDict()
        )  # the next in turn comes first

    @property
    def num_waiting(self) -> int:
        return sum(len(client.waiting) for client in self._all())

    @property
    def held_bytes(self) -> int:
        return sum(client.held_bytes for client in self._all())

    def _all(self) -> list[_ServedClient]:
        return list(self._clients.values())

    def add_request(self, request: ServeRequest) -> bool:
        """Queue a request. Returns False if it exceeds a bound."""
        most, size = self._settings.max_queued_bytes, request.cost
        client = self._clients.get(request.client) or _ServedClient()
        waiting_bytes = sum(each.waiting_bytes for each in self._all())
        if (
            len(client.waiting) >= _MAX_WAITING
            or (client.waiting and client.waiting_bytes + size > most // 4)
            or (waiting_bytes and waiting_bytes + size > most)
        ):
            return False
        client.waiting.append(request)
        self._clients.setdefault(request.client, client)
        return True

    def drop_client(self, client: bytes) -> int:
        """Drop the waiting requests of a client that is gone, and return their number."""
        waiting = self._clients.get(client, _ServedClient()).waiting
        num_dropped = len(waiting)
        waiting.clear()
        self._drop_if_idle(client)
        return num_dropped

    def expire(self, now: float) -> list[ServeRequest]:
        """Drop and return the first requests of each client, as far as their time has passed."""
        expired = []
        for name, client in list(self._clients.items()):
            while client.waiting and client.waiting[0].expires_at <= now:
                expired.append(client.waiting.popleft())
            self._drop_if_idle(name)
        return expired

    def next_request(self) -> ServeRequest | None:
        """The next request that there is memory for, of the client whose turn it is. Its bytes are
        held until ``release_memory``."""
        held_bytes = self.held_bytes
        for name, client in self._clients.items():
            if client.waiting and self._fits(client, held_bytes):
                request = client.waiting.popleft()
                client.held_bytes += request.num_bytes
                self._clients.move_to_end(name)
                return request
        return None

    def release_memory(self, request: ServeRequest) -> None:
        """Free the memory of a request."""
        self._clients[request.client].held_bytes -= request.num_bytes
        self._drop_if_idle(request.client)

    def _fits(self, client: _ServedClient, held_bytes: int) -> bool:
        size, limit = client.waiting[0].num_bytes, self._settings.max_serving_bytes
        return (not held_bytes or held_bytes + size <= limit) and (
            not client.held_bytes or client.held_bytes + size <= limit // 2
        )

    def _drop_if_idle(self, name: bytes) -> None:
        client = self._clients.get(name)
        if client is not None and not client.waiting and not client.held_bytes:
            del self._clients[name]

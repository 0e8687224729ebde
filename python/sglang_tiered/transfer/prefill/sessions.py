"""The decode ranks a prefill endpoint has admitted, and the two sockets they connect to.

A peer is admitted by Hello and Welcome on the control socket and joins with each of its data
connections. Only from then on is the peer behind a routing id known. The endpoint's thread only.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zmq

from sglang_tiered.errors import TransferError
from sglang_tiered.transfer import messages
from sglang_tiered.transfer.layout import pair_buffers
from sglang_tiered.transfer.messages import VERSION_FRAME
from sglang_tiered.transfer.prefill.send_queue import SendQueue, SlabBuffers
from sglang_tiered.transfer.same_host import Door
from sglang_tiered.wire.keys import (
    SESSION_DOMAIN,
    Tagger,
    admit_sessions,
    new_session_key,
    password_of,
)
from sglang_tiered.wire.sockets import encode, endpoint_of, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_tiered.config import TransferConfig
    from sglang_tiered.transfer.memory import Memories
    from sglang_tiered.transfer.messages import KVLayout
    from sglang_tiered.wire.keys import Keys


logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class DecodePeer:
    """One decode rank. ``links`` are the routing ids of its data connections, by index."""

    identity: bytes
    instance: bytes
    server: str  # where it answers requests, as it says
    token: bytes
    tagger: Tagger
    sending: SendQueue
    admitted_at: float
    last_seen: float
    num_heard: int = 0  # control messages since Hello, both ways; pings are not counted
    num_sent: int = 0
    links: list[bytes | None] = field(default_factory=list)
    is_reader: bool = False  # it may read this process's memory

    @property
    def is_joined(self) -> bool:
        return all(link is not None for link in self.links)

    def link_of(self, seq: int) -> bytes:
        """The connection for a slab: connections take turns."""
        return self.links[seq % len(self.links)] or b""


class DecodePeers:
    """Binds free ports of ``host`` on construction. Raises ``TransferError`` when the address
    cannot be bound."""

    def __init__(
        self,
        *,
        host: str,
        layout: KVLayout,
        memories: Memories,
        rank: int,
        settings: TransferConfig,
        keys: Keys | None,
    ) -> None:
        self._layout = layout
        self._memories = memories
        self._rank = rank
        self._settings = settings
        self._keys = keys
        self._instance = secrets.token_bytes(16)
        self.door: Door | None = None
        self._buffers = SlabBuffers(memories.kv.new_buffer)
        self._by_identity: dict[bytes, DecodePeer] = {}  # in the order of their turns
        self._by_token: dict[bytes, DecodePeer] = {}
        self._by_link: dict[bytes, DecodePeer] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(
            io_threads=max(1, settings.num_connections)
        )
        self._guard = keys.guard_server(self._context) if keys is not None else None
        self._passwords: dict[str, str] = {}  # by session token; the guard's thread reads it
        if self._guard is not None:
            self._guard.passwords[SESSION_DOMAIN] = self._passwords
        try:
            self.control, self.control_port = self._bind(host, keys)
            self.data, self.data_port = self._bind(host, keys, is_data=True)
        except zmq.ZMQError as error:
            self.close()
            raise TransferError(
                f"cannot listen for decode instances on {host} ({error}); pass another --host."
            ) from error
        if settings.same_host and memories.kv.is_host:
            with contextlib.suppress(OSError):  # without a door, everything is sent
                self.door = Door()

    def __iter__(self) -> Iterator[DecodePeer]:
        return iter(list(self._by_identity.values()))

    def __len__(self) -> int:
        return len(self._by_identity)

    def get(self, identity: bytes) -> DecodePeer | None:
        return self._by_identity.get(identity)

    def of_connection(self, link: bytes) -> DecodePeer | None:
        """The peer that a data connection belongs to."""
        return self._by_link.get(link)

    def replaced_by(self, identity: bytes, instance: bytes) -> list[DecodePeer]:
        """The sessions that a Hello ends: those of the same process or connection."""
        return [peer for peer in self if peer.instance == instance or peer.identity == identity]

    def put_last(self, peer: DecodePeer) -> None:
        """Have the others come before this one, which was sent to."""
        if self._by_identity.pop(peer.identity, None) is not None:
            self._by_identity[peer.identity] = peer

    def admit(self, identity: bytes, hello: messages.Hello, now: float) -> DecodePeer:
        """Open a session and send its Welcome. Raises ``TransferError`` for a layout that cannot be
        served, and then keeps nothing."""
        tagger = Tagger(key := new_session_key(self._keys))
        sending = SendQueue(
            self._memories,
            pair_buffers(self._layout, hello.layout),
            self._layout,
            tagger,
            self._buffers,
            min(hello.window_bytes, self._settings.window_bytes),
        )
        token = secrets.token_bytes(messages.TOKEN_BYTES)
        links: list[bytes | None] = [None] * self._settings.num_connections
        server = printable(hello.server)
        peer = DecodePeer(identity, hello.instance, server, token, tagger, sending, now, now)
        peer.links = links
        door = None if self.door is None else self.door.name
        self._by_identity[identity] = self._by_token[token] = peer
        if self._keys is not None:
            self._passwords[token.hex()] = password_of(key)
        self.send(
            identity,
            messages.Welcome(
                self._instance,
                token,
                self._rank,
                self._layout,
                self.data_port,
                self._settings.num_connections,
                key,
                door,
            ),
        )
        return peer

    def serve_door(self) -> None:
        """Let each process that has come and knows its session's token read this process's pages,
        until the session ends."""
        assert self.door is not None
        for token, pid, address in self.door.visits():
            peer = self._by_token.get(token)
            if peer is not None and not peer.is_reader:
                peer.sending.reader = self.door.admit(pid, address, self._memories.kv.buffers)
                peer.is_reader = peer.sending.reader is not None

    def join(self, link: bytes, message: messages.Join) -> bool:
        """Assign a data connection to its session. Returns False if its proof is wrong."""
        peer = self._by_token.get(message.session)
        if (
            peer is None
            or not 0 <= message.index < len(peer.links)
            or peer.links[message.index] is not None
            or not peer.tagger.is_right(message.proof, *message.proven())
        ):
            return False
        peer.links[message.index] = link
        self._by_link[link] = peer
        return True

    def remove(self, peer: DecodePeer) -> bool:
        """Drop a peer. Returns False if it was dropped already."""
        if self._by_identity.pop(peer.identity, None) is None:
            return False
        self._by_token.pop(peer.token, None)
        self._passwords.pop(peer.token.hex(), None)
        for link in peer.links:
            self._by_link.pop(link or b"", None)
        if peer.is_reader and self.door is not None and not any(one.is_reader for one in self):
            self.door.revoke_permission()
        return True

    def send(self, identity: bytes, message: Any) -> bool:
        """Send on the control channel. Returns False for a connection that is gone. If a message
        does not fit into the queue, the peer notices when it next compares numbers."""
        peer = self._by_identity.get(identity)
        if peer is not None and not isinstance(message, messages.Welcome | messages.Pong):
            peer.num_sent += 1
        try:
            self.control.send_multipart([identity, VERSION_FRAME, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno != zmq.EHOSTUNREACH
        return True

    def close(self) -> None:
        """Close the sockets, after their last use."""
        if self._guard is not None:
            self._guard.stop()
        if self.door is not None:
            if any(peer.is_reader for peer in self):
                self.door.revoke_permission()
            self.door.close()
        self._context.destroy(linger=0)

    def _bind(
        self, host: str, keys: Keys | None, *, is_data: bool = False
    ) -> tuple[zmq.Socket[bytes], int]:
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.router_mandatory = True  # an unknown peer is an error, not silence
        socket.sndhwm = socket.rcvhwm = 4096  # a backstop: credits bound what is under way
        socket.maxmsgsize = messages.MAX_CONTROL_BYTES
        socket.ipv6 = ":" in host
        if keys is not None and is_data and not self._settings.encrypt_data:
            admit_sessions(socket)
        elif keys is not None:
            keys.secure_server(socket)
        port = socket.bind_to_random_port(endpoint_of(host, "*").removesuffix(":*"))
        return socket, port

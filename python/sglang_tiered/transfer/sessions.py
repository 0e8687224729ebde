"""Sessions between a decode and a prefill endpoint, as each of them holds its own: ``PrefillLinks``
at decode, which connects, and ``DecodePeers`` at prefill, which binds two sockets.

A session begins with Hello and Welcome on the control socket and is joined with each data
connection. Only from then on is the peer behind a routing id known. The connection shows that a
process ended, silence that a host vanished. The endpoint's thread only.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import secrets
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from sglang_tiered.errors import TransferError
from sglang_tiered.transfer import messages
from sglang_tiered.transfer.addresses import check_is_allowed, is_own_address
from sglang_tiered.transfer.layout import pair_buffers
from sglang_tiered.transfer.messages import VERSION_FRAME
from sglang_tiered.transfer.same_host import Door, PeerMemory
from sglang_tiered.transfer.send_queue import SendQueue, SlabBuffers
from sglang_tiered.wire import sockets
from sglang_tiered.wire.keys import (
    SESSION_DOMAIN,
    Tagger,
    admit_sessions,
    new_session_key,
    password_of,
    prove_session,
)
from sglang_tiered.wire.loop import GOODBYE_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_tiered.config import TransferConfig
    from sglang_tiered.transfer.addresses import Address
    from sglang_tiered.transfer.layout import Pair
    from sglang_tiered.transfer.memory import Memories
    from sglang_tiered.transfer.messages import KVLayout
    from sglang_tiered.wire.keys import Keys
    from sglang_tiered.wire.loop import EndpointLoop


MAX_QUEUED = 4096
"""Messages that a socket queues each way. At prefill a backstop: credits bound what is under way.
"""

MAX_CONTROL_MESSAGES = 64

FILES_PER_SOCKET = 2
"""A socket takes one file to be woken by and one for its connection. A monitor has no connection,
and leaves its second to what a link needs on the same machine."""

logger = logging.getLogger(__name__)


def make_context(settings: TransferConfig) -> zmq.Context[zmq.Socket[bytes]]:
    return zmq.Context(io_threads=max(1, settings.num_connections))


@dataclass(eq=False, slots=True)
class PrefillLink:
    """One prefill rank as a decode rank sees it: the session's sockets and how far it has come.

        connecting --Welcome--> open --lost--> gone
             |                                   ^
             +-- Refuse, silence, disconnect ----+

    A link is used once: after a loss the next room makes a new one, so that nothing of a dead
    process is ever mixed with its successor behind the same address.

    ``control`` and ``monitor`` are None until they are made, and stay so if that fails.
    ``waiting``: control messages to send once the session is open."""

    address: Address
    opened_at: float
    last_seen: float
    keys_left: list[Keys | None]  # to be tried in their turn
    keys: Keys | None = None  # of those the one in use
    control: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    last_ping: float = 0.0
    welcome: messages.Welcome | None = None
    num_sent: int = 0  # control messages since Hello and Welcome; pings are not counted
    num_heard: int = 0
    pairs: list[Pair] = field(default_factory=list)
    tagger: Tagger = field(default_factory=lambda: Tagger(b""))
    data: list[zmq.Socket[bytes]] = field(default_factory=list)
    peer_memory: PeerMemory | None = None
    waiting: list[bytes] = field(default_factory=list)
    is_gone: bool = False

    @property
    def name(self) -> str:
        return f"prefill {self.address[0]}:{self.address[1]}"

    def send_control(self, message: Any) -> None:
        """Send on the control channel, once there is a session. Raises, when called, for what no
        message can hold."""
        frame = sockets.encode(message)
        if self.welcome is None and not isinstance(message, messages.Hello):
            self.waiting.append(frame)
            return
        self.num_sent += not isinstance(message, messages.Hello | messages.Ping)
        self._send(self.control, frame)

    def send_data(self, message: Any, index: int) -> None:
        self._send(self.data[index], sockets.encode(message))

    def flush_waiting(self) -> None:
        """Send what waited for the session."""
        self.num_sent += len(self.waiting)
        for frame in self.waiting:
            self._send(self.control, frame)
        self.waiting.clear()

    def _send(self, socket: zmq.Socket[bytes] | None, frame: bytes) -> None:
        # A message that cannot be sent is lost; the monitor, silence or a count then ends the link.
        if socket is None:
            return
        with contextlib.suppress(zmq.ZMQError):
            socket.send_multipart([VERSION_FRAME, frame], zmq.NOBLOCK)


class PrefillLinks:
    """At most one link per address. ``on_failed`` gets a ``Failed`` from prefill, ``on_data`` the
    index of a connection that is readable, ``on_lost`` the reason of a loss."""

    def __init__(
        self,
        *,
        server: str,
        layout: KVLayout,
        settings: TransferConfig,
        keys: Keys | None,
        loop: EndpointLoop,
        on_failed: Callable[[PrefillLink, messages.Failed], None],
        on_data: Callable[[PrefillLink, int], None],
        on_lost: Callable[[PrefillLink, str], None],
    ) -> None:
        self._server = server
        self._layout = layout
        self._settings = settings
        self._keys = keys
        self._loop = loop
        self._on_failed, self._on_data, self._on_lost = on_failed, on_data, on_lost
        self._instance = secrets.token_bytes(16)
        self._links: dict[Address, PrefillLink] = {}
        self._context = make_context(settings)
        self._context.set(zmq.MAX_SOCKETS, _max_sockets(self._context))

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[PrefillLink]:
        return iter(list(self._links.values()))

    def link_to(self, address: Address) -> PrefillLink:
        """The link to an address, made now if there is none. Never blocks or raises."""
        link = self._links.get(address)
        if link is None:
            now = time.monotonic()
            keys: list[Keys | None] = [None]
            if self._keys is not None:
                keys = [*self._keys.for_each_peer()]
            link = self._links[address] = PrefillLink(address, now, now, keys)
            self._connect(link)
        return link

    def lose(self, link: PrefillLink, reason: str) -> None:
        """End a session and say so, once."""
        if link.is_gone:
            return
        if self._links.get(link.address) is link:
            del self._links[link.address]
        link.send_control(messages.Bye(reason))  # if it gets lost, prefill sees the connection end
        self._close(link)
        text = f"{link.name} {reason}"
        logger.warning("KV transfer: %s; requests of this session fail", text)
        self._on_lost(link, text)

    def tick(self, now: float) -> None:
        """Send pings, and end the links that are silent. Called every fraction of a second."""
        for link in self:
            if link.welcome is None:
                waited = now - link.opened_at
                if waited > self._settings.connect_timeout_s:
                    self.lose(link, f"did not answer within {waited:.1f} s")
                continue
            silence = now - link.last_seen
            if silence > self._settings.peer_timeout_s:
                self.lose(link, f"has been silent for {silence:.1f} s")
            elif now - link.last_ping >= self._settings.ping_interval_s:
                link.last_ping = now
                link.send_control(messages.Ping(link.num_sent))

    def say_goodbye(self, reason: str) -> None:
        for link in self:
            link.send_control(messages.Bye(reason))
            self._close(link)

    def close(self) -> None:
        """After the loop has ended."""
        self._context.destroy(linger=0)

    def _connect(self, link: PrefillLink) -> None:
        """Connect with the next keys that prefill may know. An address that is not allowed, or for
        which there is no socket, is a loss later: the caller has not said yet which room it is for.
        """
        settings, address = self._settings, link.address
        try:
            if self._keys is None or settings.allowed_networks:
                check_is_allowed(address[0], settings.allowed_networks)
            link.keys = link.keys_left.pop(0)
            link.control = self._make_socket(address, messages.MAX_CONTROL_BYTES, link.keys)
            link.monitor = sockets.watch_connection(self._context, link.control)
            self._loop.add_socket(link.monitor, partial(self._on_monitor, link, link.monitor))
            self._loop.add_socket(link.control, partial(self._on_control, link, link.control))
            link.control.connect(sockets.endpoint_of(*address))
        except Exception as error:
            self._loop.call(self.lose, link, f"cannot be addressed: {error}")
            return
        window = settings.window_bytes
        link.send_control(messages.Hello(self._instance, self._server, self._layout, window))

    def _make_socket(
        self, address: Address, max_frame_bytes: int, keys: Keys | None
    ) -> zmq.Socket[bytes]:
        socket = sockets.make_dealer(
            self._context, max_frame_bytes=max_frame_bytes, is_ipv6=":" in address[0], keys=keys
        )
        socket.sndhwm = socket.rcvhwm = MAX_QUEUED
        return socket

    def _close(self, link: PrefillLink) -> None:
        link.is_gone = True
        if link.peer_memory is not None:
            link.peer_memory.close()
        self._close_control(link)
        for socket in link.data:
            self._loop.remove_socket(socket)

    def _close_control(self, link: PrefillLink) -> None:
        if link.control is not None:
            link.control.disable_monitor()
            self._loop.remove_socket(link.control, GOODBYE_MS)
        if link.monitor is not None:
            self._loop.remove_socket(link.monitor)
        link.control = link.monitor = None

    def _on_monitor(self, link: PrefillLink, monitor: zmq.Socket[bytes]) -> None:
        events = sockets.connection_events(monitor)
        reasons = (sockets.loss_reason(event, "--transfer-keys") for event in events)
        reason = next(filter(None, reasons), None)
        if reason is None:
            return
        if link.welcome is not None or not link.keys_left:
            self.lose(link, reason)
        else:
            self._close_control(link)  # it has other keys, perhaps the next ones
            self._connect(link)

    def _on_control(self, link: PrefillLink, control: zmq.Socket[bytes]) -> None:
        for frames in sockets.received(control, MAX_CONTROL_MESSAGES):
            try:
                messages.check_version(frames[0].bytes, link.name)
                body = frames[1].buffer if len(frames) > 1 else b""
                self._serve(link, sockets.decode(body, messages.control_from_prefill))
            except (TransferError, zmq.ZMQError) as error:  # the latter: no more sockets
                self.lose(link, f"cannot be used: {error}")
            if link.is_gone:
                return

    def _serve(self, link: PrefillLink, message: messages.AnyFromPrefill) -> None:
        link.last_seen = time.monotonic()
        if isinstance(message, messages.Pong):
            if message.number != link.num_heard:
                raise TransferError("control messages to decode were lost on the way.")
            return
        link.num_heard += not isinstance(message, messages.Welcome)
        match message:
            case messages.Welcome() if link.welcome is None:
                self._join(link, message)
            case messages.Refuse():
                reason = sockets.printable(message.reason)
                self.lose(link, f"refused this instance: {reason}")
            case messages.Bye():
                self.lose(link, f"ended the session: {sockets.printable(message.reason)}")
            case messages.Failed():
                self._on_failed(link, message)
            case _:
                raise TransferError("it sent a second Welcome.")

    def _join(self, link: PrefillLink, welcome: messages.Welcome) -> None:
        link.pairs = pair_buffers(welcome.layout, self._layout)
        link.welcome = welcome
        link.tagger = Tagger(welcome.key)
        if (
            welcome.door is not None
            and self._settings.same_host
            and is_own_address(link.address[0])
        ):
            try:
                pages = PeerMemory(welcome.door, welcome.session, len(welcome.layout.page_bytes))
                link.peer_memory = pages
            except (OSError, ValueError) as error:
                logger.info("KV transfer: pages of %s are sent over TCP (%s)", link.name, error)
        encrypts = self._settings.encrypt_data
        address = (link.address[0], welcome.data_port)
        for index in range(welcome.num_connections):
            socket = self._make_socket(
                address, messages.MAX_FRAME_BYTES, link.keys if encrypts else None
            )
            if link.keys is not None and not encrypts:
                prove_session(socket, welcome.session, welcome.key)
            link.data.append(socket)
            self._loop.add_socket(socket, partial(self._on_data, link, index))
            socket.connect(sockets.endpoint_of(*address))
            join = messages.Join(welcome.session, index, b"")
            proof = link.tagger.tag(*join.proven())
            link.send_data(msgspec.structs.replace(join, proof=proof), index)
        link.flush_waiting()


def _max_sockets(context: zmq.Context[zmq.Socket[bytes]]) -> int:
    """The number of sockets that take half of the files this process may open; the rest of the
    process needs the other half. Clients name the addresses, so the number needed is unknown.
    ZeroMQ's own default is 1,023, and each address takes four or more."""
    most = int(context.get(zmq.SOCKET_LIMIT))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else min(most, files // 2 // FILES_PER_SOCKET)


@dataclass(eq=False, slots=True)
class DecodePeer:
    """One decode rank. ``links`` are the routing ids of its data connections, by index."""

    identity: bytes
    hello: messages.Hello
    token: bytes
    sending: SendQueue
    admitted_at: float
    last_seen: float
    links: list[bytes | None]
    num_heard: int = 0  # control messages since Hello, both ways; pings are not counted
    num_sent: int = 0
    is_reader: bool = False  # it may read this process's memory

    @property
    def is_joined(self) -> bool:
        return all(link is not None for link in self.links)

    def link_of(self, seq: int) -> bytes:
        """The connection for a slab: connections take turns."""
        return self.links[seq % len(self.links)] or b""


class DecodePeers:
    """All decode ranks. Binds free ports of ``host`` on construction. Raises ``TransferError`` when
    the address cannot be bound."""

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
        self._context = make_context(settings)
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

    def by_identity(self, identity: bytes) -> DecodePeer | None:
        return self._by_identity.get(identity)

    def by_connection(self, link: bytes) -> DecodePeer | None:
        return self._by_link.get(link)

    def put_last(self, peer: DecodePeer) -> None:
        """Have the others come before this one, which was sent to."""
        if self._by_identity.pop(peer.identity, None) is not None:
            self._by_identity[peer.identity] = peer

    def admit(self, identity: bytes, hello: messages.Hello, now: float) -> None:
        """Open a session and send its Welcome. Raises ``TransferError`` for a layout that cannot be
        served, and then keeps nothing."""
        key, pairs = new_session_key(self._keys), pair_buffers(self._layout, hello.layout)
        window = min(hello.window_bytes, self._settings.window_bytes)
        sending = SendQueue(self._memories, pairs, self._layout, Tagger(key), self._buffers, window)
        token = secrets.token_bytes(messages.TOKEN_BYTES)
        links: list[bytes | None] = [None] * self._settings.num_connections
        peer = DecodePeer(identity, hello, token, sending, now, now, links)
        self._by_identity[identity] = self._by_token[token] = peer
        if self._keys is not None:
            self._passwords[token.hex()] = password_of(key)
        door = None if self.door is None else self.door.name
        at = self.data_port, len(links)
        welcome = messages.Welcome(self._instance, token, self._rank, self._layout, *at, key, door)
        self.send(identity, welcome)

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
            or not peer.sending.tagger.is_right(message.proof, *message.proven())
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
            self.control.send_multipart(
                [identity, VERSION_FRAME, sockets.encode(message)], zmq.NOBLOCK
            )
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
        socket.sndhwm = socket.rcvhwm = MAX_QUEUED
        socket.maxmsgsize = messages.MAX_CONTROL_BYTES
        socket.ipv6 = ":" in host
        if keys is not None and is_data and not self._settings.encrypt_data:
            admit_sessions(socket)
        elif keys is not None:
            keys.secure_server(socket)
        port = socket.bind_to_random_port(sockets.endpoint_of(host, "*").removesuffix(":*"))
        return socket, port

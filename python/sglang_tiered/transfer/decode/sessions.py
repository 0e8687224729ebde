"""The sessions of a decode endpoint: makes them, keeps them alive, ends them.

A process that ends is noticed by its connection, a host that vanishes by its silence. The
endpoint's thread only.
"""

from __future__ import annotations

import logging
import resource
import secrets
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import zmq

from sglang_tiered.errors import TransferError
from sglang_tiered.transfer import messages
from sglang_tiered.transfer.addresses import check_is_allowed, is_own_address
from sglang_tiered.transfer.decode.session import (
    Address,
    PrefillLink,
    connect_socket,
    endpoint_of,
    watch_socket,
)
from sglang_tiered.transfer.layout import pair_buffers
from sglang_tiered.transfer.same_host import PeerMemory
from sglang_tiered.wire import framing
from sglang_tiered.wire.framing import received
from sglang_tiered.wire.keys import Tagger, prove_session
from sglang_tiered.wire.loop import GOODBYE_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_tiered.transfer.messages import KVLayout
    from sglang_tiered.transfer.settings import TransferSettings
    from sglang_tiered.wire.keys import Keys
    from sglang_tiered.wire.loop import EndpointLoop

__all__ = ["LinkEvents", "PrefillLinks"]

MAX_CONTROL_MESSAGES = 64

FILES_PER_SOCKET = 2
"""How to wake it, and its connection; what a link has for the same machine, its monitor leaves."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """Who is called: for ``Failed`` from prefill, for readable data, and after a loss."""

    failed: Callable[[PrefillLink, messages.Failed], None]
    data: Callable[[PrefillLink, int], None]
    lost: Callable[[PrefillLink, str], None]


class PrefillLinks:
    """At most one link per address."""

    def __init__(
        self,
        *,
        layout: KVLayout,
        settings: TransferSettings,
        keys: Keys | None,
        loop: EndpointLoop,
        events: LinkEvents,
    ) -> None:
        self._layout = layout
        self._settings = settings
        self._keys = keys
        self._loop = loop
        self._events = events
        self._instance = secrets.token_bytes(16)
        self._links: dict[Address, PrefillLink] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(
            io_threads=max(1, settings.num_connections)
        )
        self._context.set(zmq.MAX_SOCKETS, _max_sockets(self._context))

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[PrefillLink]:
        return iter(list(self._links.values()))

    def get(self, address: Address) -> PrefillLink | None:
        return self._links.get(address)

    def to(self, address: Address) -> PrefillLink:
        """The link to an address, made now where there is none. Never blocks or raises: what cannot
        be reached is a loss later, after the caller has said which room it is for."""
        link = self._links.get(address)
        if link is not None:
            return link
        now = time.monotonic()
        link = self._links[address] = PrefillLink(address, now, now)
        try:
            self._connect(link)
        except Exception as error:
            self._loop.call(self.lose, link, f"cannot be addressed: {error}")
        return link

    def lose(self, link: PrefillLink, reason: str) -> None:
        """End a session and say so, once."""
        if link.is_gone:
            return
        if self._links.get(link.address) is link:
            del self._links[link.address]
        link.tell(messages.Bye(reason))  # or prefill notices by itself
        self._close(link)
        text = f"{link.name} {reason}"
        logger.warning("KV transfer: %s", text)
        self._events.lost(link, text)

    def tick(self, now: float) -> None:
        """Greet, and look who has gone silent. Every fraction of a second."""
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
                link.tell(messages.Ping(link.num_told))

    def say_goodbye(self, reason: str) -> None:
        for link in self:
            link.tell(messages.Bye(reason))
            self._close(link)

    def close(self) -> None:
        """After the loop has ended."""
        self._context.destroy(linger=0)

    def _connect(self, link: PrefillLink) -> None:
        """Raises ``TransferError`` for who is not allowed, and ``zmq.ZMQError`` where sockets or
        files have run out."""
        host, settings = link.address[0], self._settings
        if self._keys is None or settings.allowed_networks:
            check_is_allowed(host, settings.allowed_networks)
        control = link.control = connect_socket(self._context, link.address, self._keys)
        monitor = link.monitor = watch_socket(self._context, control)
        self._loop.add_socket(monitor, partial(self._on_monitor, link))
        self._loop.add_socket(control, partial(self._on_control, link, control))
        control.connect(endpoint_of(link.address))
        reads = settings.same_host and is_own_address(host)
        link.tell(messages.Hello(self._instance, self._layout, settings.window_bytes, reads))

    def _close(self, link: PrefillLink) -> None:
        link.is_gone = True
        if link.peer_memory is not None:
            link.peer_memory.close()
        if link.control is not None:
            link.control.disable_monitor()
            self._loop.remove_socket(link.control, GOODBYE_MS)
        for socket in (link.monitor, *link.data):
            if socket is not None:
                self._loop.remove_socket(socket)

    def _on_monitor(self, link: PrefillLink) -> None:
        reason = link.lost_because()
        if reason is not None:
            self.lose(link, reason)

    def _on_control(self, link: PrefillLink, control: zmq.Socket[bytes]) -> None:
        for frames in received(control, MAX_CONTROL_MESSAGES):
            try:
                messages.check_version(frames[0].bytes, link.name)
                body = frames[1].buffer if len(frames) > 1 else b""
                self._serve(link, framing.decode(body, messages.control_from_prefill))
            except (TransferError, zmq.ZMQError) as error:  # the latter: no more sockets
                self.lose(link, f"cannot be talked to: {error}")
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
                reason = framing.printable(message.reason)
                self.lose(link, f"refused this instance: {reason}")
            case messages.Bye():
                self.lose(link, f"ended the session: {framing.printable(message.reason)}")
            case messages.Failed():
                self._events.failed(link, message)
            case _:
                raise TransferError("it greeted twice.")

    def _join(self, link: PrefillLink, welcome: messages.Welcome) -> None:
        link.pairs = pair_buffers(welcome.layout, self._layout)
        link.welcome = welcome
        link.tagger = Tagger(welcome.key)
        # Asked again, since prefill may offer what it was not asked for.
        if welcome.door is not None and self._settings.same_host:
            self._go_to_the_door(link, welcome)
        encrypts = self._settings.encrypt_data
        address = (link.address[0], welcome.data_port)
        for index in range(welcome.num_connections):
            socket = connect_socket(self._context, address, self._keys if encrypts else None)
            if self._keys is not None and not encrypts:
                prove_session(socket, welcome.session, welcome.key)
            socket.maxmsgsize = messages.MAX_FRAME_BYTES
            link.data.append(socket)
            self._loop.add_socket(socket, partial(self._events.data, link, index))
            socket.connect(endpoint_of(address))
            join = messages.Join(welcome.session, index, b"")
            proof = link.tagger.tag(*join.proven())
            link.tell_data(msgspec.structs.replace(join, proof=proof), index)
        link.is_welcome()

    def _go_to_the_door(self, link: PrefillLink, welcome: messages.Welcome) -> None:
        num_buffers = len(welcome.layout.page_bytes)
        try:
            if not is_own_address(link.address[0]):
                raise OSError("another machine")
            link.peer_memory = PeerMemory(welcome.door or "", welcome.session, num_buffers)
        except (OSError, ValueError) as error:
            outcome = f"sent ({error})"
        else:
            outcome = "read directly"
        logger.info("KV transfer: pages of %s, on this machine, are %s", link.name, outcome)


def _max_sockets(context: zmq.Context[zmq.Socket[bytes]]) -> int:
    """As many as half of the files take that the system lets this process have, the others left to
    others: clients name the addresses, so there is no saying how many are needed. ZeroMQ's own
    default is 1,023, for four or more at each address."""
    most = int(context.get(zmq.SOCKET_LIMIT))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else min(most, files // 2 // FILES_PER_SOCKET)

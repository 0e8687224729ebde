"""Peers that speak the protocol by hand, to say what no endpoint of ours would."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
import zmq
from strange_sockets import Stranger
from transfer_pair import HOST, MODEL, Pool, Shape

from sglang_tiered.transfer import messages
from sglang_tiered.transfer.messages import VERSION_FRAME
from sglang_tiered.transfer.same_host import Door, PeerMemory
from sglang_tiered.wire import sockets
from sglang_tiered.wire.keys import Tagger
from sglang_tiered.wire.sockets import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transfer_pair import Decode

    from sglang_tiered.transfer.memory import Buffer

TOKEN = b"of this session."


class StrangeDecode(Stranger):
    """A decode instance made of two sockets."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__()
        self.layout = Pool(Shape()).layout
        self.control = self._connect(address[1])
        self.data: zmq.Socket[bytes] | None = None
        self.welcome: messages.Welcome | None = None

    def _connect(self, port: int) -> zmq.Socket[bytes]:
        connection = self.new_socket(zmq.DEALER)
        connection.connect(f"tcp://{HOST}:{port}")
        return connection

    def hello(self, instance: bytes = b"strange", window: int = 1 << 20, **changes: Any) -> None:
        hello = messages.Hello(instance, "", self.layout, window)
        self.tell(msgspec.structs.replace(hello, **changes))

    def greet(self, **changes: Any) -> messages.Welcome:
        self.hello(**changes)
        self.welcome = self.hear(messages.Welcome)
        assert self.welcome is not None
        return self.welcome

    def join(self, index: int = 0) -> None:
        assert self.welcome is not None
        self.data = self._connect(self.welcome.data_port)
        join = messages.Join(self.welcome.session, index, b"")
        proof = Tagger(self.welcome.key).tag(*join.proven())
        self.data.send_multipart(
            [VERSION_FRAME, encode(msgspec.structs.replace(join, proof=proof))]
        )

    def open(self, room: int, num_pages: int = 1, generation: int = 1) -> None:
        self.tell(messages.Open(room, generation, num_pages, [], 0, 1, False, MODEL))

    def tell(self, message: Any) -> None:
        self.control.send_multipart([VERSION_FRAME, encode(message)])

    def hear(self, kind: Any) -> Any:
        """The next control message of a kind; what comes before it is passed over."""
        while True:
            frames = self.control.recv_multipart()
            message = sockets.decode(frames[1], messages.control_from_prefill)
            if isinstance(message, kind):
                return message

    def take(self) -> list[bytes]:
        """The next data message."""
        assert self.data is not None
        return self.data.recv_multipart()


class StrangePrefill(Stranger):
    """A prefill instance made of two sockets: it welcomes, and then sends what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(Shape(), seed=1)
        self.layout = self.pool.layout
        self.control, self.port = self._bind()
        self.data, self.data_port = self._bind()
        self.identity = self.link = b""

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self.port

    def _bind(self) -> tuple[zmq.Socket[bytes], int]:
        connection = self.new_socket(zmq.ROUTER)
        return connection, connection.bind_to_random_port(f"tcp://{HOST}")

    def welcome(self, **changes: Any) -> messages.Hello:
        """Answer the Hello that comes."""
        hello = self.hear(messages.Hello)
        assert isinstance(hello, messages.Hello)
        answer = messages.Welcome(b"strange", TOKEN, 0, self.layout, self.data_port, 1, b"", None)
        self.tell(msgspec.structs.replace(answer, **changes))
        return hello

    def opened_by(self, receiver: Decode, pages: Sequence[int], **changes: Any) -> messages.Open:
        """Room 1 of a decode endpoint, of a session that has begun."""
        receiver.open(1, [self.address], pages)
        self.welcome(**changes)
        self.joined()
        opened = self.hear(messages.Open)
        assert isinstance(opened, messages.Open)
        return opened

    def joined(self) -> messages.Join:
        self.link, _, frame = self.data.recv_multipart()
        message = sockets.decode(frame, messages.data_from_decode)
        assert isinstance(message, messages.Join)
        return message

    def hear(self, kind: Any) -> Any:
        """The next control message of a kind; what comes before it is passed over."""
        while True:
            self.identity, *frames = self.control.recv_multipart()
            message = sockets.decode(frames[1], messages.control_from_decode)
            if isinstance(message, kind):
                return message

    def tell(self, message: Any) -> None:
        self.control.send_multipart([self.identity, VERSION_FRAME, encode(message)])

    def slab(self, opened: messages.Open, payload: bytes, **changes: Any) -> None:
        """Pages of all buffers, in order; ``changes`` are the lies."""
        header = self._header(opened, payload, messages.PLAIN)
        self.send(msgspec.structs.replace(header, **changes), payload)

    def name(self, opened: messages.Open, numbers: bytes, tagger: Tagger) -> None:
        """Pages that decode is to read, of all buffers, under a fence at no address."""
        payload = messages.WHERE.pack(0, 0) + numbers
        self.send(self._header(opened, payload, messages.NAMED), payload, tagger=tagger)

    def _header(self, opened: messages.Open, payload: bytes, form: int) -> messages.Slab:
        key, cut = (opened.room, opened.generation, 0), (0, len(self.layout.page_bytes), 0)
        digest = xxhash.xxh3_64_intdigest(payload)
        return messages.Slab(*key, messages.KV_COMPONENT, *cut, opened.num_pages, form, digest)

    def send(
        self, message: Any, *payload: bytes, tag: bytes | None = None, tagger: Tagger | None = None
    ) -> None:
        """``tagger``: of those who came to a door, for pages that are named."""
        header = encode(message)
        is_named = isinstance(message, messages.Slab) and message.form == messages.NAMED
        signed = payload if is_named else ()
        right = (tagger or Tagger(b"")).tag(header, *signed)
        frames = [VERSION_FRAME, header, right if tag is None else tag, *payload]
        self.data.send_multipart([self.link, *frames])


@contextmanager
def introduced(buffers: Sequence[Buffer]) -> Iterator[tuple[PeerMemory, Tagger]]:
    """This process's memory as one of another session would know it, and what authenticates."""
    door = Door()
    peer = PeerMemory(door.name, TOKEN, len(buffers))
    ((token, pid, address),) = door.visits()
    assert token == TOKEN
    assert not peer.is_right(b""), "nothing is authentic before a key was told"
    tagger = door.admit(pid, address, buffers)
    assert tagger is not None
    try:
        yield peer, tagger
    finally:
        peer.close()
        door.close()

"""A relay between decode and prefill that mistreats frames, on the control and the data channel.

It stands where a network would, but below the protocol's own assumptions: TCP loses nothing
without breaking. What it does follows from a seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from transfer_pair import HOST

from sglang_tiered.transfer import messages
from sglang_tiered.wire import sockets

if TYPE_CHECKING:
    from sglang_tiered.wire.keys import Keys

Frames = list[bytes]
Socket = zmq.Socket[bytes]
Fault = Callable[[random.Random, "Passing"], list[tuple[float, Frames]]]
"""What becomes of a message: what goes on, each after a delay in seconds."""


@dataclass
class Passing:
    """A message under way. ``to_decode`` tells its direction."""

    frames: Frames
    is_data: bool
    to_decode: bool

    @property
    def kind(self) -> str:
        """Its tag; the first things each side says are not mistreated by every fault."""
        tagged: Any = msgspec.msgpack.decode(self.frames[1])
        return str(tagged[0])


GREETINGS = {"hello", "welcome", "join"}


def passes(_: random.Random, passing: Passing) -> list[tuple[float, Frames]]:
    return [(0.0, passing.frames)]


def sometimes(
    change: Fault, *, share: float, only: Callable[[Passing], bool] = lambda _: True
) -> Fault:
    """``change`` to some messages, and never to the greetings."""

    def fault(source: random.Random, passing: Passing) -> list[tuple[float, Frames]]:
        hits = passing.kind not in GREETINGS and only(passing) and source.random() < share
        return change(source, passing) if hits else passes(source, passing)

    return fault


def drop(_: random.Random, __: Passing) -> list[tuple[float, Frames]]:
    return []


def duplicate(_: random.Random, passing: Passing) -> list[tuple[float, Frames]]:
    return [(0.0, passing.frames), (0.0, passing.frames)]


def delay(source: random.Random, passing: Passing) -> list[tuple[float, Frames]]:
    """Others overtake it."""
    return [(source.uniform(0.0, 0.08), passing.frames)]


def flip(frame: int) -> Fault:
    """A bit of one frame: 0 the version, 1 the header, 2 the authenticator, 3 the payload."""

    def change(source: random.Random, passing: Passing) -> list[tuple[float, Frames]]:
        frames = list(passing.frames)
        if len(frames) > frame and frames[frame]:
            damaged = bytearray(frames[frame])
            damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
            frames[frame] = bytes(damaged)
        return [(0.0, frames)]

    return change


class Relay:
    """One prefill address, by way of ``fault``. With keys it holds both roles' secrets."""

    def __init__(
        self,
        address: tuple[str, int],
        fault: Fault,
        seed: int,
        keys: Mapping[str, Keys] | None = None,
    ) -> None:
        self.fault = fault
        self._random = random.Random(seed)
        self._address = address
        self._keys = keys
        self._context: zmq.Context[Socket] = zmq.Context()
        self._poller = zmq.Poller()
        self._control, self.port = self._bind(is_data=False)
        self._data, self._data_port = self._bind(is_data=True)
        self._target_data_port = 0
        self._backs: dict[tuple[bool, bytes], Socket] = {}
        self._delayed: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self.port

    def close(self) -> None:
        self._is_stopping.set()
        self._thread.join(10)
        self._context.destroy(linger=0)

    def _bind(self, *, is_data: bool) -> tuple[Socket, int]:
        socket = self._context.socket(zmq.ROUTER)
        if self._keys is not None and not is_data:
            keys = self._keys["prefill"]
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        self._poller.register(socket, zmq.POLLIN)
        return socket, socket.bind_to_random_port(f"tcp://{HOST}")

    def _back(self, is_data: bool, identity: bytes) -> Socket:
        """The connection to prefill that stands for one of decode's."""
        socket = self._backs.get((is_data, identity))
        if socket is None:
            socket = self._backs[is_data, identity] = self._context.socket(zmq.DEALER)
            if self._keys is not None and not is_data:
                self._keys["decode"].secure_client(socket)
            host, port = self._address
            socket.connect(f"tcp://{host}:{self._target_data_port if is_data else port}")
            self._poller.register(socket, zmq.POLLIN)
        return socket

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            for socket, _ in self._poller.poll(5):
                if socket in (self._control, self._data):
                    self._from_decode(socket)
                else:
                    self._from_prefill(socket)
            while self._delayed and self._delayed[0][0] <= time.monotonic():
                heapq.heappop(self._delayed)[2]()

    def _from_decode(self, socket: Socket) -> None:
        identity, *frames = socket.recv_multipart()
        is_data = socket is self._data
        back = self._back(is_data, identity)
        self._pass(Passing(frames, is_data, False), back.send_multipart)

    def _from_prefill(self, socket: Socket) -> None:
        is_data, identity = next(key for key, back in self._backs.items() if back is socket)
        frames = self._redirected(socket.recv_multipart())
        front = self._data if is_data else self._control

        def forward(parts: Frames) -> None:
            front.send_multipart([identity, *parts])

        self._pass(Passing(frames, is_data, True), forward)

    def _redirected(self, frames: Frames) -> Frames:
        """Welcome names the port for data: ours instead of prefill's."""
        if b"welcome" not in frames[1][:16]:
            return frames
        welcome = sockets.decode(frames[1], messages.control_from_prefill)
        assert isinstance(welcome, messages.Welcome)
        self._target_data_port = welcome.data_port
        ours = msgspec.structs.replace(welcome, data_port=self._data_port)
        return [frames[0], sockets.encode(ours)]

    def _pass(self, passing: Passing, send: Callable[[Frames], Any]) -> None:
        for delay_s, frames in self.fault(self._random, passing):
            entry = time.monotonic() + delay_s, next(self._order), lambda f=frames: send(f)
            if delay_s:
                heapq.heappush(self._delayed, entry)
            else:
                entry[2]()


@contextmanager
def relay(
    address: tuple[str, int],
    fault: Fault = passes,
    *,
    seed: int = 0,
    keys: Mapping[str, Keys] | None = None,
) -> Iterator[Relay]:
    between = Relay(address, fault, seed, keys)
    try:
        yield between
    finally:
        between.close()

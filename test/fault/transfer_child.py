"""A prefill or decode process of its own, which the test talks to by lines and may kill or stop.

``python -m transfer_child prefill PORT`` serves rooms as they come: whichever room is ready gets
the pages of its number. ``... decode PORT`` opens rooms at that port when told to.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from line_process import LineProcess
from transfer_pair import HOST, IMPATIENT, SAME_HOST, Pool, Shape, decode, prefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transfer_pair import Decode

SEED = 1
SHAPE = Shape(num_pages=64)


class Child(LineProcess):
    """The other end of the process."""

    def __init__(self, role: str, port: int = 0, *, same_host: bool = False) -> None:
        super().__init__("transfer_child", role, port, int(same_host))
        self.address = HOST, int(self.wait_for("port").split()[1])

    @property
    def port(self) -> int:
        return self.address[1]

    def wait_for(self, start: str) -> str:
        """The next line that begins so."""
        while not (line := self.line()).startswith(start):
            pass
        return line

    def opens(self, receiver: Decode, room: int, pages: Sequence[int] = ()) -> None:
        """A prefill process and a decode endpoint have a room."""
        self.tell(f"expect {room}")
        receiver.open(room, [self.address], pages or [room])
        self.tell(f"ready {room}")
        self.wait_for(f"ready {room}")


def hand_over(child: Child, receiver: Decode, room: int) -> None:
    """A room from a prefill process, checked byte for byte."""
    child.opens(receiver, room)
    child.tell(f"send {room}")
    receiver.events.wait_for("received", room)
    expected = Pool(SHAPE, SEED).pages([room])
    assert np.array_equal(receiver.pool.pages([room]), expected)


def say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def serve(port: int, settings: Any) -> None:
    if port:
        _bind_control_to(port)
    with prefill(SHAPE, settings=settings, seed=SEED) as sender:
        say(f"port {sender.endpoint.control_port}")
        for line in sys.stdin:
            verb, *rest = line.split()
            room = int(rest[0]) if rest else 0
            if verb == "expect":
                sender.endpoint.expect_room(room)
            elif verb == "ready":
                sender.events.wait_for("ready", room)
                say(f"ready {room}")
            elif verb == "send":
                sender.send(room, [room], is_last=rest[1:] != ["part"])
            else:
                say(f"{verb} {sender.events.wait_for(verb, room)[2:]}")


def _bind_control_to(port: int) -> None:
    """The control socket takes a free port; a successor takes its predecessor's."""
    import zmq

    taken: list[int] = []
    anywhere = zmq.Socket.bind_to_random_port

    def bind(self: Any, address: str) -> int:
        if taken:
            return anywhere(self, address)
        taken.append(port)
        self.bind(f"{address}:{port}")
        return port

    zmq.Socket.bind_to_random_port = bind  # type: ignore[method-assign,assignment]


def receive(port: int, settings: Any) -> None:
    with decode(SHAPE, settings=settings) as receiver:
        say(f"port {port}")
        for line in sys.stdin:
            verb, *rest = line.split()
            room = int(rest[0])
            if verb == "open":
                receiver.open(room, [(HOST, port)], [room])
                say(f"opened {room}")
            else:
                say(f"{verb} {receiver.events.wait_for(verb, room)[2:]}")


if __name__ == "__main__":
    chosen = SAME_HOST if sys.argv[3] == "1" else IMPATIENT
    {"prefill": serve, "decode": receive}[sys.argv[1]](int(sys.argv[2]), chosen)

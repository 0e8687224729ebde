"""A prefill or decode process of its own, which the test talks to by lines and may kill or stop.

``python -m transfer_child prefill PORT`` serves rooms as they come: whichever room is ready gets
the pages of its number. ``... decode PORT`` opens rooms at that port when told to.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from transfer_pair import DEADLINE_S, HOST, IMPATIENT, SAME_HOST, Pool, Shape, decode, prefill

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from transfer_pair import Decode

SEED = 1
SHAPE = Shape(num_pages=64)


class Child:
    """The other end of the process. Killed at the latest when left."""

    def __init__(
        self,
        role: str,
        port: int = 0,
        *,
        same_host: bool = False,
        host: str = HOST,
        prefix: Sequence[str] = (),
    ) -> None:
        """``prefix``: a command that runs the process elsewhere, where it binds to ``host``."""
        arguments = ("-m", "transfer_child", role, str(port), str(int(same_host)))
        paths = os.pathsep.join(filter(None, sys.path))
        self.host = host
        self.process = subprocess.Popen(
            [*prefix, sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": paths, "TRANSFER_TEST_HOST": host},
        )
        self._buffered = b""
        self.port = int(self.wait_for("port").split()[1])

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order.encode() + b"\n")

    def wait_for(self, start: str) -> str:
        """The next line that begins so; fails when it dies or is silent for too long."""
        while True:
            line = self._line()
            if line.startswith(start):
                return line

    def _line(self) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        while b"\n" not in self._buffered:
            ready, _, _ = select.select([stdout], [], [], DEADLINE_S)
            assert ready, "the process is silent"
            piece = stdout.read(65536)
            assert piece, f"the process ended with {self.process.wait(DEADLINE_S)}"
            self._buffered += piece
        line, _, self._buffered = self._buffered.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def hand_over(child: Child, receiver: Decode, room: int) -> None:
    """A room from a prefill process, checked byte for byte."""
    child.tell(f"expect {room}")
    receiver.open(room, [child.address], [room])
    child.tell(f"ready {room}")
    child.wait_for(f"ready {room}")
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
        say(f"pool {sender.pool.kv[0, 0, 0, :8].tobytes().hex()}")
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

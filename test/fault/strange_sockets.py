"""What speaks a protocol by hand, to say what nobody of ours would."""

from __future__ import annotations

from typing import Any, Self

import zmq

TIMEOUT_MS = 20_000


class Stranger:
    """Sockets that hear and say what a test wants, closed with it."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = TIMEOUT_MS
        return socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.context.destroy(linger=0)

"""The receiving process: a decode endpoint per way, and the plain sockets' other end."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import zmq

from sglang_tiered.integration.platforms.processes import keep_freed_memory
from sglang_tiered.transfer.decode import DecodeEndpoint
from sglang_tiered.wire.keys import load_keys
from transfer_bench.mooncake import MooncakeEnd
from transfer_bench.pools import Pool, Shape, cpu_seconds, prompt_pages
from transfer_bench.raw_sockets import receive_frames, receive_pages, receive_prompt

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from sglang_tiered.config import TransferConfig

DEADLINE_S = 60.0
MODEL = bytes(32)  # of both ends


class _Received:
    """Wakes whoever waits for a room."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rooms: dict[int, str] = {}

    def room_done(self, room: int) -> None:
        self._note(room, "")

    def room_failed(self, room: int, reason: str) -> None:
        self._note(room, reason)

    def wait_for(self, room: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: room in self._rooms, DEADLINE_S):
                raise TimeoutError(f"room {room} did not arrive within {DEADLINE_S:.0f} s")
            if self._rooms[room]:
                raise RuntimeError(self._rooms[room])

    def _note(self, room: int, outcome: str) -> None:
        with self._changed:
            self._rooms[room] = outcome
            self._changed.notify_all()


def serve(pipe: Connection, shape: Shape) -> None:
    """Answer commands until ``("stop",)``. Runs in a process of its own."""
    keep_freed_memory()  # as in a server
    pool, received = Pool(shape, filled=False), _Received()
    endpoints: dict[str, DecodeEndpoint] = {}
    connections: dict[str, socket.socket] = {}
    frames: zmq.Socket[bytes] | None = None
    while True:
        match pipe.recv():
            case ("endpoint", name, settings, keys):
                endpoints[name] = _endpoint(pool, received, settings, keys)
                pipe.send("ready")
            case ("open", name, room, address, seed):
                pages = prompt_pages(shape, seed)
                before = cpu_seconds()
                endpoints[name].open_room(
                    room,
                    [address],
                    pages=pages,
                    state_rows=[],
                    aux_row=0,
                    prefix_tokens=0,
                    num_receivers=1,
                )
                received.wait_for(room)
                _answer(pipe, pool, pages, before)
                endpoints[name].close_room(room)
            case ("raw" | "pages" as way, port, seed):
                pages = prompt_pages(shape, seed)
                if way not in connections:
                    connections[way] = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
                before = cpu_seconds()
                receive = receive_pages if way == "pages" else receive_prompt
                receive(connections[way], pool, pages)
                _answer(pipe, pool, pages, before)
            case ("frames", port, seed):
                pages = prompt_pages(shape, seed)
                if frames is None:
                    frames = zmq.Context.instance().socket(zmq.PAIR)
                    frames.connect(f"tcp://127.0.0.1:{port}")
                frames.send(b"ready")
                before = cpu_seconds()
                receive_frames(frames, pool, pages)
                _answer(pipe, pool, pages, before)
            case ("mooncake",):
                mooncake = MooncakeEnd(pool)
                pipe.send((mooncake.session, mooncake.base))
            case ("mooncake", seed):
                before = cpu_seconds()
                pipe.send("ready")
                pipe.recv()  # all is written
                _answer(pipe, pool, prompt_pages(shape, seed), before)
            case ("stop",):
                break
    for endpoint in endpoints.values():
        endpoint.close()
    for connection in connections.values():
        connection.close()


def _answer(pipe: Connection, pool: Pool, pages: Any, cpu_before: float) -> None:
    """What it cost here and what arrived; then the pool is as empty as before."""
    pipe.send((cpu_seconds() - cpu_before, 0))
    pipe.send(pool.digest(pages))
    pool.array[:] = 0


def _endpoint(
    pool: Pool, received: Any, settings: TransferConfig, keys: Path | None
) -> DecodeEndpoint:
    endpoint = DecodeEndpoint(
        server="decode",
        layout=pool.layout,
        memories=pool.memories,
        listener=received,
        on_lost=lambda *_: None,
        settings=settings,
        keys=None if keys is None else load_keys(keys, "decode"),
    )
    endpoint.set_model(MODEL)
    return endpoint

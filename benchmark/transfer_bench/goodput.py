"""How fast a prompt's pages come over, by each way, in turns, and what that costs in CPU time."""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from sglang_tiered.config import TransferConfig
from sglang_tiered.integration.platforms.processes import keep_freed_memory
from sglang_tiered.transfer.prefill import PrefillEndpoint
from sglang_tiered.transfer.send_queue import Chunk
from sglang_tiered.wire.keys import load_keys, make_keys
from transfer_bench import decode_process
from transfer_bench.mooncake import MooncakeEnd
from transfer_bench.pools import Pool, Shape, cpu_seconds, prompt_pages
from transfer_bench.raw_sockets import send_frames, send_pages, send_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from sglang_tiered.transfer.memory import PagedMemory

DEADLINE_S = 60.0
RAW = "raw sockets"
PAGES = "raw sockets, page by page"
ZEROMQ = "raw ZeroMQ"
MOONCAKE = "mooncake tcp"
TCP = TransferConfig(same_host=False)
WAYS: dict[str, tuple[TransferConfig, bool]] = {
    "tcp": (TCP, False),
    "tcp, 2 connections": (msgspec.structs.replace(TCP, num_connections=2), False),
    "tcp, keys": (TCP, True),
    "tcp, all encrypted": (msgspec.structs.replace(TCP, encrypt_data=True), True),
    "same host": (TransferConfig(), False),
}


@dataclass
class Samples:
    """Seconds and CPU seconds of both processes, per prompt."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class _Events:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seen: set[tuple[str, int]] = set()
        self._failed: dict[int, str] = {}

    def room_ready(self, room: int, prefix_tokens: int) -> None:
        self._note("ready", room)

    def room_dropped(self, room: int) -> None:
        """It ended before."""

    def room_done(self, room: int) -> None:
        self._note("done", room)

    def room_failed(self, room: int, reason: str) -> None:
        self._failed[room] = reason
        self._note("failed", room)

    def wait_for(self, kind: str, room: int) -> None:
        with self._changed:
            done = {(kind, room), ("failed", room)}
            if not self._changed.wait_for(lambda: self._seen & done, DEADLINE_S):
                raise TimeoutError(f"room {room} was not {kind} within {DEADLINE_S:.0f} s")
        if room in self._failed:
            raise RuntimeError(self._failed[room])

    def _note(self, kind: str, room: int) -> None:
        with self._changed:
            self._seen.add((kind, room))
            self._changed.notify_all()


def measure(
    shape: Shape,
    num_rounds: int,
    ways: list[str],
    source: Callable[[Pool], PagedMemory] | None = None,
) -> dict[str, Samples]:
    """Samples of plain sockets and of each way (``WAYS``, ``PAGES``, ``ZEROMQ`` or ``MOONCAKE``),
    one prompt each in turns; the first turn, which connects, is not counted. ``source``: where the
    sender's pages are, if not in host memory. Raises when a byte differs."""
    keep_freed_memory()  # as in a server
    samples = {name: Samples() for name in (RAW, *ways)}
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=decode_process.serve, args=(theirs, shape), daemon=True)
    process.start()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        pool = Pool(shape, filled=True)
        if source is not None:
            pool.memories = replace(pool.memories, kv=source(pool))
        keys = Path(folder) / "keys"
        make_keys(keys)
        endpoints = {name: _Sender(name, pool, pipe, keys) for name in ways if name in WAYS}
        senders: dict[str, Any] = {RAW: _RawSender("raw", pool, pipe, server), **endpoints}
        if PAGES in ways:
            senders[PAGES] = _RawSender("pages", pool, pipe, server)
        if ZEROMQ in ways:
            senders[ZEROMQ] = _FramesSender(pool, pipe)
        if MOONCAKE in ways:
            senders[MOONCAKE] = _MooncakeSender(pool, pipe)
        try:
            for number in range(num_rounds + 1):
                for name in _rotated(list(samples), number):
                    seconds, cpu = senders[name].send(seed=number + 1)
                    if number:
                        samples[name].seconds.append(seconds)
                        samples[name].cpu.append(cpu)
        finally:
            pipe.send(("stop",))
            for endpoint in endpoints.values():
                endpoint.close()
            process.join(DEADLINE_S)
    return samples


class _Sender:
    """One way: a prefill endpoint here and a decode endpoint there."""

    _next_room = 1

    def __init__(self, name: str, pool: Pool, pipe: Connection, keys: Path) -> None:
        settings, has_keys = WAYS[name]
        self._name, self._pool, self._pipe, self._events = name, pool, pipe, _Events()
        self._endpoint = PrefillEndpoint(
            host="127.0.0.1",
            server=name,
            layout=pool.layout,
            memories=pool.memories,
            rank=0,
            listener=self._events,
            on_ready=self._events.room_ready,
            settings=settings,
            keys=load_keys(keys, "prefill") if has_keys else None,
        )
        self._endpoint.set_model(decode_process.MODEL)
        pipe.send(("endpoint", name, settings, keys if has_keys else None))
        pipe.recv()

    def send(self, seed: int) -> tuple[float, float]:
        """Seconds from the send to the last confirmation, and CPU seconds of both processes."""
        room = _Sender._next_room
        _Sender._next_room += 1
        # Other pages than the receiver's, in another order.
        pages = prompt_pages(self._pool.shape, seed + 1000)
        self._endpoint.expect_room(room)
        address = ("127.0.0.1", self._endpoint.control_port)
        self._pipe.send(("open", self._name, room, address, seed))
        self._events.wait_for("ready", room)
        begun, cpu = time.perf_counter(), cpu_seconds()
        self._endpoint.send_chunk(room, Chunk(pages, 0, True, (), 0))
        self._events.wait_for("done", room)
        seconds, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
        return seconds, cpu + _checked(self._pipe, self._pool, pages)

    def close(self) -> None:
        self._endpoint.close()


class _RawSender:
    """Plain sockets: all of a prompt in slabs (``raw``), or each page by itself (``pages``)."""

    def __init__(self, way: str, pool: Pool, pipe: Connection, server: socket.socket) -> None:
        self._way, self._pool, self._pipe, self._server = way, pool, pipe, server
        self._connection: socket.socket | None = None

    def send(self, seed: int) -> tuple[float, float]:
        pages = prompt_pages(self._pool.shape, seed + 1000)
        self._pipe.send((self._way, self._server.getsockname()[1], seed))
        if self._connection is None:
            self._connection, _ = self._server.accept()
        begun, cpu = time.perf_counter(), cpu_seconds()
        send = send_pages if self._way == "pages" else send_prompt
        send(self._connection, self._pool, pages)
        seconds, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
        return seconds, cpu + _checked(self._pipe, self._pool, pages)


class _FramesSender:
    """ZeroMQ alone, with nothing checked, confirmed or bounded."""

    def __init__(self, pool: Pool, pipe: Connection) -> None:
        self._pool, self._pipe = pool, pipe
        self._connection = zmq.Context.instance().socket(zmq.PAIR)
        self._port = self._connection.bind_to_random_port("tcp://127.0.0.1")

    def send(self, seed: int) -> tuple[float, float]:
        pages = prompt_pages(self._pool.shape, seed + 1000)
        self._pipe.send(("frames", self._port, seed))
        self._connection.recv()
        begun, cpu = time.perf_counter(), cpu_seconds()
        send_frames(self._connection, self._pool, pages)
        seconds, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
        return seconds, cpu + _checked(self._pipe, self._pool, pages)


class _MooncakeSender:
    """Mooncake's engine here, which writes into the pool there."""

    def __init__(self, pool: Pool, pipe: Connection) -> None:
        self._pool, self._pipe, self._end = pool, pipe, MooncakeEnd(pool)
        pipe.send(("mooncake",))
        self._session, self._base = pipe.recv()

    def send(self, seed: int) -> tuple[float, float]:
        shape = self._pool.shape
        pages, destinations = prompt_pages(shape, seed + 1000), prompt_pages(shape, seed)
        self._pipe.send(("mooncake", seed))
        self._pipe.recv()
        begun, cpu = time.perf_counter(), cpu_seconds()
        self._end.write(self._session, self._base, pages, destinations)
        seconds, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
        self._pipe.send("written")
        return seconds, cpu + _checked(self._pipe, self._pool, pages)


def _checked(pipe: Connection, pool: Pool, pages: Any) -> float:
    """The receiver's CPU seconds, once its bytes are known to be ours."""
    cpu: float = pipe.recv()[0]
    if pipe.recv() != pool.digest(pages):
        raise RuntimeError("the bytes that arrived are not those that were sent")
    return cpu


def _rotated(names: list[str], by: int) -> Iterator[str]:
    """Everyone goes first in turn."""
    for index in range(len(names)):
        yield names[(index + by) % len(names)]
